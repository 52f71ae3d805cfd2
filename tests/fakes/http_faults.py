"""A small HTTP server on the loopback whose answers can be made to fail, one request after the other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self


@dataclass(frozen=True)
class Fault:
    """How one answer goes wrong. `after` bytes of its body arrive as they should."""

    kind: Literal["status", "cut", "stall", "corrupt", "ignore-range", "wrong-range"]
    after: int = 0
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""


@dataclass(frozen=True)
class Answer:
    """What a request gets where nothing goes wrong; `body` is cut to the asked range."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    faults_as: str = ""
    """Under which name faults are looked up."""


class _QuietServer(ThreadingHTTPServer):
    """Clients that hang up are what it is for."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class FaultyServer:
    """Answers from threads of its own. Subclasses say what; `faults` says what goes wrong, in order, by name."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.num_body_bytes = 0
        self.faults: dict[str, list[Fault]] = {}
        self._released = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner._answer(self)

            def do_HEAD(self) -> None:
                owner._answer(self)

            def log_message(self, _format: str, *_args: Any) -> None:
                pass

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: Seen) -> Answer:
        """What a request gets where nothing goes wrong."""
        raise NotImplementedError

    def release(self) -> None:
        """Let what stalls end, now and from now on: whoever asks again gets the rest."""
        self._released.set()

    def requests_for(self, part: str) -> list[Seen]:
        """Requests whose path has this in it."""
        return [request for request in self.seen if part in request.path]

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        request = Seen(handler.command, handler.path, {name.lower(): text for name, text in handler.headers.items()})
        self.seen.append(request)
        answer = self.answer(request)
        waiting = self.faults.get(answer.faults_as, [])
        fault = waiting.pop(0) if waiting else None
        if fault and fault.kind == "status":
            answer = Answer(b"", fault.status, fault.headers)
        try:
            self._send(handler, request, answer, fault)
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True

    def _send(self, handler: BaseHTTPRequestHandler, request: Seen, answer: Answer, fault: Fault | None) -> None:
        body, status, headers = answer.body, answer.status, dict(answer.headers)
        asked = request.headers.get("range")
        if asked and status == 200 and not (fault and fault.kind == "ignore-range"):
            start, _, last = asked.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1, len(body)) if last else len(body)
            shift = 1 if fault and fault.kind == "wrong-range" else 0
            headers["Content-Range"] = f"bytes {int(start) + shift}-{stop - 1}/{len(body)}"
            body, status = body[int(start) : stop], 206 if int(start) < len(body) else 416
        handler.send_response(status)
        for name, text in headers.items():
            handler.send_header(name, text)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if request.method == "HEAD":
            return
        if fault and fault.kind in ("cut", "stall"):
            self._write(handler, body[: fault.after])
            if fault.kind == "stall":
                self._released.wait(300)
            handler.close_connection = True
            handler.connection.shutdown(2)
        elif fault and fault.kind == "corrupt":
            flipped = bytes([body[fault.after] ^ 1])
            self._write(handler, body[: fault.after] + flipped + body[fault.after + 1 :])
        else:
            self._write(handler, body)

    def _write(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        self.num_body_bytes += len(body)
        handler.wfile.write(body)
        handler.wfile.flush()
