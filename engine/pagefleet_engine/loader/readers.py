"""How a range of a file gets into a tensor: straight into memory, or through pinned buffers onto a GPU.

`read` is called by several threads at once. Everything else is called by the thread that owns the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import torch
from pagefleet_kernels.native.blocks import new_memory
from torch import Tensor

from pagefleet_engine.layers.weight import Weight, new_tensor
from pagefleet_engine.loader.weight_map import Destination

_MOST_WASTE = 2.0
_SPAN_BYTES = 4 * 1024 * 1024
"""Of rows, and what lies between them, that one request brings."""
_DECODED_AT_ONCE = 1 << 17
"""Numbers, which stay in a core's cache."""


class Pieces(Protocol):
    """A file that is not on this machine."""

    def fill(self, view: memoryview, offset: int) -> None:
        """Read the bytes from `offset` on into all of `view`; raises OSError."""
        ...


Readable = int | Pieces
"""An open file descriptor, or what takes its place."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Numbers that lie in a file otherwise than as numbers of a type."""

    numbers: int
    """Of a block: rows are of whole blocks."""
    num_bytes: int
    """Of a block."""
    decode: Callable[[Tensor, Tensor], None]
    """Fills a tensor with the numbers of uint8 [blocks, num_bytes], in its type and shape."""


Stored = torch.dtype | Encoding
"""How a file has the numbers of a tensor."""


def stored_bytes(stored: Stored, count: int) -> int:
    """What so many numbers take in the file; whole blocks of them."""
    if isinstance(stored, torch.dtype):
        return count * stored.itemsize
    return count // stored.numbers * stored.num_bytes


class Scratch:
    """Lends memory to tensors that are copied soon; others get memory of their own."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        """By address: the memory under each tensor that is out."""

    def make(self, weight: Weight) -> Tensor:
        """An uninitialised tensor for all of the weight."""
        if not weight.kept.is_copy:
            return new_tensor(weight)
        num_bytes = math.prod(weight.shape) * weight.dtype.itemsize
        memory = self._take(num_bytes)
        tensor = memory[:num_bytes].view(weight.dtype).view(weight.shape)
        self._lent[tensor.data_ptr()] = memory
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Nobody uses the tensor any more."""
        self._free.append(self._lent.pop(tensor.data_ptr()))

    def _take(self, num_bytes: int) -> Tensor:
        fitting = [memory for memory in self._free if num_bytes <= memory.numel() <= _MOST_WASTE * num_bytes]
        if not fitting:
            return new_memory(num_bytes)
        smallest = min(fitting, key=Tensor.numel)
        self._free = [memory for memory in self._free if memory is not smallest]
        return smallest


PIECE_BYTES = 16 * 1024 * 1024
"""Most bytes that one call reads: large enough that a call's cost does not count, small enough to share the work."""


class Reader(Protocol):
    """Fills tensors on one device."""

    num_threads: int
    """How many may read at once."""
    ahead_bytes: int
    """Most bytes that are being read, or are read and not installed yet."""

    def room(self, destination: Destination) -> Tensor:
        """Where the destination's numbers are about to be read into."""
        ...

    def read(self, file: Readable, offset: int, stored: Stored, room: Tensor, stride: int | None = None) -> None:
        """Fill `room` (at most PIECE_BYTES as stored) with numbers that are `stored` so in the file.

        `stride`: bytes in the file from one of its rows, each of them contiguous, to the next; None: they follow each
        other, in the room too.

        Raises:
            OSError, EOFError: the file cannot be read, or ends early.
        """
        ...

    def settle(self, destination: Destination) -> None:
        """Hand over the destination's numbers, which have been read."""
        ...


class HostReader:
    """Reads into the tensor itself; numbers of another type go through a buffer.

    Memory of tensors that their layers have copied is read into again: it is cheaper than new memory by far, whose
    every page the system has to find and clear first.
    """

    def __init__(self) -> None:
        # More than the cores: a read that waits for the disk costs none.
        self.num_threads = 2 * min(8, os.cpu_count() or 1)
        self.ahead_bytes = 8 * PIECE_BYTES
        self._buffers: SimpleQueue[Tensor] = SimpleQueue()
        self._scratch = Scratch()

    def room(self, destination: Destination) -> Tensor:
        """See Reader."""
        return destination.weight.room(destination.part, self._scratch.make)

    @torch.inference_mode()
    def read(self, file: Readable, offset: int, stored: Stored, room: Tensor, stride: int | None = None) -> None:
        """See Reader."""
        if stored == room.dtype and (stride is not None or room.is_contiguous()):
            read_into(file, offset, room, stride)
            return
        try:
            buffer = self._buffers.get_nowait()
        except Empty:
            buffer = new_memory(PIECE_BYTES)
        source = _as_stored(buffer, stored, room)
        read_into(file, offset, source, stride)
        _convert(source, stored, room)
        self._buffers.put(buffer)

    def settle(self, destination: Destination) -> None:
        """See Reader."""
        copied = destination.weight.arrived(destination.part)
        if copied is not None:
            self._scratch.give_back(copied)


class PinnedReader:
    """Reads into a ring of pinned buffers, and copies from there on a stream of its own; types change on the GPU."""

    def __init__(self, device: torch.device, num_threads: int = 8) -> None:
        """Takes two pinned buffers for each thread: one is read into while the other is copied from."""
        self.num_threads = num_threads
        self.ahead_bytes = 4 * num_threads * PIECE_BYTES
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: SimpleQueue[tuple[Tensor, torch.cuda.Event]] = SimpleQueue()
        for _ in range(2 * num_threads):
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            self._buffers.put((buffer, torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def room(self, destination: Destination) -> Tensor:
        """See Reader. The room's memory may still be in use by what was launched before."""
        room = destination.weight.room(destination.part)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return room

    @torch.inference_mode()
    def read(self, file: Readable, offset: int, stored: Stored, room: Tensor, stride: int | None = None) -> None:
        """See Reader."""
        buffer, copied = self._buffers.get()
        try:
            copied.synchronize()
            source = _as_stored(buffer, stored, room)
            read_into(file, offset, source, stride)
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                if stored == room.dtype:
                    room.copy_(source, non_blocking=True)
                else:  # the type changes on the GPU
                    there = room.new_empty(source.shape, dtype=source.dtype)
                    _convert(there.copy_(source, non_blocking=True), stored, room)
                copied.record(self._stream)
        finally:
            self._buffers.put((buffer, copied))

    def settle(self, destination: Destination) -> None:
        """See Reader; the device waits for what is being copied, the host does not."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        destination.weight.arrived(destination.part)


def reader_for(device: torch.device) -> Reader:
    """The reader that fills tensors on the device."""
    return PinnedReader(device) if device.type == "cuda" else HostReader()


def _as_stored(buffer: Tensor, stored: Stored, room: Tensor) -> Tensor:
    """The part of a buffer that takes a room's numbers as they are stored, in its shape but for blocks."""
    source = buffer[: stored_bytes(stored, room.numel())]
    if isinstance(stored, torch.dtype):
        return source.view(stored).view(room.shape)
    return source.view(*room.shape[:-1], -1)


def _convert(source: Tensor, stored: Stored, room: Tensor) -> None:
    if isinstance(stored, torch.dtype):
        room.copy_(source)
        return
    at_once = max(1, _DECODED_AT_ONCE // math.prod(room.shape[1:]))
    for start in range(0, len(room), at_once):
        part = room[start : start + at_once]
        blocks = source[start : start + at_once].reshape(-1, stored.num_bytes)
        stored.decode(blocks, part)


def read_into(file: Readable, offset: int, target: Tensor, stride: int | None = None) -> None:
    """Fill a tensor in this machine's memory with the file's bytes from `offset` on, a contiguous one; or with a
    `stride` one of contiguous rows, each so many bytes further on than the one before.

    What lies between is not read from a file of this machine. Elsewhere each call is a request, which takes longer than
    the bytes between rows, so several come at once.

    Raises:
        OSError, EOFError: the file cannot be read, or ends early.
    """
    if stride is None:
        _read_all(file, offset, target.view(-1).view(torch.uint8).numpy().data)
        return
    rows = target.view(torch.uint8).numpy()
    if isinstance(file, int):
        for number, row in enumerate(rows):
            _read_all(file, offset + number * stride, row.data)
        return
    at_once = max(1, _SPAN_BYTES // stride)
    for first in range(0, len(rows), at_once):
        some = rows[first : first + at_once]
        span = np.empty((len(some) - 1) * stride + some.shape[1], np.uint8)
        file.fill(span.data, offset + first * stride)
        some[:] = np.lib.stride_tricks.as_strided(span, some.shape, (stride, 1))


def _read_all(file: Readable, offset: int, view: memoryview) -> None:
    if not isinstance(file, int):
        file.fill(view, offset)
        return
    while view:
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}")
        view, offset = view[count:], offset + count
