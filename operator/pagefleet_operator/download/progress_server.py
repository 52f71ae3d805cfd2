"""`GET /progress` and `GET /livez` while a download runs: a few numbers over HTTP/1.1, one request per connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import msgspec
from pagefleet_protocol.kube_names import LIVE_PATH
from pagefleet_protocol.model_facts import Progress

from pagefleet_operator.download.errors import BadSettings

PROGRESS_PATH = "/progress"
_MAX_HEAD_BYTES = 8192
_PATIENCE_S = 5.0


@asynccontextmanager
async def serve_progress(host: str | None, port: int, snapshot: Callable[[], Progress]) -> AsyncIterator[int]:
    """Answer for as long as the context lasts; `host` None listens on every address. Yields the port.

    Raises:
        BadSettings: the address cannot be listened on.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head.partition(b"\r\n")[0], snapshot))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, limit=_MAX_HEAD_BYTES)
    except OSError as error:
        raise BadSettings(f"port {port} cannot be listened on ({error.strerror}): give another --port") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _response(request_line: bytes, snapshot: Callable[[], Progress]) -> bytes:
    method, _, rest = request_line.decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        status, kind, body = HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET only\n"
    elif path == PROGRESS_PATH:
        status, kind, body = HTTPStatus.OK, "application/json", msgspec.json.encode(snapshot()) + b"\n"
    elif path == LIVE_PATH:
        status, kind, body = HTTPStatus.OK, "text/plain", b"ok\n"
    else:
        status, kind, body = HTTPStatus.NOT_FOUND, "text/plain", b"/progress and /livez are here\n"
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + (b"" if method == "HEAD" else body)
