"""The computed blocks of one transfer at P: where each is (the pool, or spilled memory), and who may have it back.

index        |0 .. sent|  under way  |  waiting ..  num_blocks|
kept by      | nobody  |      pins of saves, or spills        |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_kv.p2p.transfer.actions import DropSpill, Piece, Unpin


@dataclass(slots=True, eq=False)
class _Hold:
    """A pin, or a spill."""

    number: int
    spill: bool
    size: int
    """Its blocks: memory that is free only when none of them is kept."""
    kept: int
    """Those that it is kept for."""
    moving: bool = False
    """Its blocks are being copied from it (a pin) or to it (a spill)."""


@dataclass(slots=True)
class _Place:
    hold: _Hold
    block: int
    """Number in the pool, or index in the spill."""


class Holdings:
    """Blocks of one transfer, by their index in the request."""

    def __init__(self) -> None:
        self._places: list[_Place | None] = []
        self.hashes: list[BlockHash] = []
        self._spills: dict[int, tuple[_Hold, _Hold, list[int]]] = {}
        """Copies under way: from, to, indices."""
        self.num_pinned = 0
        """Blocks that are kept in the pool."""
        self.num_spilled = 0
        """Blocks of all spills that exist or are being made."""

    @property
    def num_blocks(self) -> int:
        """Blocks told so far, from the request's first on."""
        return len(self._places)

    @property
    def moving(self) -> bool:
        """True while something is being spilled."""
        return bool(self._spills)

    def add(self, save: int, first: int, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> list[Unpin | DropSpill]:
        """Take note of what a save brought; blocks that are known are let go."""
        known = self.num_blocks - first
        assert known >= 0, "a save left blocks out"
        new = blocks[known:]
        if not new:
            return [Unpin(save)]
        hold = _Hold(save, spill=False, size=len(blocks), kept=len(new))
        self._places += [_Place(hold, block) for block in new]
        self.hashes += hashes[known:]
        self.num_pinned += len(new)
        return []

    def piece(self, first: int, end: int) -> Piece | None:
        """Return the blocks from `first` on, as many as can be read at once; None: there are none now."""
        taken: list[int] = []
        start: _Place | None = None
        for index in range(first, min(end, self.num_blocks)):
            place = self._places[index]
            assert place is not None, "it was let go"
            if place.hold.moving or (start is not None and place.hold.spill != start.hold.spill):
                break
            if place.hold.spill and start is not None and place.hold is not start.hold:
                break
            start = start or place
            taken.append(place.block)
        if start is None:
            return None
        if start.hold.spill:
            return Piece(first, len(taken), spill=start.hold.number, spill_offset=taken[0])
        return Piece(first, len(taken), blocks=taken)

    def release(self, first: int, end: int) -> list[Unpin | DropSpill]:
        """Let blocks go: they were sent, or nobody wants them."""
        freed: list[Unpin | DropSpill] = []
        for index in range(first, min(end, self.num_blocks)):
            place = self._places[index]
            if place is not None and not place.hold.moving:
                self._places[index] = None
                freed += self._let_go(place.hold, 1)
        return freed

    def spill(self, number: int, first: int, most: int) -> list[int]:
        """Begin to copy blocks of one save, the first at or after `first` that are in the pool; returns which.

        A save is copied whole or not at all, as only then its pin ends.
        """
        for index in range(first, self.num_blocks):
            place = self._places[index]
            if place is None or place.hold.spill or place.hold.moving or place.hold.kept > most:
                continue
            indices = [i for i in range(first, self.num_blocks) if self._held_by(i, place.hold)]
            if len(indices) < place.hold.kept:
                continue  # some of it is on its way out already
            place.hold.moving = True
            copy = _Hold(number, spill=True, size=len(indices), kept=len(indices))
            self._spills[number] = (place.hold, copy, indices)
            self.num_spilled += copy.size
            return [self._block(i) for i in indices]
        return []

    def spilled(self, number: int, done: bool) -> list[Unpin | DropSpill]:
        """A copy ended; `done`: the blocks are there now."""
        source, copy, indices = self._spills.pop(number)
        source.moving = False
        if not done:
            self.num_spilled -= copy.size
            return []
        for offset, index in enumerate(indices):
            self._places[index] = _Place(copy, offset)
        return self._let_go(source, len(indices))

    def _held_by(self, index: int, hold: _Hold) -> bool:
        place = self._places[index]
        return place is not None and place.hold is hold

    def _block(self, index: int) -> int:
        place = self._places[index]
        assert place is not None
        return place.block

    def _let_go(self, hold: _Hold, count: int) -> list[Unpin | DropSpill]:
        hold.kept -= count
        if not hold.spill:
            self.num_pinned -= count
            return [] if hold.kept else [Unpin(hold.number)]
        if hold.kept:
            return []
        self.num_spilled -= hold.size
        return [DropSpill(hold.number)]
