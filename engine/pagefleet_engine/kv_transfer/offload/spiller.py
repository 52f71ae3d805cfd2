"""Which blocks of host memory are written to disk, and when: before memory has to give them up, coldest first.

Once half of the memory holds blocks that the disk has not, the coldest of them are written, so that the other half can
go at once. Where the disk cannot keep up, memory gives up blocks unwritten: nobody waits for a disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagefleet_engine.kv_transfer.block_key import BlockKey
from pagefleet_engine.kv_transfer.offload.tier import Tier


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
        self._most_unspilled = host.capacity // 2
        self._most_under_way = -(-host.capacity // 4)  # many, as what is next is only looked at between steps
        self._unspilled: OrderedDict[BlockKey, None] = OrderedDict()
        """Blocks in memory that the disk has not, least recently used first."""
        self._num_under_way = 0
        self._drop_found = False

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """Blocks that follow each other are in memory now; the last of them go first, as they do in the tiers."""
        for key in reversed(keys):
            if key not in self._disk:
                self._unspilled[key] = None

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Blocks of a prefix were used, wherever they are."""
        self._disk.touch(keys)
        self.settle(keys)

    def settle(self, keys: Sequence[BlockKey]) -> None:
        """Put the blocks of a prefix in order, the head last."""
        for key in reversed(keys):
            if key in self._unspilled:
                self._unspilled.move_to_end(key)

    def evicted(self, key: BlockKey) -> None:
        """Memory has given up a block."""
        self._unspilled.pop(key, None)

    def due(self) -> Iterator[Spill]:
        """Take the blocks whose turn it is."""
        while len(self._unspilled) > self._most_unspilled and self._num_under_way < self._most_under_way:
            key = next(iter(self._unspilled))
            place = self._disk.reserve(key) if self._host.has(key) and key not in self._disk else None
            del self._unspilled[key]
            if place is not None:
                self._num_under_way += 1
                yield Spill(key, self._host.hold(key), place.evicted)

    def ended(self, key: BlockKey, *, written: bool) -> bool:
        """A spill is over; True if its file is to be deleted, as the block was forgotten meanwhile."""
        self._num_under_way -= 1
        in_memory = not self._host.release(key)
        if written:
            return not self._disk.commit(key)
        self._disk.abandon(key)
        if in_memory and self._host.has(key):
            self._unspilled[key] = None
        return False

    def adopt(self, found: Sequence[BlockKey]) -> list[BlockKey]:
        """Take in what was found on the disk at the start; returns what is to be deleted."""
        return [key for key in found if key not in self._disk and (self._drop_found or not self._disk.add_ready(key))]

    def reset(self) -> list[BlockKey]:
        """Forget all that is on disk; returns what is to be deleted now."""
        self._unspilled.clear()
        self._drop_found = True
        return self._disk.doom_all()
