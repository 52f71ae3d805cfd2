"""One request's blocks in one KV group, and the two kinds of groups: layers that see everything, or a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_engine.core.block_pool import BlockPool, IntegrityError
from pagefleet_engine.core.kv_groups import most_window_blocks, num_blocks_for
from pagefleet_engine.core.prefix_hit import GroupIndex


@dataclass(frozen=True, slots=True)
class Span:
    """A request around one step, in tokens from its start."""

    computed: int
    """Computed before the step, or found in the cache."""
    end: int
    """Computed after the step."""
    known: int
    """More than `end` while a prompt is computed in chunks."""


@dataclass(slots=True)
class GroupTable:
    """The request's blocks in one group, in order of the tokens they hold."""

    start: int
    """Index of the first block that is held; the ones before it are out of the window."""
    blocks: list[int]
    quota: int = 0
    """Blocks that are held or promised in a group with a window; 0 in a full group, where nothing is promised."""
    unpublished: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Index -> block, and its number of uses: given back before the step that filled it was known to have succeeded."""

    @property
    def end(self) -> int:
        """Index after the last block."""
        return self.start + len(self.blocks)


class LayerGroup(Protocol):
    """The blocks of all requests in one group. Admission goes hold, admit; a step's growth goes slide, grow.

    What admission and growth take is asked for first, over all groups, and compared with `BlockPool.num_available`.
    """

    def taken_by_admission(self, cached: Sequence[int], span: Span) -> int:
        """Blocks that will no more be available when a request with these cached ones is in."""
        ...

    def hold(self, cached: Sequence[int]) -> None:
        """Hold cached blocks, in all groups before any of them takes others."""
        ...

    def admit(self, cached: Sequence[int], span: Span) -> GroupTable:
        """Begin a table with cached blocks, which are held, and those for the first step."""
        ...

    def slide(self, table: GroupTable, num_computed_tokens: int, num_published: int) -> None:
        """Give back what no token from position `num_computed_tokens` on can see."""
        ...

    def taken_by_growth(self, table: GroupTable, span: Span) -> int:
        """Blocks that will no more be available when the table has grown; negative when it needs fewer than it had."""
        ...

    def grow(self, table: GroupTable, span: Span) -> list[int]:
        """Make room for the step; returns the added blocks."""
        ...

    def publish(self, table: GroupTable, hashes: Sequence[BlockHash], first: int, last: int) -> None:
        """Make the computed blocks `first` to `last` (excluded) findable, as far as they still hold what they held."""
        ...

    def forget(self, table: GroupTable, hashes: Sequence[BlockHash]) -> None:
        """Make unfindable whatever the request has held, or whatever block its hashes name."""
        ...

    def release(self, table: GroupTable) -> None:
        """Give everything back."""
        ...


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


class WindowGroup:
    """Implements `LayerGroup` for steps of at most `chunk` tokens of a request."""

    def __init__(self, pool: BlockPool, index: GroupIndex, block_size: int, chunk: int) -> None:
        assert index.window is not None, "a full group has no window"
        self._pool = pool
        self._index = index
        self._block_size = block_size
        self._most_blocks = most_window_blocks(index.window, chunk, block_size)

    def taken_by_admission(self, cached: Sequence[int], span: Span) -> int:
        """The whole quota, whether cached blocks are shared or not."""
        num_blocks = num_blocks_for(span.known, self._block_size)
        return min(num_blocks - self._first_needed(span.computed), self._most_blocks)

    def hold(self, cached: Sequence[int]) -> None:
        """See LayerGroup."""
        self._pool.enter_windows(cached)

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
            self._pool.leave_windows(out[num_settled:], to_be_published=True)
        table.start = first
        self._pool.leave_windows(out[:num_settled])

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
        self._pool.leave_windows(table.blocks)
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
        self._pool.in_windows.update(added)
        table.blocks += added
        return added

    def _first_needed(self, num_computed_tokens: int) -> int:
        return self._index.start_for(num_computed_tokens, self._block_size)
