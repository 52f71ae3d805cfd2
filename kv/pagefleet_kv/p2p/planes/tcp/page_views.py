"""Blocks of a pool as a few views of memory: neighbours are one view, and pages on a device pass through a buffer."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_kv.port import KVPages


class PageViews:
    """The bytes of one worker's pages, for a thread that moves them.

    Args:
        pages: to read and write.
    """

    def __init__(self, pages: KVPages) -> None:
        self._pages = pages
        self._host = pages.host

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._pages.bytes_per_block

    def to_send(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return what blocks hold. Waits for a copy where they are on a device."""
        if self._host is not None:
            return self._runs(self._host, blocks)
        copy = memoryview(bytearray(len(blocks) * self.block_bytes))
        self._pages.read(blocks, copy).wait()
        return [copy]

    def to_fill(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return memory to receive blocks in; they are filled once `fill` was called with it."""
        if self._host is not None:
            return self._runs(self._host, blocks)
        return [memoryview(bytearray(len(blocks) * self.block_bytes))]

    def fill(self, received: memoryview | None, blocks: Sequence[int]) -> None:
        """Copy what was received to a device, and wait for it; `received`: the one view of `to_fill`."""
        if self._host is None:
            assert received is not None
            self._pages.write(received, blocks).wait()

    def _runs(self, host: memoryview, blocks: Sequence[int]) -> list[memoryview]:
        size = self.block_bytes
        views = []
        start = 0
        for at in range(1, len(blocks) + 1):
            if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
                views.append(host[blocks[start] * size : (blocks[at - 1] + 1) * size])
                start = at
        return views
