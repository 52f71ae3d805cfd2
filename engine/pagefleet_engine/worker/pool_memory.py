"""The memory of a KV pool on a CPU, as whoever works on it maps it."""

from __future__ import annotations

import contextlib
import mmap
import os

_HUGE_PAGE = 2 * 1024 * 1024


def map_pool(num_bytes: int, descriptor: int = -1) -> mmap.mmap:
    """Map memory for a pool, zero everywhere: the operating system gives a page only when something is written there.

    Args:
        num_bytes: of the pool; what is mapped may be more.
        descriptor: of a file without a name that several processes map, and that is made as large as it has to be;
            -1: the memory is of this process alone.
    """
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    if descriptor >= 0:
        os.ftruncate(descriptor, size)
    # Linux gives huge pages to memory of one process alone: attention that reads pages in place is a quarter faster.
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages serves as well
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
