"""A KV group whose layers have a window: a request holds only the blocks that its next tokens can see.

    blocks   given back |<------ held: start to end ------->| taken when a step needs them
    tokens              |<- window - 1 ->|<- the step's ->|

While a prompt is computed, its blocks move through the window chunk by chunk. A request that was admitted must not run
out on the way, so it has a quota: as many blocks as its largest chunk can need. What it does not hold of its quota is
promised to it, and nobody else gets it. Quotas count a block that two requests share twice; so when one of them gives
it back, and it stays held, there is still one for it. Once the prompt is computed the quota is what is held, and grows
or fails like everything that sampled tokens need.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_engine.core.block_pool import BlockPool, IntegrityError
from pagefleet_engine.core.group_table import GroupTable, Span
from pagefleet_engine.core.kv_needs import first_needed_block, most_window_blocks, num_blocks_for
from pagefleet_engine.core.prefix_hit import GroupIndex


class WindowGroup:
    """Implements `LayerGroup` for steps of at most `chunk` tokens of a request."""

    def __init__(self, pool: BlockPool, index: GroupIndex, block_size: int, chunk: int) -> None:
        assert index.window is not None, "a full group has no window"
        self._pool = pool
        self._index = index
        self._window = index.window
        self._block_size = block_size
        self._most_blocks = most_window_blocks(index.window, chunk, block_size)

    def taken_by_admission(self, cached: Sequence[int], span: Span) -> int:
        """The whole quota, whether cached blocks are shared or not."""
        num_blocks = num_blocks_for(span.known, self._block_size)
        return min(num_blocks - self._first_needed(span.computed), self._most_blocks)

    def hold(self, cached: Sequence[int]) -> None:
        """See LayerGroup."""
        self._pool.num_promised -= self._pool.count_free(cached)
        self._pool.hold(cached)

    def admit(self, cached: Sequence[int], span: Span) -> GroupTable:
        """See LayerGroup."""
        table = GroupTable(self._first_needed(span.computed), list(cached), self.taken_by_admission(cached, span))
        self._pool.num_promised += table.quota
        self._take(table, span)
        return table

    def slide(self, table: GroupTable, num_computed_tokens: int, num_published: int) -> None:
        """See LayerGroup. What a step in flight has filled is remembered, to be published if it still holds it then."""
        first = self._first_needed(num_computed_tokens)
        count = first - table.start
        if count <= 0:
            return
        out = table.blocks[:count]
        del table.blocks[:count]
        num_settled = min(count, max(0, num_published - table.start))
        if num_settled < count:
            for index, block in enumerate(out[num_settled:], table.start + num_settled):
                table.unpublished[index] = (block, self._pool.num_uses(block))
            self._give_back(out[num_settled:], to_be_published=True)
        table.start = first
        self._give_back(out[:num_settled])

    def taken_by_growth(self, table: GroupTable, span: Span) -> int:
        """See LayerGroup."""
        return self._quota_after(table, span) - table.quota

    def grow(self, table: GroupTable, span: Span) -> list[int]:
        """See LayerGroup."""
        quota = self._quota_after(table, span)
        self._pool.num_promised += quota - table.quota
        table.quota = quota
        return self._take(table, span)

    def publish(self, table: GroupTable, hashes: Sequence[BlockHash], first: int, last: int) -> None:
        """See LayerGroup."""
        if table.unpublished:
            self._publish_given_back(table, hashes, last)
        first = max(first, table.start)
        if first < last:
            blocks = table.blocks[first - table.start : last - table.start]
            self._pool.publish(blocks, self._index.keys(hashes[first:last]))

    def forget(self, table: GroupTable, hashes: Sequence[BlockHash]) -> None:
        """See LayerGroup."""
        self._pool.unpublish(table.blocks)
        self._pool.forget(self._index.keys(hashes[: table.start]))

    def release(self, table: GroupTable) -> None:
        """See LayerGroup."""
        self._give_back(table.blocks)
        self._pool.num_promised -= table.quota

    def _publish_given_back(self, table: GroupTable, hashes: Sequence[BlockHash], last: int) -> None:
        for index in [index for index in table.unpublished if index < last]:
            block, num_uses = table.unpublished.pop(index)
            if self._pool.num_uses(block) == num_uses:
                self._pool.publish([block], self._index.keys(hashes[index : index + 1]))

    def _quota_after(self, table: GroupTable, span: Span) -> int:
        if span.end < span.known:
            return table.quota
        return max(len(table.blocks), num_blocks_for(span.end, self._block_size) - table.start)

    def _take(self, table: GroupTable, span: Span) -> list[int]:
        count = num_blocks_for(span.end, self._block_size) - table.end
        if count <= 0:
            return []
        if len(table.blocks) + count > table.quota:
            raise IntegrityError(f"a step of {span.end - span.computed} tokens needs more blocks than were promised")
        added = self._pool.allocate(count)
        self._pool.num_promised -= count
        table.blocks += added
        return added

    def _give_back(self, blocks: Sequence[int], to_be_published: bool = False) -> None:
        num_free = self._pool.num_free
        self._pool.release(blocks, to_be_published)
        self._pool.num_promised += self._pool.num_free - num_free

    def _first_needed(self, num_computed_tokens: int) -> int:
        return first_needed_block(num_computed_tokens, self._window, self._block_size)
