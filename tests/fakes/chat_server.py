"""A scripted OpenAI server over real sockets: it answers what it was told to, and keeps what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(delta: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}], **more}).encode() + b"\n\n"


def chunk(text: str | None) -> bytes:
    return event({"content": text})


def usage(num_tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}}).encode() + b"\n\n"


class Script:
    """What the server answers next, and what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.stream: list[bytes | Callable[[], object]] = [
            *(chunk("Hello"), b": keep-alive\n\n", chunk(None), chunk(" there"), DONE)
        ]
        """Pieces, and what to do between them."""
        self.models: Any = {"data": [{"id": "tiny"}, {"id": "large"}]}
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.broken = threading.Event()
        """Set when a client left before the end."""
        self.url = ""


@contextlib.contextmanager
def chat_server() -> Iterator[Script]:
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self._reply(200, [json.dumps(script.models).encode()])

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            script.headers.append(dict(self.headers.items()))
            script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._reply(script.status, script.stream)

        def _reply(self, status: int, pieces: list[Any]) -> None:
            self.send_response(status)
            self.end_headers()
            try:
                for piece in pieces:
                    if isinstance(piece, bytes):
                        self.wfile.write(piece)
                    else:
                        piece()
            except OSError:
                script.broken.set()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield script
    http.shutdown()
    thread.join()
    http.server_close()
