"""Blocks that transfers hold: reserved for what a load brings, or pinned for what a save still reads.

reservation, in each group   |<- found here, held so that it stays ->|<- filled by the load, then published ->|
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_engine.core.block_pool import BlockPool, IntegrityError


@dataclass(slots=True)
class Reservation:
    """What the first blocks of a request need that does not run yet, over all groups."""

    cached: Sequence[int]
    """Found in the prefix index; nobody may write to them."""
    blocks: list[int]
    """To be filled."""
    keys: Sequence[BlockHash]
    """What the index will call these."""


class KVHolds:
    """References that belong to transfers, in one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._reservations: dict[str, Reservation] = {}
        self._pins: dict[int, Sequence[int]] = {}

    @property
    def num_reserved(self) -> int:
        """Blocks of all reservations; one that two of them share counts twice."""
        return sum(len(reservation.cached) + len(reservation.blocks) for reservation in self._reservations.values())

    @property
    def reserved_for(self) -> set[str]:
        """Requests with a reservation."""
        return set(self._reservations)

    def reserved(self, request_id: str) -> Sequence[int]:
        """Blocks of the request's reservation, if it has one."""
        reservation = self._reservations.get(request_id)
        return () if reservation is None else (*reservation.cached, *reservation.blocks)

    @property
    def num_pins(self) -> int:
        """Saves that keep blocks."""
        return len(self._pins)

    @property
    def pins(self) -> set[int]:
        """Numbers of all pins."""
        return set(self._pins)

    def reserve(self, request_id: str, cached: Sequence[int], keys: Sequence[BlockHash]) -> Sequence[int]:
        """Hold the blocks found and take new ones for `keys`, which are returned; enough must be free."""
        if request_id in self._reservations:
            raise IntegrityError(f"{request_id} has a reservation already")
        self._pool.keep(cached)
        blocks = self._pool.allocate(len(keys))
        self._pool.keep(blocks)
        self._pool.release(blocks)
        self._reservations[request_id] = Reservation(cached, blocks, keys)
        return tuple(blocks)

    def publish(self, request_id: str, num_blocks: int) -> bool:
        """Make the first `num_blocks` filled ones findable, and give back those after them; True if there are none.

        Where others have published the same meanwhile, theirs is held instead.
        """
        reservation = self._reservations[request_id]
        if not 0 <= num_blocks <= len(reservation.blocks):
            raise IntegrityError(f"{request_id}: {num_blocks} blocks were filled and fewer were reserved")
        self._pool.publish(reservation.blocks[:num_blocks], reservation.keys[:num_blocks])
        found = self._pool.find_prefix(reservation.keys, num_blocks)
        self._pool.keep(found)
        self._pool.let_go(reservation.blocks)
        reservation.blocks = found
        return num_blocks == len(reservation.keys)

    def unreserve(self, request_id: str) -> None:
        """Give a reservation back; what of it was published stays findable."""
        blocks = self.reserved(request_id)
        del self._reservations[request_id]
        self._pool.let_go(blocks)

    def pin(self, number: int, blocks: Sequence[int], staying: Container[int] = ()) -> None:
        """Keep blocks, which somebody holds, as they are; `staying`: those that are in his window to his end."""
        if number in self._pins:
            raise IntegrityError(f"save {number} has blocks already")
        self._pool.keep(blocks, staying)
        self._pins[number] = blocks

    def unpin(self, number: int) -> None:
        """Let them go."""
        if number not in self._pins:
            raise IntegrityError(f"there is no save {number}")
        self._pool.let_go(self._pins.pop(number))

    def count(self, held: list[int]) -> None:
        """Add one for each block and holder."""
        for blocks in (*map(self.reserved, self._reservations), *self._pins.values()):
            for block in blocks:
                held[block] += 1
