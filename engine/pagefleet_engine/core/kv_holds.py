"""Blocks that transfers hold: reserved for what a load brings, or pinned for what a save still reads.

reservation   |<- found here, held so that it stays ->|<- filled by the load, then published ->|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_engine.core.block_pool import BlockPool, IntegrityError


@dataclass(slots=True)
class Reservation:
    """The first blocks of a request that does not run yet."""

    blocks: list[int]
    hashes: Sequence[BlockHash]
    num_cached: int
    """Leading ones that were found in the prefix index; nobody may write to them."""


class KVHolds:
    """References that belong to transfers, in one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._reservations: dict[str, Reservation] = {}
        self._pins: dict[int, Sequence[int]] = {}

    @property
    def num_reserved(self) -> int:
        """Blocks of all reservations; one that two of them share counts twice."""
        return sum(len(reservation.blocks) for reservation in self._reservations.values())

    @property
    def reserved_for(self) -> set[str]:
        """Requests with a reservation."""
        return set(self._reservations)

    @property
    def num_pins(self) -> int:
        """Saves that keep blocks."""
        return len(self._pins)

    @property
    def pins(self) -> set[int]:
        """Numbers of all pins."""
        return set(self._pins)

    def reserve(self, request_id: str, cached: list[int], hashes: Sequence[BlockHash]) -> Reservation:
        """Hold the blocks found and take new ones for the rest of `hashes`; enough must be free."""
        if request_id in self._reservations:
            raise IntegrityError(f"{request_id} has a reservation already")
        self._pool.hold(cached)
        blocks = [*cached, *self._pool.allocate(len(hashes) - len(cached))]
        reservation = self._reservations[request_id] = Reservation(blocks, hashes, len(cached))
        return reservation

    def publish(self, request_id: str, num_blocks: int) -> None:
        """Make the first `num_blocks` filled ones findable, and give back those after them.

        Where others have published the same meanwhile, theirs is held instead.
        """
        reservation = self._reservations[request_id]
        first, last = reservation.num_cached, reservation.num_cached + num_blocks
        if not first <= last <= len(reservation.blocks):
            raise IntegrityError(f"{request_id}: {num_blocks} blocks were filled and fewer were reserved")
        own = reservation.blocks[first:last]
        self._pool.publish(own, reservation.hashes[first:last])
        found = self._pool.find_prefix(reservation.hashes[first:last], num_blocks)
        self._pool.hold(found)
        self._pool.release([*own, *reservation.blocks[last:]])
        reservation.blocks[first:] = found

    def unreserve(self, request_id: str) -> None:
        """Give a reservation back; what of it was published stays findable."""
        self._pool.release(self._reservations.pop(request_id).blocks)

    def pin(self, number: int, blocks: Sequence[int]) -> None:
        """Keep blocks, which somebody holds, as they are."""
        if number in self._pins:
            raise IntegrityError(f"save {number} has blocks already")
        self._pool.hold(blocks)
        self._pins[number] = blocks

    def unpin(self, number: int) -> None:
        """Let them go."""
        if number not in self._pins:
            raise IntegrityError(f"there is no save {number}")
        self._pool.release(self._pins.pop(number))

    def count(self, held: list[int]) -> None:
        """Add one for each block and holder."""
        for blocks in (*(reservation.blocks for reservation in self._reservations.values()), *self._pins.values()):
            for block in blocks:
                held[block] += 1
