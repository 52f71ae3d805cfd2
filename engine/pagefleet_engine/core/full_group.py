"""A KV group whose layers see everything: a request holds all its blocks until it ends."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_engine.core.block_pool import BlockPool
from pagefleet_engine.core.group_table import GroupTable, Span
from pagefleet_engine.core.kv_needs import num_blocks_for
from pagefleet_engine.core.prefix_hit import GroupIndex


class FullGroup:
    """Implements `LayerGroup`. The blocks for all known tokens are taken at admission."""

    def __init__(self, pool: BlockPool, index: GroupIndex, block_size: int) -> None:
        self._pool = pool
        self._index = index
        self._block_size = block_size

    def taken_by_admission(self, cached: Sequence[int], span: Span) -> int:
        """The new blocks, and the cached ones that nobody holds."""
        return num_blocks_for(span.known, self._block_size) - len(cached) + self._pool.count_free(cached)

    def hold(self, cached: Sequence[int]) -> None:
        """See LayerGroup."""
        self._pool.hold(cached)

    def admit(self, cached: Sequence[int], span: Span) -> GroupTable:
        """See LayerGroup."""
        num_blocks = num_blocks_for(span.known, self._block_size)
        return GroupTable(0, [*cached, *self._pool.allocate(num_blocks - len(cached))])

    def slide(self, table: GroupTable, num_computed_tokens: int, num_published: int) -> None:
        """Nothing is ever out of sight."""

    def taken_by_growth(self, table: GroupTable, span: Span) -> int:
        """See LayerGroup."""
        return max(0, num_blocks_for(span.end, self._block_size) - len(table.blocks))

    def grow(self, table: GroupTable, span: Span) -> list[int]:
        """See LayerGroup."""
        added = self._pool.allocate(self.taken_by_growth(table, span))
        table.blocks += added
        return added

    def publish(self, table: GroupTable, hashes: Sequence[BlockHash], first: int, last: int) -> None:
        """See LayerGroup."""
        self._pool.publish(table.blocks[first:last], self._index.keys(hashes[first:last]))

    def forget(self, table: GroupTable, hashes: Sequence[BlockHash]) -> None:
        """See LayerGroup."""
        self._pool.unpublish(table.blocks)

    def release(self, table: GroupTable) -> None:
        """See LayerGroup."""
        self._pool.release(table.blocks)
