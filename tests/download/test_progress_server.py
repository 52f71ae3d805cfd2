"""`GET /progress`: a few numbers, whoever asks and however."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import msgspec
import pytest
from pagefleet_download.cli import serve_progress
from pagefleet_download.errors import BadSettings
from pagefleet_download.progress import ProgressMeter
from pagefleet_protocol.model_facts import Progress


async def raw(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    if not request.endswith(b"\r\n\r\n"):
        writer.write_eof()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def test_the_numbers_are_those_of_the_moment() -> None:
    async def ask() -> list[Progress]:
        meter = ProgressMeter()
        seen = []
        async with serve_progress("127.0.0.1", 0, meter.snapshot) as port, aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.get(f"http://127.0.0.1:{port}/progress") as answer:
                    assert answer.content_type == "application/json"
                    seen.append(msgspec.json.decode(await answer.read(), type=Progress))
                meter.begin("downloading")
                meter.expect(100, 3)
                meter.add_bytes(70)
                meter.add_bytes(-20)
                meter.add_files()
        return seen

    assert asyncio.run(ask()) == [Progress(), Progress("downloading", 50, 100, 1, 3)]


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK", b"ok\n"),
        (b"HEAD /progress HTTP/1.1\r\n\r\n", b"200 OK", b""),
        (b"GET /progress?x=1 HTTP/1.0\r\n\r\n", b"200 OK", b'"phase":"listing"'),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", b"404 Not Found", b"/progress"),
        (b"POST /progress HTTP/1.1\r\n\r\n", b"405 Method Not Allowed", b"GET only"),
        (b"\xff\xfe\x00 nonsense\r\n\r\n", b"405 Method Not Allowed", b"GET only"),
    ],
)
def test_every_request_gets_an_answer_and_an_end(request_bytes: bytes, status: bytes, body: bytes) -> None:
    async def ask() -> bytes:
        async with serve_progress("127.0.0.1", 0, ProgressMeter().snapshot) as port:
            return await raw(port, request_bytes)

    head, _, rest = asyncio.run(ask()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert b"Connection: close" in head
    assert body in rest


@pytest.mark.parametrize("request_bytes", [b"", b"GET /progress", b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n"])
def test_what_is_no_request_is_hung_up_on_and_harms_nobody(request_bytes: bytes) -> None:
    async def ask() -> tuple[bytes, bytes]:
        async with serve_progress("127.0.0.1", 0, ProgressMeter().snapshot) as port:
            try:
                first = await raw(port, request_bytes)
            except ConnectionError:
                first = b""
            return first, await raw(port, b"GET /livez HTTP/1.1\r\n\r\n")

    first, second = asyncio.run(ask())
    assert first == b""
    assert second.endswith(b"ok\n")


def test_a_port_that_is_taken() -> None:
    async def serve(port: int) -> None:
        async with serve_progress("127.0.0.1", port, ProgressMeter().snapshot):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadSettings, match=f"port {port} cannot be listened on"):
            asyncio.run(serve(port))
