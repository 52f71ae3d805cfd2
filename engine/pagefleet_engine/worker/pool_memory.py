"""The memory of a KV pool on a CPU, as whoever works on it maps it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Sequence

from torch import Tensor

_HUGE_PAGE = 2 * 1024 * 1024
_LOWEST_PRIORITY = 19
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux: the pages are there afterwards, as they were."""


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


class PagesAhead:
    """Has the operating system give the pages of a pool before a step writes there.

    A step that writes where nothing was yet waits for memory to be found and made zero: over a prompt's first pages
    that is up to a third of its time. Blocks that were never used are handed out in their order, so it is enough to be
    some way ahead of the highest one; what no request comes near costs no memory.
    """

    THREAD = "pages-ahead"

    def __init__(self, pool: Tensor, ahead: int = 64 * 1024 * 1024) -> None:
        """`pool`: [num_blocks, ...], contiguous, in memory of `map_pool`; `ahead`: bytes."""
        self._pool, self._bytes_per_block, self._ahead = pool, pool[0].numel() * pool.itemsize, ahead
        self._given = 0
        self._thread: threading.Thread | None = None
        self.use(())

    def use(self, new_blocks: Iterable[Sequence[Sequence[int]]]) -> None:
        """Be ahead of what rows are given, for each KV group, from a thread of its own that ends once it is."""
        block = max((block for groups in new_blocks for blocks in groups for block in blocks), default=-1)
        size = self._pool.numel() * self._pool.itemsize
        wanted = min(size, (block + 1) * self._bytes_per_block + self._ahead)
        if wanted <= self._given or (wanted < size and wanted - self._given < self._ahead // 4):
            return
        if self._thread is None or not self._thread.is_alive():
            start, self._given = self._given, wanted
            self._thread = threading.Thread(
                target=_give, args=(self._pool, start, wanted), name=self.THREAD, daemon=True
            )
            self._thread.start()


def _give(pool: Tensor, start: int, stop: int) -> None:
    """Have pages given from byte `start` to `stop` of the pool, whatever is in them meanwhile."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    madvise = ctypes.CDLL(None).madvise  # mmap's own holds the lock of Python
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first, last = pool.data_ptr() + start, pool.data_ptr() + stop
    for address in range(first - first % mmap.PAGESIZE, last, _HUGE_PAGE):
        if madvise(address, min(_HUGE_PAGE, last - address), _POPULATE_WRITE):
            return  # a kernel before 5.14, or no memory: steps get their pages as they write
