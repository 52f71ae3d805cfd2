"""What data ranks share whose models step together, as whoever starts them makes it. Knows no torch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import msgspec

from pagefleet_engine.ranks.doorbell import Doorbell
from pagefleet_engine.ranks.shared_handles import PAGE, SharedHandles, closed_on_failure, make_bells, make_shared_group


class TogetherHandles(msgspec.Struct, frozen=True, array_like=True):
    """Descriptors, for the cores that inherit them."""

    layers: SharedHandles
    """Of the group whose ranks exchange tensors within a step."""
    agreement: SharedHandles
    """Of the group that agrees on the end of a wave."""
    board: int
    """Of the memory in which each rank says which wave it calls for."""
    bells: Sequence[int]
    """Of each rank: rung where a wave begins."""

    @property
    def fds(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.layers.fds, *self.agreement.fds, self.board, *self.bells)

    def close(self) -> None:
        """Close what this process has of it; call this once."""
        for fd in self.fds:
            os.close(fd)


def make_together(size: int) -> TogetherHandles:
    """Make what `size` ranks share; it has no name, so nothing is left of it.

    Raises:
        OSError: the system gives no memory, or no more descriptors.
    """
    with closed_on_failure() as made:
        layers = make_shared_group(size)
        made.extend(layers.fds)
        agreement = make_shared_group(size)
        made.extend(agreement.fds)
        made.append(board := os.memfd_create("pagefleet-waves"))
        os.ftruncate(board, PAGE * (1 + 8 * size // PAGE))
        return TogetherHandles(layers, agreement, board, make_bells(size))


class WaveBoard:
    """Where ranks call for waves: each writes its own number, and all read the largest.

    Args:
        handles: of all ranks.
        index: of this one.
    """

    def __init__(self, handles: TogetherHandles, index: int) -> None:
        size = len(handles.bells)
        self._index = index
        self._called = memoryview(mmap.mmap(handles.board, PAGE * (1 + 8 * size // PAGE))).cast("Q")[:size]
        self._own = Doorbell(handles.bells[index])
        self._others = [Doorbell(fd) for rank, fd in enumerate(handles.bells) if rank != index]

    @property
    def bell(self) -> int:
        """A descriptor that is readable when somebody has called."""
        return self._own.fileno()

    def call(self, wave: int) -> None:
        """Have all ranks begin a wave."""
        self._called[self._index] = wave
        for bell in self._others:
            bell.ring()

    def newest(self) -> int:
        """Return the latest wave that any rank has called for; 0: none yet."""
        self._own.take()
        return max(self._called)
