"""Room for communicators: so many at a time, and only while the device has memory for one more.

Sources and targets have rooms of their own. A source takes its seat before it asks the target for one, and who holds a
target's seat waits for nothing but a source that has its own: so no circle of engines waits for each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

MIN_FREE_BYTES = 256 << 20
"""NCCL takes some 50 to 100 MB of device memory for a communicator; less than this, and no more are made."""


class Seated(Protocol):
    """Who has a communicator, or is about to make one."""

    @property
    def num_bytes(self) -> int:
        """Device memory of its communicator."""
        ...

    def give_up(self) -> bool:
        """Leave the seat, now or soon, if nothing is under way; return whether it does."""
        ...


class Seats:
    """The least recently used first. Used by one thread, but for `len` and `num_bytes`.

    Args:
        streams: one for each seat, made once: torch hands out some 32 in turn, and two links on one would wait for
            each other. None on a CPU.
        free_bytes: returns what the device has left.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream | None], free_bytes: Callable[[], int]) -> None:
        self._streams = list(streams)
        self._free_bytes = free_bytes
        self._taken: OrderedDict[Seated, torch.cuda.Stream | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def num_bytes(self) -> int:
        """Device memory of all communicators."""
        return sum(owner.num_bytes for owner in list(self._taken))

    def take(self, owner: Seated) -> bool:
        """Return whether the owner has a seat now; if not, one that idles is asked to leave, so ask again."""
        if owner in self._taken:
            return True
        if self._streams and self._free_bytes() >= MIN_FREE_BYTES:
            self._taken[owner] = self._streams.pop()
            return True
        for other in list(self._taken):
            if other.give_up():
                return other not in self._taken and self.take(owner)
        return False

    def stream(self, owner: Seated) -> torch.cuda.Stream | None:
        """Return the stream of the owner's seat."""
        return self._taken[owner]

    def use(self, owner: Seated) -> None:
        """It is the most recently used now."""
        if owner in self._taken:
            self._taken.move_to_end(owner)

    def leave(self, owner: Seated) -> None:
        """The seat is free again."""
        if owner in self._taken:
            self._streams.append(self._taken.pop(owner))
