"""How requests end that do not run their course: the client leaves, the engine fails, the server stops."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pagefleet_engine.engine_core.progress import EngineHealth
from pagefleet_engine.errors import EngineDead, InvalidRequest, OwnFailure, QueueFull, RequestFailed, StepOutOfMemory

from tests.engine.server.conftest import MODEL, LiveServer
from tests.fakes.scripted_engine import answer

BODY: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 100}


class OpenStream:
    """A streamed request in a thread: its events as they come, and how it ended."""

    def __init__(self, server: LiveServer, **fields: Any) -> None:
        self.lines: list[str] = []
        self.ended_at: float | None = None
        self._server, self._fields = server, fields
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with (
            httpx.Client(base_url=self._server.url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json={**BODY, "stream": True, **self._fields}) as response,
        ):
            self.lines += [line for line in response.iter_lines() if line]
        self.ended_at = time.monotonic()

    def join(self) -> None:
        self._thread.join(60)
        assert self.ended_at is not None


def send_raw(server: LiveServer, **fields: Any) -> socket.socket:
    """Send a completion request and leave the answer unread."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=60)
    body = json.dumps({**BODY, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + body)
    return sock


@pytest.mark.parametrize("hold_after", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_requests(
    start_server: Callable[..., LiveServer], hold_after: int, stream: bool, n: int
) -> None:
    server = start_server()
    server.engine.hold_after = hold_after
    sock = send_raw(server, stream=stream, n=n)
    server.wait_until(lambda: len(server.engine.running) == n)
    if stream and hold_after:
        assert sock.recv(1024).startswith(b"HTTP/1.1 200 ")
    sock.close()
    server.wait_until(lambda: not server.engine.running)
    assert len(server.engine.aborted) == n
    status = "200" if stream and hold_after else "499"
    lines = (
        f'requests_finished_total{{finish_reason="abort",model_name="scripted"}} {n}.0',
        f'http_requests_total{{model_name="scripted",route="/v1/completions",status="{status}"}} 1.0',
    )
    # They follow the end, in the server's thread.
    server.wait_until(lambda: all(line in server.http.get("/metrics").text for line in lines))


def test_a_client_that_half_closes_has_left(start_server: Callable[..., LiveServer]) -> None:
    server = start_server()
    server.engine.hold_after = 1
    with send_raw(server, stream=True) as sock:
        server.wait_until(lambda: bool(server.engine.running))
        sock.shutdown(socket.SHUT_WR)
        server.wait_until(lambda: not server.engine.running)


def test_a_body_cut_short_leaves_nothing_behind(start_server: Callable[..., LiveServer]) -> None:
    server = start_server()
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        sock.sendall(b'content-length: 100\r\n\r\n{"model":')
    server.wait_until(lambda: 'status="400"} 1.0' in server.http.get("/metrics").text)
    assert server.engine.seen == []


FAILURES: list[tuple[Exception, int, str]] = [
    (InvalidRequest("Bad words.", "bad_words", "invalid_value"), 400, "invalid_value"),
    (QueueFull("4096 requests are waiting.", 2.4), 429, "queue_full"),
    (RequestFailed("logits at 0xdeadbeef in /pagefleet_engine/x.py"), 500, "request_failed"),
    (OwnFailure("logits at 0xdeadbeef in /pagefleet_engine/x.py"), 500, "request_failed"),
    (StepOutOfMemory("Lower --max-num-seqs."), 500, "out_of_memory"),
    (EngineDead("The engine stopped."), 503, "engine_dead"),
    (ZeroDivisionError("at 0xdeadbeef in /pagefleet_engine/x.py"), 500, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "code"), FAILURES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_failures_before_the_first_token_have_a_true_status(
    start_server: Callable[..., LiveServer], error: Exception, status: int, code: str, stream: bool, n: int
) -> None:
    server = start_server()
    server.engine.fail_after = (0, error)
    response = server.complete(stream=stream, n=n)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "0xdead" not in response.text
    assert ".py" not in response.text
    assert response.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)
    assert response.headers.get("connection") == ("close" if code == "engine_dead" else None)
    is_own = isinstance(error, OwnFailure | ZeroDivisionError)
    assert response.headers.get("x-pagefleet-fault") == ("request" if is_own else None)
    assert not server.engine.running


@pytest.mark.parametrize(("error", "status", "code"), [FAILURES[0], *FAILURES[2:]], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("n", [1, 3])
def test_failures_in_a_stream_are_its_last_event(
    start_server: Callable[..., LiveServer], error: Exception, status: int, code: str, n: int
) -> None:
    server = start_server()
    server.engine.fail_after = (3, error)
    *chunks, last = [block for block in server.complete(stream=True, n=n, max_tokens=8).text.split("\n\n") if block]
    assert all('"choices"' in chunk for chunk in chunks)
    envelope = json.loads(last.removeprefix("data: "))
    assert set(envelope) == {"error"}
    assert envelope["error"]["code"] == code
    assert "0xdead" not in last
    server.wait_until(lambda: not server.engine.running)


def test_the_official_client_sees_the_error_in_a_stream(start_server: Callable[..., LiveServer]) -> None:
    server = start_server()
    server.engine.fail_after = (3, EngineDead("The engine stopped."))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="Hello", stream=True)
        seen = [next(stream).choices[0].text for _ in range(3)]
        with pytest.raises(openai.APIError, match="engine stopped"):
            next(stream)
    assert "".join(seen) == answer("Hello", 3)


def test_our_own_bugs_are_logged_with_the_request_id(
    start_server: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    server.engine.fail_after = (0, ZeroDivisionError("the cause"))
    with caplog.at_level(logging.ERROR, "pagefleet_engine"):
        response = server.complete()
    request_id = response.headers["x-request-id"]
    assert request_id in response.json()["error"]["message"]
    (record,) = [record for record in caplog.records if record.name.startswith("pagefleet_engine")]
    assert request_id in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


def test_the_access_log_holds_no_text(
    start_server: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(access_log=True)
    with caplog.at_level(logging.INFO, "pagefleet_engine.access"):
        server.complete(prompt="secret")
        server.http.get("/nothing/secret?secret=1", headers={"x-request-id": "mine"})
        # A line follows its answer, in the server's thread.
        server.wait_until(lambda: any(record.getMessage().startswith("mine ") for record in caplog.records))
    lines = [record.getMessage() for record in caplog.records if record.name == "pagefleet_engine.access"]
    assert any("POST /v1/completions 200 " in line for line in lines)
    assert any(line.startswith("mine GET other 404 ") for line in lines)
    assert not any("secret" in line for line in lines)


def test_a_drain_waits_for_what_runs(start_server: Callable[..., LiveServer]) -> None:
    server = start_server(drain_timeout=60.0)
    server.engine.hold_after = 2
    stream = OpenStream(server)
    server.wait_until(lambda: bool(server.engine.running))
    server.signal()
    server.wait_until(lambda: server.http.get("/readyz").status_code == 503)
    assert server.http.get("/livez").status_code == 200
    refused = server.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "server_shutting_down"
    assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
    server.call(server.engine.go_on.set)
    stream.join()
    assert stream.lines[-1] == "data: [DONE]"
    assert server.join() == 0


def test_a_drain_waits_for_what_is_on_its_way_to_other_engines(start_server: Callable[..., LiveServer]) -> None:
    server = start_server(drain_timeout=60.0)
    server.call(server.engine.owes_nothing.clear)
    assert server.complete().status_code == 200
    server.signal()
    server.wait_until(lambda: server.engine.is_draining)
    server.wait_until(lambda: server.http.get("/readyz").status_code == 503)
    assert server.status is None
    server.call(server.engine.owes_nothing.set)
    assert server.join() == 0


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_what_is_left_after_a_drain_ends_with_an_error(start_server: Callable[..., LiveServer], how: str) -> None:
    server = start_server(drain_timeout=0.3 if how == "timeout" else 300.0)
    server.engine.hold_after = 2
    stream, whole = OpenStream(server), []
    asking = threading.Thread(target=lambda: whole.append(server.http.post("/v1/completions", json=BODY)))
    asking.start()
    server.wait_until(lambda: len(server.engine.running) == 2)
    started = time.monotonic()
    server.signal()
    if how == "second signal":
        server.signal()
    assert server.join() == 0
    assert time.monotonic() - started < 300
    stream.join()
    asking.join(60)
    assert json.loads(stream.lines[-1].removeprefix("data: "))["error"]["code"] == "server_shutting_down"
    assert whole[0].status_code == 503
    assert whole[0].json()["error"]["code"] == "server_shutting_down"
    assert len(server.engine.aborted) == 2


def test_an_idle_server_stops_at_once(start_server: Callable[..., LiveServer]) -> None:
    server = start_server(drain_timeout=60.0)
    server.http.get("/livez")  # a connection that is kept alive
    started = time.monotonic()
    server.signal()
    assert server.join() == 0
    assert time.monotonic() - started < 30


def test_a_dead_engine_ends_the_process(start_server: Callable[..., LiveServer]) -> None:
    server = start_server(drain_timeout=60.0)
    server.engine.pause_s = 0.01
    server.engine.fail_after = (10, EngineDead("The engine stopped."))
    stream = OpenStream(server)
    server.wait_until(lambda: bool(server.engine.seen))
    server.call(server.engine_died.set)
    assert server.join() == 1
    stream.join()
    assert json.loads(stream.lines[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"


@pytest.mark.parametrize(
    ("health", "ready", "live"),
    [
        (EngineHealth(alive=True, stalled_s=9.0), 200, 200),
        (EngineHealth(alive=True, stalled_s=11.0), 503, 200),
        (EngineHealth(alive=True, stalled_s=61.0), 503, 503),
        (EngineHealth(alive=False, stalled_s=0.0), 503, 503),
    ],
)
def test_probes_look_at_progress(
    start_server: Callable[..., LiveServer], health: EngineHealth, ready: int, live: int
) -> None:
    server = start_server()
    server.engine.now_health = health
    assert server.http.get("/readyz").status_code == ready
    assert server.http.get("/health").status_code == ready
    assert server.http.get("/livez").status_code == live


def test_too_many_requests_at_once_are_refused(start_server: Callable[..., LiveServer]) -> None:
    server = start_server()
    server.engine.hold_after = 0
    sockets = [send_raw(server) for _ in range(256)]
    server.wait_until(lambda: len(server.engine.running) == 256)
    refused = server.complete()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert server.http.get("/readyz").status_code == 200
    for sock in sockets:
        sock.close()
    server.wait_until(lambda: not server.engine.running)
    server.engine.hold_after = None
    assert server.complete().status_code == 200


def test_a_slow_reader_holds_up_nobody(start_server: Callable[..., LiveServer]) -> None:
    server = start_server()
    with send_raw(server, stream=True, n=16, max_tokens=200):
        server.wait_until(lambda: len(server.engine.seen) == 16 and not server.engine.running)
        assert server.complete().status_code == 200
