"""Reads a request's body, counting while it arrives: its own bytes, and those of all bodies together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from pagefleet_engine.errors import QueueFull
from pagefleet_engine.server.errors import HttpRefusal
from pagefleet_engine.server.handoff import (
    Handed,
    HandoffHead,
    NoTransfers,
    TransferHeader,
    open_body,
    read_asker,
    read_head,
)
from pagefleet_engine.server.text_work import TextWork

MAX_BODIES_BYTES = 256 * 1024 * 1024
"""Of all bodies that are being read or decoded."""

_READ_TIMEOUT_S = 60.0
_DECODE_HERE_BYTES = 32 * 1024
_BYTES_PER_CHAR = 16
"""To decode so many bytes takes as long as to tokenize a character."""
_CLOSE = {"connection": "close"}

T = TypeVar("T")


class BodyReader:
    """Reads bodies of up to `max_bytes`; large ones are decoded and checked as text work, off the event loop.

    `transfers` reads the header of P/D transfers; by default it is refused.
    """

    def __init__(
        self,
        max_bytes: int,
        work: TextWork,
        max_bodies_bytes: int = MAX_BODIES_BYTES,
        transfers: TransferHeader | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self._work = work
        self._max_bodies_bytes = max_bodies_bytes
        self._transfers = transfers or NoTransfers()
        self._held_bytes = 0

    async def read(self, request: Request, check: Callable[[dict[str, Any]], T], is_handed: bool = True) -> Handed[T]:
        """Return what `check` makes of the body's JSON object, with what a router may have handed over.

        Token ids behind the JSON count as the body's bytes. Without `is_handed` there can be none.

        Raises:
            InvalidRequest: not a JSON object, or one that `check` refuses; or headers of the hand-off are wrong.
            HttpRefusal: too large, or it takes longer than a minute to arrive.
            QueueFull: all bodies together are too large.
        """
        asker = read_asker(request)
        head = read_head(request.headers, self._transfers, asker) if is_handed else HandoffHead(asker=asker)
        parts: list[bytes] = []
        try:
            await self._read(request, parts)
            body = b"".join(parts)
            if len(body) <= _DECODE_HERE_BYTES:
                return open_body(body, head, check)
            return await self._work.run(
                head.tenant_salt, len(body) // _BYTES_PER_CHAR, partial(open_body, body, head, check)
            )
        finally:
            self._held_bytes -= sum(map(len, parts))

    async def _read(self, request: Request, parts: list[bytes]) -> None:
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared[:20]) > self.max_bytes:
            raise too_large(self.max_bytes)
        size = 0
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    self._held_bytes += len(part)
                    if size > self.max_bytes:
                        raise too_large(self.max_bytes)
                    if self._held_bytes > self._max_bodies_bytes:
                        raise QueueFull("The server holds too many large requests. Try again later.", 1.0)
        except TimeoutError:
            raise HttpRefusal(408, "The body did not arrive in time.", code="timeout", headers=_CLOSE) from None
        except ClientDisconnect:
            raise HttpRefusal(400, "The connection closed before the body was complete.") from None


def too_large(max_bytes: int) -> HttpRefusal:
    """Return what refuses a body of more bytes."""
    message = f"The request body is over {max_bytes} bytes."
    return HttpRefusal(413, message, code="request_too_large", headers=_CLOSE)
