"""Messages from one process to several others of this machine, through a ring in shared memory.

The ring is a file without a name, and every process gets it by its descriptor: when the last one ends, however it ends,
nothing is left. A message has parts, and each part is one frame or several:

    | size, flags | bytes of a part, padded to 8 | size, flags | ... | SKIP | (the rest of the ring is not used)

Each reader has a doorbell, which counts frames, and gives back bytes that it needs no more by another one. Nothing else
says how far anyone is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Sequence

import msgspec

from pagefleet_engine.ranks.doorbell import Doorbell
from pagefleet_engine.ranks.shared_handles import closed_on_failure, make_bells

Buffer = bytes | bytearray | memoryview
"""Of bytes, contiguous."""

_HEADER = struct.Struct("<II")
_PART_GOES_ON, _MORE_PARTS, _SKIP = 1, 2, 4
ROOM_LOOK_S = 0.1
"""Between two calls of `or_raise` while a reader makes no room."""


class RingHandles(msgspec.Struct, frozen=True, array_like=True):
    """Descriptors of a ring, for a process that inherits them."""

    memory: int
    num_bytes: int
    frames: Sequence[int]
    """Doorbells of the readers."""
    room: Sequence[int]
    """Those by which readers give bytes back."""

    @property
    def fds(self) -> tuple[int, ...]:
        """All of them."""
        return (self.memory, *self.frames, *self.room)


def make_ring(num_readers: int, num_bytes: int) -> RingHandles:
    """Make a ring; memory is taken as it is first used.

    Raises:
        OSError: the system gives no memory, or no more descriptors.
    """
    with closed_on_failure() as made:
        made.append(memory := os.memfd_create("pagefleet-ring"))
        os.ftruncate(memory, num_bytes)
        bells = make_bells(2 * num_readers)
    return RingHandles(memory, num_bytes, bells[:num_readers], bells[num_readers:])


class RingPair(msgspec.Struct, frozen=True, array_like=True):
    """A ring each way, for two processes."""

    there: RingHandles
    back: RingHandles

    @property
    def fds(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.there.fds, *self.back.fds)


def make_ring_pair(num_bytes: int) -> RingPair:
    """Make a ring each way. Raises OSError as `make_ring` does."""
    with closed_on_failure() as made:
        there = make_ring(1, num_bytes)
        made.extend(there.fds)
        return RingPair(there, make_ring(1, num_bytes))


class _Mapped:
    """One process's view of the memory."""

    def __init__(self, handles: RingHandles) -> None:
        self.handles = handles
        self._map = mmap.mmap(handles.memory, handles.num_bytes)
        self.view = memoryview(self._map)
        self.at = 0
        """Where the next frame begins."""

    @property
    def tail(self) -> int:
        """Bytes to the ring's end."""
        return len(self.view) - self.at

    def move(self, num_bytes: int) -> None:
        self.at = (self.at + num_bytes) % len(self.view)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # somebody still looks at a message
            self.view.release()
            self._map.close()


class RingWriter:
    """The one end that sends. Used by one thread."""

    def __init__(self, handles: RingHandles) -> None:
        self._ring = _Mapped(handles)
        self._frames = [Doorbell(fd) for fd in handles.frames]
        self._room = [Doorbell(fd) for fd in handles.room]
        self._used = [0] * len(self._frames)
        """Per reader: bytes that it has not given back, as far as this end knows."""
        # With what is skipped for it a frame takes less than half of the ring, and readers hold a quarter at most.
        self._most = handles.num_bytes // 4 - _HEADER.size

    def send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        """Send a message of at least one part to every reader; waits where there is no room.

        `or_raise` is called from time to time while it waits, and raises where there is no use in it.
        """
        for number, part in enumerate(parts, 1):
            left = memoryview(part).cast("B")
            while True:
                piece, left = left[: self._most], left[self._most :]
                self._put(piece, bool(left) * _PART_GOES_ON | (number < len(parts)) * _MORE_PARTS, or_raise)
                if not left:
                    break

    def close(self) -> None:
        """Unmap the ring; its descriptors are of whoever made it."""
        self._ring.close()

    def _put(self, piece: memoryview, flags: int, or_raise: Callable[[], None]) -> None:
        ring = self._ring
        size = _frame_bytes(len(piece))
        skipped = ring.tail if size > ring.tail else 0
        self._make_room(size + skipped, or_raise)
        if skipped:
            _HEADER.pack_into(ring.view, ring.at, 0, _SKIP)
            ring.move(skipped)
        start = ring.at + _HEADER.size
        _HEADER.pack_into(ring.view, ring.at, len(piece), flags)
        ring.view[start : start + len(piece)] = piece
        ring.move(size)
        for bell in self._frames:
            bell.ring()

    def _make_room(self, num_bytes: int, or_raise: Callable[[], None]) -> None:
        capacity = len(self._ring.view)
        for reader, room in enumerate(self._room):
            while self._used[reader] + num_bytes > capacity:
                if given := room.wait(ROOM_LOOK_S):
                    self._used[reader] -= given
                else:
                    or_raise()
            self._used[reader] += num_bytes


class RingReader:
    """One of the ends that receive. Used by one thread.

    Args:
        handles: of the ring.
        index: which of its readers this is.
    """

    def __init__(self, handles: RingHandles, index: int = 0) -> None:
        self._ring = _Mapped(handles)
        self._frames = Doorbell(handles.frames[index])
        self._room = Doorbell(handles.room[index])
        self._num_frames = 0
        """There already."""
        self._held = 0
        """Bytes of the ring that the last message's parts are in."""
        self._is_begun = False
        """Whether a part of the next message is there already."""
        self._parts: list[memoryview] = []
        self._pieces = bytearray()
        self._goes_on = False

    def fileno(self) -> int:
        """Readable when there is a message; it may also be there already, so `receive` first."""
        return self._frames.fileno()

    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        """Return the parts of the next message, which hold until the next call; None when it did not come in time."""
        if not self._is_begun:
            self._give_back()
        while True:
            if not self._num_frames:
                self._num_frames = self._frames.wait(timeout_s)
                if not self._num_frames:
                    return None
            self._num_frames -= 1
            self._is_begun = not self._take_frame()
            if not self._is_begun:
                parts, self._parts = self._parts, []
                return parts

    def close(self) -> None:
        """Unmap the ring; its descriptors are of whoever made it."""
        self._ring.close()

    def _take_frame(self) -> bool:
        """Add a frame to the message; True when that is whole."""
        ring = self._ring
        size, flags = _HEADER.unpack_from(ring.view, ring.at)
        if flags & _SKIP:
            self._held += ring.tail
            ring.move(ring.tail)
            size, flags = _HEADER.unpack_from(ring.view, ring.at)
        start = ring.at + _HEADER.size
        piece = ring.view[start : start + size]
        self._held += _frame_bytes(size)
        ring.move(_frame_bytes(size))
        goes_on = bool(flags & _PART_GOES_ON)
        if goes_on or self._goes_on:
            self._pieces += piece
            if not goes_on:
                self._parts.append(memoryview(self._pieces))
                self._pieces = bytearray()
        else:
            self._parts.append(piece)
        self._goes_on = goes_on
        is_whole = not goes_on and not flags & _MORE_PARTS
        if not is_whole and self._held * 4 > len(ring.view):  # the writer must come round while the rest is to come
            self._parts = [memoryview(bytearray(part)) for part in self._parts]
            self._give_back()
        return is_whole

    def _give_back(self) -> None:
        if self._held:
            self._room.ring(self._held)
            self._held = 0


def _frame_bytes(size: int) -> int:
    return _HEADER.size + -(-size // 8) * 8
