"""uvicorn's httptools protocol with limits it lacks: on a request's head, and on readers that do not read."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from pagefleet_protocol.errors import error_json
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 10.0
WRITE_STALL_S = 60.0
_REQUEST_LINE = re.compile(rb"[A-Z]{3,7} [^ \r\n]+ HTTP/1\.[01]\r\n")
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. It ends when a head passes 64 KiB or 10 s, or when the client takes nothing for a minute.

    Offers to go on in another protocol (`Upgrade: h2c`) are overlooked, as they may be: the parser would take the body
    for bytes of that protocol.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._in_head = self._expects_head = True
        self._held = b""
        """Beginning of a head that has not come whole."""
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a connection that says nothing is closed too."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._disarm()
        self._stop_write_clock()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start a clock: the buffer is full, and its size is all that a slow reader may hold."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that clock: the client reads."""
        self._stop_write_clock()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Count bytes while they belong to a head; data that ends a head belongs to the body from there on."""
        if self._expects_head:
            data, self._held = self._held + data, b""
            end = data.find(b"\r\n\r\n")
            if end < 0 and len(data) <= MAX_HEAD_BYTES and _REQUEST_LINE.match(data):
                self._held, self._in_head = data, True
                if self._head_timer is None:
                    self._arm()
                return
            if end >= 0:
                data = _UPGRADE.sub(b"", data[:end]) + data[end:]
        super().data_received(data)
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse("431 Request Header Fields Too Large", 431, f"The head is over {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """Start counting a head."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._arm()

    def on_message_complete(self) -> None:
        """Expect the next head."""
        self._expects_head = True
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """Stop counting."""
        self._in_head = self._expects_head = False
        self._disarm()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the shape of every other error."""
        self._refuse("400 Bad Request", 400, msg)

    def _refuse(self, status_line: str, status: int, message: str) -> None:
        body = error_json(status, message, code="invalid_http_request")
        head = f"HTTP/1.1 {status_line}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        own = b"".join(b"%b: %b\r\n" % header for header in self.server_state.default_headers)
        self.transport.write(head.encode() + own + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_clock(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._in_head and not self.transport.is_closing():
            self.transport.close()
