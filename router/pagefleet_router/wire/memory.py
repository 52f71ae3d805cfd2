"""How much memory requests take: the bodies of all clients together, and what is kept of freed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from pagefleet_protocol.freed_memory import keep_freed

from pagefleet_router.wire.client_request import ClientRequest

SMALL_BYTES = 16 * 1024
"""Shorter bodies are not counted: the number of connections bounds them."""


class BodyMemory:
    """Counts what large bodies take.

    Args:
        max_bytes: of all together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def take(self, request: ClientRequest, num_bytes: int) -> bool:
        """Count a body as `num_bytes` long; returns False, and counts no more of it, where that is too much."""
        more = num_bytes - request.num_counted
        if self.num_bytes + more > self._max_bytes:
            return False
        request.num_counted = num_bytes
        self.num_bytes += more
        return True

    def give_back(self, request: ClientRequest) -> None:
        """Count a body no more; once is as good as twice."""
        self.num_bytes -= request.num_counted
        request.num_counted = 0


MANY = 1000
"""Connections that took some ten megabytes."""
_KEPT_BYTES = 64 * 1024 * 1024
_LARGEST_KEPT_BYTES = 4 * 1024 * 1024


def keep_bodies() -> None:
    """Use the memory of requests and answers again.

    A prompt of 400 kB would get a hundred new pages for each of its copies, whose first touch takes longer than all
    that is done with it. Longer bodies than _LARGEST_KEPT_BYTES leave nothing behind.
    """
    keep_freed(_LARGEST_KEPT_BYTES, _KEPT_BYTES)


def trim() -> None:
    """Hand back what is free, where the C library can: a few milliseconds."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class SpareMemory:
    """Looks at the number of connections now and then: called with it, a few times a second."""

    def __init__(self, hand_back: Callable[[], None] = trim) -> None:
        self._hand_back = hand_back
        self._most = 0
        self._last = 0

    def check(self, num_connections: int) -> None:
        """Hand memory back when most of many connections have gone and no more are going."""
        self._most = max(self._most, num_connections)
        is_settled = num_connections >= self._last
        self._last = num_connections
        if is_settled and self._most >= MANY and num_connections <= self._most // 2:
            self._most = num_connections
            self._hand_back()
