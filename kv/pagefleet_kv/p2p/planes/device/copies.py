"""Copies within one device for planes: blocks into a staging slot and back, and a check sum, beside the steps.

All of it is queued on one stream of its own, in order. The check sum is not a CRC, which would need the bytes on the
host: it is the sum of all 64-bit words, each with its halves mixed, times odd weights that differ, modulo 2**64. Any
change of one word changes it, and so do nearly all others. It finds damage, not malice: who could forge it is the peer
itself, which is authenticated. On a CPU, where there are no streams, everything is done at once.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Sequence
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pagefleet_kv.p2p.planes.device.lanes import Region

WORD_BYTES = 8


@runtime_checkable
class DevicePool(Protocol):
    """Pages that lie on a device, where other devices' copies can reach them."""

    @property
    def blocks(self) -> Tensor:
        """uint8 [num_blocks, bytes per block]."""

    def after_steps(self, stream: torch.cuda.Stream) -> None:
        """Let what is queued on the stream from now on come after all that the steps' stream was given."""


class Mark(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """True once all before it has ended."""

    def wait(self) -> None:
        """Return once all before it has ended."""


class Total:
    """A check sum that may still be computed."""

    def __init__(self, mark: Mark, value: Tensor) -> None:
        self.mark = mark
        self._value = value

    def value(self) -> int:
        """A signed 64-bit number; only once the mark is done."""
        return int(self._value)


class DeviceCopies:
    """Used by one thread, which calls `enter` first.

    Args:
        slot_bytes: most bytes of one frame; a multiple of 8.
    """

    def __init__(self, pool: DevicePool, slot_bytes: int) -> None:
        assert slot_bytes % WORD_BYTES == 0
        self._pool = pool
        self._blocks = pool.blocks
        self._cuda = self._blocks.is_cuda
        self.device = self._blocks.device
        self.slot_bytes = slot_bytes
        self._stream = self.new_stream()
        self._weights = torch.arange(1, slot_bytes // WORD_BYTES * 2, 2, dtype=torch.int64, device=self.device)
        self._products = torch.empty_like(self._weights)
        """Of the sum that is computed just now."""
        self._settle()

    def part(self, region: Region) -> DeviceCopies:
        """Return the same for a part of each block: what is gathered and scattered is that alone.

        Raises:
            ValueError: blocks have no such part.
        """
        first, last = region.layers
        start, stop = region.bytes
        if prod(region.axes) != self.block_bytes or not (
            0 <= first < last <= region.axes[0] and 0 <= start < stop <= region.axes[2]
        ):
            raise ValueError(f"blocks of {self.block_bytes} bytes have no part {region}")
        part = copy.copy(self)
        part._blocks = self._blocks.view(-1, *region.axes)[:, first:last, :, start:stop]
        return part

    @property
    def block_bytes(self) -> int:
        return prod(self._blocks.shape[1:])

    @property
    def stream(self) -> int:
        return handle_of(self._stream)

    def enter(self) -> None:
        """Make the device the calling thread's."""
        if self._cuda:
            torch.cuda.set_device(self.device)

    def new_stream(self) -> torch.cuda.Stream | None:
        """Return a stream beside this one; None on a CPU."""
        return torch.cuda.Stream(self.device) if self._cuda else None  # type: ignore[no-untyped-call]

    def slots(self, count: int) -> Tensor:
        """Return staging memory: uint8 [count, slot_bytes]."""
        slots = torch.zeros(count, self.slot_bytes, dtype=torch.uint8, device=self.device)
        self._settle()
        return slots

    def free_bytes(self) -> int:
        """Return what the device has left; on a CPU, where it does not matter, a lot."""
        return torch.cuda.mem_get_info(self.device)[0] if self._cuda else 1 << 62

    def gather(self, blocks: Sequence[int], slot: Tensor) -> None:
        """Copy whole blocks, in this order, to the beginning of a slot."""
        rows = self._rows(slot, len(blocks))
        with self._queueing():
            for place, first, count in _runs(blocks):
                rows[place : place + count].copy_(self._blocks[first : first + count], non_blocking=True)

    def load(self, held: memoryview, slot: Tensor) -> None:
        """Copy host memory to the beginning of a slot; the memory may be dropped when this returns."""
        host = torch.frombuffer(bytearray(held) if held.readonly else held, dtype=torch.uint8)
        with self._queueing():
            slot[: len(held)].copy_(host)  # from pageable memory: the host waits

    def scatter(self, slot: Tensor, blocks: Sequence[int]) -> None:
        """Fill whole blocks from the beginning of a slot, after all that the steps were given."""
        rows = self._rows(slot, len(blocks))
        if self._stream is not None:
            self._pool.after_steps(self._stream)
        with self._queueing():
            for place, first, count in _runs(blocks):
                self._blocks[first : first + count].copy_(rows[place : place + count], non_blocking=True)

    def total(self, slot: Tensor, num_bytes: int) -> Total:
        """Begin to compute the check sum of a slot's first bytes."""
        num_words = -(-num_bytes // WORD_BYTES)
        value = torch.zeros((), dtype=torch.int64, pin_memory=self._cuda)
        with self._queueing():
            slot[num_bytes : num_words * WORD_BYTES].zero_()
            words = slot[: num_words * WORD_BYTES].view(torch.int64)
            mixed = torch.bitwise_right_shift(words, 32, out=self._products[:num_words])
            mixed.bitwise_and_(0xFFFF_FFFF).bitwise_xor_(words).mul_(self._weights[:num_words])
            value.copy_(mixed.sum(), non_blocking=True)
        return Total(self.mark(self._stream), value)

    def marked(self) -> Mark:
        """Return a mark after all that was queued here."""
        return self.mark(self._stream)

    def mark(self, stream: torch.cuda.Stream | None) -> Mark:
        """Return a mark after all that was queued on a stream."""
        if stream is None:
            return _Done()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return _EventMark(event)

    def _rows(self, slot: Tensor, count: int) -> Tensor:
        """The beginning of a slot as blocks."""
        return slot[: count * self.block_bytes].view(count, *self._blocks.shape[1:])

    def _settle(self) -> None:
        """Wait until what another stream has filled is there for this one."""
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def _queueing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def handle_of(stream: torch.cuda.Stream | None) -> int:
    """Return `cudaStream_t` as a number; 0 on a CPU."""
    return 0 if stream is None else stream.cuda_stream


def folded(total: int) -> int:
    """Return a total in the 32 bits that events and commits have for a check sum."""
    return zlib.crc32(total.to_bytes(8, "little", signed=True))


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is left."""


class _EventMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours together: place of the first in `blocks`, its number, and how many they are."""
    runs = []
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            runs.append((start, blocks[start], end - start))
            start = end
    return runs
