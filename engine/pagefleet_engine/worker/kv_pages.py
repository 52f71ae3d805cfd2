"""The KV pool as bytes, for connectors: whole blocks between the device and host memory, beside the steps.

On a CPU the pool is host memory. On a GPU copies run on a stream of their own, through pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from pagefleet_kv.port import KVPages, PagesCopy
from torch import Tensor

STAGING_BYTES = 16 * 1024 * 1024
"""Most pinned memory of one part of a copy; two parts are under way at a time."""


def make_kv_pages(pool: Tensor) -> KVPages:
    """The pages of a pool `[num_blocks, ...]`, which is contiguous."""
    return HostPages(pool) if pool.device.type == "cpu" else DevicePages(pool)


class HostPages:
    """Implements `KVPages` where the device is the host: nothing is copied that need not be."""

    wants_pinned = False
    """See KVPages."""

    def __init__(self, pool: Tensor) -> None:
        self._blocks = _as_bytes(pool).numpy()
        self._host = memoryview(self._blocks.reshape(-1).data)

    @property
    def bytes_per_block(self) -> int:
        """See KVPages."""
        return int(self._blocks.shape[1])

    @property
    def host(self) -> memoryview:
        """See KVPages."""
        return self._host

    def read(self, blocks: Sequence[int], into: memoryview) -> PagesCopy:
        """See KVPages."""
        host = np.frombuffer(into, dtype=np.uint8).reshape(len(blocks), self.bytes_per_block)
        for place, first, count in runs(blocks):
            host[place : place + count] = self._blocks[first : first + count]
        return CopyDone()

    def write(self, source: memoryview, blocks: Sequence[int]) -> PagesCopy:
        """See KVPages."""
        host = np.frombuffer(source, dtype=np.uint8).reshape(len(blocks), self.bytes_per_block)
        for place, first, count in runs(blocks):
            self._blocks[first : first + count] = host[place : place + count]
        return CopyDone()


class DevicePages:
    """Implements `KVPages`, and `DevicePool` of the data planes between devices, on a GPU.

    A read needs nothing of the steps: its blocks are complete, as the step that filled them was waited for. A write
    may take blocks that a step in flight still touches, of a request that has ended since; so it comes after all that
    the steps' stream has been given.
    """

    wants_pinned = True
    """See KVPages."""

    def __init__(self, pool: Tensor) -> None:
        self._blocks = _as_bytes(pool)
        self._device = pool.device
        self._steps = torch.cuda.current_stream(pool.device)
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._per_part = max(1, STAGING_BYTES // self.bytes_per_block)

    @property
    def bytes_per_block(self) -> int:
        """See KVPages."""
        return self._blocks.shape[1]

    @property
    def blocks(self) -> Tensor:
        """uint8 [num_blocks, bytes per block]."""
        return self._blocks

    def after_steps(self, stream: torch.cuda.Stream) -> None:
        """Let what is queued on the stream from now on come after all that the steps' stream was given."""
        stream.wait_stream(self._steps)

    @property
    def host(self) -> None:
        """There is none."""
        return

    def read(self, blocks: Sequence[int], into: memoryview) -> PagesCopy:
        """See KVPages. Waits while more than two parts are under way."""
        host = torch.frombuffer(into, dtype=torch.uint8).view(len(blocks), self.bytes_per_block)
        copy = _StagedCopy()
        for start in range(0, len(blocks), self._per_part):
            part, target = blocks[start : start + self._per_part], host[start : start + self._per_part]
            staging = target if target.is_pinned() else torch.empty_like(target, pin_memory=True)
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for place, first, count in runs(part):
                    staging[place : place + count].copy_(self._blocks[first : first + count], non_blocking=True)
                copy.add(self._event(), staging, None if staging is target else target)
        return copy

    def write(self, source: memoryview, blocks: Sequence[int]) -> PagesCopy:
        """See KVPages. Waits while more than two parts are under way."""
        host = np.frombuffer(source, dtype=np.uint8).reshape(len(blocks), self.bytes_per_block)
        self._stream.wait_stream(self._steps)
        copy = _StagedCopy()
        for start in range(0, len(blocks), self._per_part):
            part, given = blocks[start : start + self._per_part], host[start : start + self._per_part]
            staging = _pinned(given)
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                for place, first, count in runs(part):
                    self._blocks[first : first + count].copy_(staging[place : place + count], non_blocking=True)
                copy.add(self._event(), staging, None)
        return copy

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class CopyDone:
    """Implements `PagesCopy` for a copy that has ended when it is returned."""

    def done(self) -> bool:
        """See PagesCopy."""
        return True

    def wait(self) -> None:
        """See PagesCopy: nothing is left."""


class _StagedCopy:
    """Parts of a copy through pinned memory, in order; each may have a last way to go on the host."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.cuda.Event, Tensor, Tensor | None]] = []

    def add(self, event: torch.cuda.Event, staging: Tensor, target: Tensor | None) -> None:
        if len(self._parts) == 2:
            self._land()
        self._parts.append((event, staging, target))

    def done(self) -> bool:
        while self._parts and self._parts[0][0].query():  # type: ignore[no-untyped-call]
            self._land()
        return not self._parts

    def wait(self) -> None:
        while self._parts:
            self._land()

    def _land(self) -> None:
        event, staging, target = self._parts.pop(0)
        event.synchronize()
        if target is not None:
            target.copy_(staging)


def _pinned(given: NDArray[np.uint8]) -> Tensor:
    """What is given, in pinned memory: as it is, where it lies there already."""
    if given.flags.writeable and (host := torch.from_numpy(given)).is_pinned():
        return host
    staging = torch.empty(given.shape, dtype=torch.uint8, pin_memory=True)
    staging.numpy()[:] = given
    return staging


def _as_bytes(pool: Tensor) -> Tensor:
    """uint8 [num_blocks, bytes per block], the same memory."""
    return pool.view(len(pool), -1).view(torch.uint8)


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield neighbours together: place of the first in `blocks`, its number, and how many they are."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield start, blocks[start], end - start
            start = end
