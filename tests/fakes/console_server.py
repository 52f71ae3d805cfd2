"""A server that stands for a router, as the console sees it: its page, a fleet's state, chats that a test scripts.

No test in here.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any

import msgspec
from pagefleet_console.pages import read_pages
from pagefleet_protocol.console_state import STATE_PATH, ConsoleState, EngineState, Seconds, ServiceState, encode_state

Chat = Callable[[Mapping[str, Any]], Iterator[bytes | float]]
"""From a request's body to what is sent: bytes as they are, and numbers, which are seconds to wait."""
PAGES = read_pages()


def event(delta: Mapping[str, Any], *, tokens: int | None = None, finish: str | None = None) -> bytes:
    """Write one event of a chat stream."""
    body: dict[str, Any] = {"model": "tiny", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if tokens is not None:
        details = {"cached_tokens": 8}
        body["usage"] = {"prompt_tokens": 20, "completion_tokens": tokens, "prompt_tokens_details": details}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def says(*pieces: str, finish: str = "stop") -> Chat:
    """Answer with these pieces."""

    def chat(_: Mapping[str, Any]) -> Iterator[bytes | float]:
        for index, piece in enumerate(pieces):
            yield event({"content": piece}, tokens=index + 1)
        yield event({}, tokens=len(pieces), finish=finish)
        yield DONE

    return chat


def engine(name: str, **changes: Any) -> EngineState:
    """Return a ready engine with plausible figures."""
    plain = EngineState(
        name=name, url=f"http://{name}:8000", model="tiny", role="both", revision="6f1d2c8ab0", phase="ready",
        reason=None, load=None, running=6, waiting=0, max_running=64, prompt_tokens_s=5210.0, generated_tokens_s=412.5,
        kv_usage=0.41, prefix_hit_ratio=0.68, ttft=Seconds(p50=0.081, p95=0.212), faults=0,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def state(engines: Sequence[EngineState], **changes: Any) -> ConsoleState:
    """Return a router's document about these engines."""
    service = ServiceState(name="tiny", namespace="models", models=("tiny",), version="0.1.0")
    plain = ConsoleState(
        at="2026-11-22T12:00:00Z", source="router", tenant=None, workers=2, service=service, engines=tuple(engines)
    )
    return msgspec.structs.replace(plain, **changes)


@dataclass
class Seen:
    """One request as it came."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class ConsoleServer:
    """What a test may change while it runs, and what it may look at."""

    state: ConsoleState | None = field(default_factory=lambda: state([engine("tiny-0"), engine("tiny-1")]))
    """None: 404, as of a server without a console."""
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "tiny", "max_model_len": 2048}])
    chat: Chat = field(default_factory=lambda: says("Hello", " there."))
    refusal: tuple[int, dict[str, Any]] | None = None
    """The status and the error that chats are answered with."""
    key: str | None = None
    explains: list[dict[str, Any]] | None = None
    begins_early: bool = False
    """Chats begin before they have an engine, which a comment tells then."""
    seen_by_page: threading.Event = field(default_factory=threading.Event)
    """Set by a test once its page shows what came: scripts of chats wait for it, by `until_seen`."""
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """Further files, with their types: modules of tests."""
    seen: list[Seen] = field(default_factory=list)
    broken_pipes: int = 0
    """Answers whose client left."""

    address: str = ""

    def start(self) -> None:
        """Listen on loopback, at `address`."""
        outer = self

        class Handler(_Handler):
            console = outer

        self._server = _Listener(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def until_seen(self) -> None:
        """Hold a chat back until the test says so, and wait anew the next time."""
        assert self.seen_by_page.wait(300)
        self.seen_by_page.clear()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def asked(self, path: str) -> list[Seen]:
        return [one for one in self.seen if one.target.partition("?")[0] == path]


class _Listener(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Overlook a browser that leaves in the middle of an answer; all else is told."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    console: ConsoleServer

    def log_message(self, *_: Any) -> None:
        """Say nothing: the test looks at `seen`."""

    def do_GET(self) -> None:
        path = self._note(None)
        page = PAGES.get(path)
        if page is not None:
            answer = page.answer(self.headers.get("accept-encoding"), self.headers.get("if-none-match"))
            self._send(answer.status, answer.headers, answer.body)
        elif path in self.console.files:
            kind, body = self.console.files[path]
            self._send(200, {"content-type": kind}, body)
        elif self._knows_key():
            self._data(path)

    def _data(self, path: str) -> None:
        if path == "/v1/models":
            self._json(200, {"object": "list", "data": self.console.models})
        elif path == STATE_PATH and self.console.state is not None:
            etag, body = encode_state(self.console.state)
            if self.headers.get("if-none-match") == etag:
                self._send(304, {"etag": etag}, b"")
            else:
                self._send(200, {"content-type": "application/json", "etag": etag}, body)
        else:
            self._json(404, {"error": {"message": f"Unknown URL: {path}", "code": "unknown_url"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._note(body)
        if not self._knows_key():
            return
        if self.console.refusal is not None:
            status, error = self.console.refusal
            self._json(status, {"error": error})
            return
        self._stream(body)

    def _stream(self, body: Mapping[str, Any]) -> None:
        about = {"x-pagefleet-engine": "tiny-1"}
        if self.console.explains is not None:
            about["x-pagefleet-explain"] = json.dumps(self.console.explains)
        headers = {
            "content-type": "text/event-stream",
            "x-request-id": "req-0123456789",
            "transfer-encoding": "chunked",
        }
        self.send_response(200)
        for name, value in (headers if self.console.begins_early else headers | about).items():
            self.send_header(name, value)
        self.end_headers()
        comment = "".join(f": {name}: {value}\n" for name, value in about.items()).encode() + b"\n"
        try:
            for piece in chain([comment] if self.console.begins_early else [], self.console.chat(body)):
                if isinstance(piece, float):
                    time.sleep(piece)
                elif piece:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionAbortedError:
            self.close_connection = True  # the script breaks the stream: no last chunk
        except OSError:
            self.console.broken_pipes += 1
            self.close_connection = True

    def _note(self, body: Any) -> str:
        self.console.seen.append(Seen(self.command, self.path, dict(self.headers), body))
        return self.path.partition("?")[0]

    def _knows_key(self) -> bool:
        if self.console.key is None or self.headers.get("authorization") == f"Bearer {self.console.key}":
            return True
        self._json(401, {"error": {"message": "Incorrect API key provided.", "code": "invalid_api_key"}})
        return False

    def _json(self, status: int, body: Any) -> None:
        self._send(status, {"content-type": "application/json"}, json.dumps(body).encode())

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
