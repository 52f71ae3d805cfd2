"""Which blocks of host memory are written to disk, and when: before memory has to give them up, coldest first.

While memory is nearly full, its coldest blocks are written, so that they can go at once when others come. Where the
disk cannot keep up, memory gives up blocks unwritten: nobody waits for a disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagefleet_kv.block_key import BlockKey
from pagefleet_kv.offload.tier import Tier

MOST_AHEAD = 1024
"""Blocks that can go at once: more than a few steps compute, and few enough to look through after each."""


@dataclass(frozen=True, slots=True)
class Spill:
    """A block to be written from its slot. Both tiers hold it until `Spiller.ended`."""

    key: BlockKey
    slot: int
    evicted: BlockKey | None
    """A block that the disk gives up for it."""


class Spiller:
    """Accounts of what goes from `host` to `disk`."""

    def __init__(self, host: Tier, disk: Tier) -> None:
        self._host = host
        self._disk = disk
        self._num_ahead = min(MOST_AHEAD, -(-host.capacity // 2))
        self._drop_found = False
        self._failed = False
        """Whether the disk did not take the last one: then it gives up no more than one block for the next attempt."""

    def due(self) -> Iterator[Spill]:
        """Take the blocks whose turn it is."""
        for key in self._host.coldest(self._num_ahead - self._host.num_free):
            if key in self._disk or not self._host.has(key):
                continue
            place = self._disk.reserve(key)
            if place is None:
                return
            yield Spill(key, self._host.hold(key), place.evicted)
            if self._failed:
                return

    def ended(self, key: BlockKey, *, written: bool) -> bool:
        """A spill is over; True if its file is to be deleted, as the block was forgotten meanwhile."""
        self._host.release(key)
        self._failed = not written
        if written:
            return not self._disk.commit(key)
        self._disk.abandon(key)
        return False

    def adopt(self, found: Sequence[BlockKey]) -> list[BlockKey]:
        """Take in what was found on the disk at the start; returns what is to be deleted."""
        return [key for key in found if key not in self._disk and (self._drop_found or not self._disk.add_ready(key))]

    def reset(self) -> list[BlockKey]:
        """Forget all that is on disk; returns what is to be deleted now."""
        self._drop_found = True
        return self._disk.doom_all()
