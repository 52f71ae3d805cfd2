"""A pool of pages that is a few bytes per block, for connectors: steps are pokes, and copies can be held back."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pagefleet_kv.port import EngineIdentity, EngineSide, KVPages
from pagefleet_protocol.kv_blob import KvShape

PATIENCE_S = 300.0
SHAPE = KvShape(
    model="0f" * 32,
    cache_dtype="float32",
    compute_dtype="float32",
    block_size=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    layout="nothing in particular",
)


class _Copied:
    """A copy that has ended."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class BytePages:
    """Implements `KVPages` over one bytearray.

    `gate`: copies wait until it is set. `on_host`: whether the bytes are offered as `host`. `broken`: copies fail.
    """

    def __init__(self, num_blocks: int, bytes_per_block: int = 64, *, on_host: bool = True) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self._bytes_per_block = bytes_per_block
        self._memory = bytearray(num_blocks * bytes_per_block)
        self._on_host = on_host

    wants_pinned = False

    @property
    def bytes_per_block(self) -> int:
        return self._bytes_per_block

    @property
    def host(self) -> memoryview | None:
        return memoryview(self._memory) if self._on_host else None

    def read(self, blocks: Sequence[int], into: memoryview) -> _Copied:
        self._pass()
        assert len(into) == len(blocks) * self._bytes_per_block
        into[:] = b"".join(self.peek(block) for block in blocks)
        return _Copied()

    def write(self, source: memoryview, blocks: Sequence[int]) -> _Copied:
        self._pass()
        size = self._bytes_per_block
        assert len(source) == len(blocks) * size
        for index, block in enumerate(blocks):
            self.poke(block, bytes(source[index * size : (index + 1) * size]))
        return _Copied()

    def peek(self, block: int) -> bytes:
        """What a block holds."""
        return bytes(self._memory[block * self._bytes_per_block : (block + 1) * self._bytes_per_block])

    def poke(self, block: int, content: bytes) -> None:
        """Give a block's bytes."""
        assert len(content) == self._bytes_per_block
        self._memory[block * self._bytes_per_block : (block + 1) * self._bytes_per_block] = content

    def _pass(self) -> None:
        assert self.gate.wait(PATIENCE_S), "a copy was held back for ever"
        if self.broken:
            raise RuntimeError("the device does not answer")


def engine_side(
    pages: KVPages, shape: KvShape = SHAPE, identity: EngineIdentity | None = None, num_blocks: int = 8
) -> EngineSide:
    """An engine with such pages, on a machine with memory enough."""
    return EngineSide(identity or EngineIdentity(), shape, pages, num_blocks, free_memory=2**40)
