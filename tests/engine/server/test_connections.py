"""Connections that stall, in either direction, and heads that never end."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pagefleet_engine.server import http_protocol

from tests.engine.server.conftest import MODEL, LiveServer

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


SOON_S = 2.0
"""Not so soon that a busy machine has no time for a head."""


def connect(server: LiveServer, receive_buffer: int | None = None) -> socket.socket:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect((host, int(port)))
    return sock


def read_what_is_left(sock: socket.socket) -> bytes:
    received = b""
    try:
        while part := sock.recv(1 << 20):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTT", b"GET /livez HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_a_head_that_never_ends_is_cut(
    start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    server = start_server()
    started = time.monotonic()
    with connect(server) as sock:
        sock.sendall(sent)
        assert sock.recv(1) == b""
        assert time.monotonic() - started >= 0.15


def test_the_second_head_of_a_connection_is_watched_too(
    start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", SOON_S)
    with connect(start_server()) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            part = sock.recv(4096)
            assert part, "the first head was slow"
            received += part
        time.sleep(1.5 * SOON_S)  # idle between requests is no slow head
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n")
        assert sock.recv(4096) == b""


def test_a_slow_body_is_not_a_slow_head(
    start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", SOON_S)
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    with connect(start_server()) as sock:
        sock.sendall(HEAD % len(body) + body[:5])
        time.sleep(1.5 * SOON_S)
        sock.sendall(body[5:])
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_reader_that_never_reads_is_cut(
    start_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "WRITE_STALL_S", 0.3)
    server = start_server()
    body = json.dumps({"model": MODEL, "prompt": "x", "n": 128, "max_tokens": 250, "stream": True}).encode()
    with connect(server, receive_buffer=4096) as sock:
        sock.sendall(HEAD % len(body) + body)
        server.wait_until(lambda: len(server.engine.seen) == 128 and not server.engine.running)
        route = 'route="/v1/completions",status="200"} 1.0'
        server.wait_until(lambda: route in server.http.get("/metrics").text)
        assert b"[DONE]" not in read_what_is_left(sock)
    assert server.complete().status_code == 200


@pytest.mark.parametrize("pause_after", [None, 60, 200])
def test_an_offer_of_http2_costs_the_body_nothing(
    start_server: Callable[..., LiveServer], pause_after: int | None
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "Upgrade: h2c\r\n\r\n", "max_tokens": 2}).encode()
    offer = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    request = (HEAD % len(body)).removesuffix(b"\r\n\r\n") + offer + body
    server = start_server()
    with connect(server) as sock:
        for _ in range(2):  # the connection goes on
            sock.sendall(request[:pause_after])
            if pause_after is not None:
                time.sleep(0.05)
                sock.sendall(request[pause_after:])
            received = b""
            while b"completion_tokens" not in received:
                received += sock.recv(65536)
            assert received.startswith(b"HTTP/1.1 200"), received
    assert server.engine.seen[-1][1] == list(b"Upgrade: h2c\r\n\r\n")


def test_a_stranger_is_refused_before_his_body(start_server: Callable[..., LiveServer], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("right\n")
    with connect(start_server(api_key_file=str(tmp_path / "keys"))) as sock:
        sock.sendall(HEAD % 8_000_000)
        assert sock.recv(65536).startswith(b"HTTP/1.1 401")
