"""Which stored block goes first: least recently used, or ARC, which also counts who was used more than once.

Both know keys only. Whether a block may go now, as nobody reads or writes it, is asked of the tier that holds it.
ARC: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

from pagefleet_kv.config import OffloadPolicy
from pagefleet_kv.store.block_key import BlockKey


class EvictionPolicy(Protocol):
    """The order in which the blocks of one tier go."""

    def insert(self, key: BlockKey) -> None:
        """A block has come, which is not there."""

    def touch(self, key: BlockKey) -> None:
        """A block that is there was used."""

    def refresh(self, key: BlockKey) -> None:
        """Let a block that is there go after all others of its kind, without counting that as a use."""

    def remove(self, key: BlockKey, *, evicted: bool) -> None:
        """A block is gone; `evicted`: for want of room, so that its return means something."""

    def candidates(self) -> Iterator[BlockKey]:
        """All blocks, those that should go first at the front. Nothing may change while it is read."""


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def insert(self, key: BlockKey) -> None:
        self._keys[key] = None

    def touch(self, key: BlockKey) -> None:
        self._keys.move_to_end(key)

    def refresh(self, key: BlockKey) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: BlockKey, *, evicted: bool) -> None:
        del self._keys[key]

    def candidates(self) -> Iterator[BlockKey]:
        return iter(self._keys)


class Arc:
    """Two lists, of blocks used once and more often, whose shares follow what was missed.

    used once          |<- recent ghosts ->|<- recent  ->|
    used more often    |<- frequent ghosts ->|<- frequent ->|     newest at the right

    A ghost is the key of an evicted block. When one returns, the list that it fell out of was too short, and its
    share grows. So blocks that come once and never again, such as the tail of a long prompt, do not push out a prefix
    that many requests share.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._recent: OrderedDict[BlockKey, None] = OrderedDict()
        self._frequent: OrderedDict[BlockKey, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self.target = 0.0
        """Blocks that the recent list should have; a real number, as it moves by ratios."""

    @property
    def num_ghosts(self) -> int:
        """Keys that are remembered without a block."""
        return len(self._recent_ghosts) + len(self._frequent_ghosts)

    def insert(self, key: BlockKey) -> None:
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if key in self._recent_ghosts:
            self.target = min(self._capacity, self.target + max(1.0, frequent / recent))
            del self._recent_ghosts[key]
            self._frequent[key] = None
        elif key in self._frequent_ghosts:
            self.target = max(0.0, self.target - max(1.0, recent / frequent))
            del self._frequent_ghosts[key]
            self._frequent[key] = None
        else:
            self._recent[key] = None
        self._trim_ghosts()

    def touch(self, key: BlockKey) -> None:
        if key in self._frequent:
            self._frequent.move_to_end(key)
        else:
            del self._recent[key]
            self._frequent[key] = None

    def refresh(self, key: BlockKey) -> None:
        (self._recent if key in self._recent else self._frequent).move_to_end(key)

    def remove(self, key: BlockKey, *, evicted: bool) -> None:
        if key in self._recent:
            del self._recent[key]
            ghosts = self._recent_ghosts
        else:
            del self._frequent[key]
            ghosts = self._frequent_ghosts
        if evicted:
            ghosts[key] = None
            self._trim_ghosts()

    def candidates(self) -> Iterator[BlockKey]:
        if self._recent and len(self._recent) > self.target:
            return chain(self._recent, self._frequent)
        return chain(self._frequent, self._recent)

    def _trim_ghosts(self) -> None:
        """As in the paper: recent and its ghosts within the capacity, everything within twice the capacity."""
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > self._capacity:
            self._recent_ghosts.popitem(last=False)
        most_ghosts = 2 * self._capacity - len(self._recent) - len(self._frequent) - len(self._recent_ghosts)
        while len(self._frequent_ghosts) > max(0, most_ghosts):
            self._frequent_ghosts.popitem(last=False)


def make_policy(name: OffloadPolicy, capacity: int) -> EvictionPolicy:
    """Return the policy of that name for a tier of `capacity` blocks."""
    return Arc(capacity) if name == "arc" else Lru()
