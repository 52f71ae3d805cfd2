"""What a process keeps of the memory that it frees, where the C library can be told; by default large blocks go back.

A block that went back comes as new pages, whose first touch takes longer than most of what is done with it.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt` (glibc's malloc.h)."""


def keep_freed(largest_bytes: int, kept_bytes: int) -> None:
    """Use memory again: blocks up to `largest_bytes`, and up to `kept_bytes` at the end of the heap."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, largest_bytes)
        mallopt(_TRIM_THRESHOLD, kept_bytes)
