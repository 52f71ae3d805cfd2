"""Hands memory of many connections back to the system once they are gone; allocators keep it for a next time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

MANY = 1000
"""Connections that took some ten megabytes."""


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
