"""A KV pool that only its rank's process reaches, as on a GPU: the rank copies blocks when it is asked to.

What is copied passes through memory that both processes map. The rank has a thread for it, so that no copy waits for a
step; its device may put both side by side.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from pagefleet_kv.port import KVPages, KVShard

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.executor.ring import RingHandles, RingPair, RingReader, RingWriter
from pagefleet_engine.ranks.shared_handles import closed_on_failure
from pagefleet_engine.worker.pool_memory import map_pool

STAGING_BYTES = 16 * 2**20
"""Of the memory between the two, which is of one block at least."""
LOOK_S = 0.5
"""Between two looks whether the rank is there, while its answer is waited for."""

_encoder = msgspec.msgpack.Encoder()


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """Copy these blocks, in this order, between the pool and the beginning of the memory."""

    into_pool: bool
    blocks: Sequence[int]


_decoder = msgspec.msgpack.Decoder(_Asked)


class CopyServer:
    """The rank's end, for a thread of its own.

    Args:
        pages: of this rank.
        staging: descriptor of the memory.
        pinned: whether the memory is to be pinned, as a device copies from and to it.

    Raises:
        ConfigError: it cannot be pinned.
    """

    def __init__(self, pages: KVPages, staging: int, handles: RingPair, *, pinned: bool) -> None:
        self._pages = pages
        self._memory = memoryview(map_pool(staging_blocks(pages.bytes_per_block) * pages.bytes_per_block, staging))
        self._asked = RingReader(handles.there)
        self._answers = RingWriter(handles.back)
        if pinned:
            _pin(self._memory)

    def run(self) -> None:
        """Serve for ever."""
        while True:
            self.serve()

    def serve(self, timeout_s: float | None = None) -> None:
        """Copy what is asked for next; nothing where that does not come in time."""
        if (parts := self._asked.receive(timeout_s)) is None:
            return
        fault = ""
        try:
            self._copy(_decoder.decode(parts[0]))
        except Exception as error:  # whatever a device may raise is told to who asked
            fault = f"{type(error).__name__}: {error}"
        self._answers.send([_encoder.encode(fault)], _wait_on)

    def _copy(self, asked: _Asked) -> None:
        memory = self._memory[: len(asked.blocks) * self._pages.bytes_per_block]
        if asked.into_pool:
            self._pages.write(memory, asked.blocks).wait()
        else:
            self._pages.read(asked.blocks, memory).wait()


class AskedPool:
    """The other end; implements `RankPool`. One copy is under way at a time.

    Args:
        bytes_per_block: of the rank's part.
        shard: what the rank holds.
        staging: descriptor of the memory.
        is_over: whether the rank is gone.
    """

    def __init__(
        self, bytes_per_block: int, shard: KVShard, staging: int, handles: RingPair, is_over: Callable[[], bool]
    ) -> None:
        layers = len(shard.layers)
        self.layer_bytes = bytes_per_block // layers // shard.vectors
        """See RankPool."""
        self._most = staging_blocks(bytes_per_block)
        memory = map_pool(self._most * bytes_per_block, staging)
        flat = np.frombuffer(memory, np.uint8, self._most * bytes_per_block)
        self._staging = flat.reshape(self._most, layers, shard.vectors, self.layer_bytes)
        # Of its own: who made the others closes them as soon as the ranks are over, when somebody may still wait.
        own = duplicated(handles)
        weakref.finalize(self, close_all, own.fds)
        self._asked = RingWriter(own.there)
        self._answers = RingReader(own.back)
        self._is_over = is_over
        self._lock = threading.Lock()

    def read(self, blocks: Sequence[int], into: NDArray[np.uint8]) -> None:
        """See RankPool."""
        for start in range(0, len(blocks), self._most):
            part = blocks[start : start + self._most]
            with self._lock:
                self._ask(part, into_pool=False)
                into[start : start + len(part)] = self._staging[: len(part)]

    def write(self, source: NDArray[np.uint8], blocks: Sequence[int]) -> None:
        """See RankPool."""
        for start in range(0, len(blocks), self._most):
            part = blocks[start : start + self._most]
            with self._lock:
                self._staging[: len(part)] = source[start : start + len(part)]
                self._ask(part, into_pool=True)

    def _ask(self, blocks: Sequence[int], *, into_pool: bool) -> None:
        self._asked.send([_encoder.encode(_Asked(into_pool, [*blocks]))], self._raise_over)
        while (parts := self._answers.receive(LOOK_S)) is None:
            self._raise_over()
        if fault := msgspec.msgpack.decode(parts[0], type=str):
            raise OSError(f"a rank could not copy K/V: {fault}")

    def _raise_over(self) -> None:
        if self._is_over():
            raise OSError("the engine's ranks are gone")


def staging_blocks(bytes_per_block: int) -> int:
    """Return how many blocks are copied at once."""
    return max(1, STAGING_BYTES // bytes_per_block)


def duplicated(handles: RingPair) -> RingPair:
    """Return descriptors of the same rings that are the caller's to close.

    Raises:
        OSError: the system gives no more of them.
    """

    with closed_on_failure() as made:

        def own(fd: int) -> int:
            made.append(os.dup(fd))
            return made[-1]

        def ring(one: RingHandles) -> RingHandles:
            return RingHandles(own(one.memory), one.num_bytes, [*map(own, one.frames)], [*map(own, one.room)])

        return RingPair(ring(handles.there), ring(handles.back))


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def _pin(memory: memoryview) -> None:
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(
            f"{len(memory)} bytes of memory for K/V on its way to connectors cannot be pinned ({error}): raise the "
            "limit of locked memory, or leave kv_connector out"
        ) from error


def _wait_on() -> None:
    """An executor that is gone ends this process by itself."""
