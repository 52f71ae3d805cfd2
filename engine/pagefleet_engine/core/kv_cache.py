"""Which blocks hold each running request's K/V. The scheduler asks in tokens and passes block numbers on unread.

    known tokens   |<--------------------------- num_tokens --------------------------->|
    full group     |<----------------------- blocks, taken at admission ----------------------->|  room for the next
    window group   |  out of the window  |<--- blocks of the step --->|   promised   |               tokens
    K/V written    |<- found in the cache ->|<- computed ->|
    published      |<--------- full blocks with K/V -->|

Layers are in groups (`kv_groups`), and each request has a table per group, all over one pool. A request gets at
admission what all its known tokens need, or the promise of it, so a long prompt never runs out half way; only growth by
sampled tokens can. Blocks are published to the prefix index after the step that filled them, never before: whoever
finds a block finds its K/V written. A published block is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_kv.port import BlockRun
from pagefleet_protocol.block_hash import extend_hashes

from pagefleet_engine.core.block_pool import BlockPool, IntegrityError
from pagefleet_engine.core.cache_events import CacheEvents
from pagefleet_engine.core.group_table import FullGroup, GroupTable, LayerGroup, Span, WindowGroup
from pagefleet_engine.core.kv_groups import KVGroups, group_layers, longest_request, most_window_blocks, num_blocks_for
from pagefleet_engine.core.kv_holds import KVHolds
from pagefleet_engine.core.prefix_hit import GroupIndex, PrefixHit, find_hit
from pagefleet_engine.core.prefix_lookups import PrefixLookups
from pagefleet_engine.core.request import Request

NO_BLOCKS: Sequence[Sequence[int]] = ()
NULL_BLOCK = 0
"""Stands in a new table for a block that no token will read; a table's entries must name blocks of the pool."""
ONE_GROUP = group_layers([None])


@dataclass(slots=True)
class _Table:
    groups: Sequence[GroupTable]
    num_published: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request gets on admission."""

    blocks: Sequence[Sequence[int]]
    """Per KV group: its table for the first step, NULL_BLOCK before a window."""
    num_cached_tokens: int
    """Leading tokens whose K/V is there already; always less than the known tokens."""


class KVCache:
    """Block tables over one pool of `num_blocks` blocks of `block_size` tokens.

    `groups`: the model's layers; by default all see everything. `chunk`: most tokens of one request in one step, the
    step's token budget; it matters where layers have windows.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: KVGroups = ONE_GROUP,
        chunk: int = 1,
        events: CacheEvents | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.capacity_tokens = longest_request(groups, num_blocks, block_size, chunk)
        """Tokens that one request can have at most, alone in the pool."""
        self._chunk = chunk
        self._indexes = [
            GroupIndex(group.window, bytes([number]) if number else b"", group.chunked)
            for number, group in enumerate(groups.groups)
        ]
        windows = [index.window for index in self._indexes]
        self._first_full = windows.index(None) if None in windows else None
        self.lookups = PrefixLookups(block_size, events)
        """What requests found, and why not the rest."""
        self._pool = BlockPool(num_blocks, self.lookups if enable_prefix_caching else events)
        self.holds = KVHolds(self._pool)
        """What transfers hold, beside the requests."""
        self._groups: list[LayerGroup] = [
            FullGroup(self._pool, index, block_size)
            if index.window is None
            else WindowGroup(self._pool, index, block_size, chunk)
            for index in self._indexes
        ]
        self._has_windows = any(window is not None for window in windows)
        self._tables: dict[str, _Table] = {}

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._pool.num_blocks

    @property
    def num_groups(self) -> int:
        """KV groups, in each of which a request has a table."""
        return len(self._groups)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds; some may be promised, some may still serve as cached prefixes."""
        return self._pool.num_free

    @property
    def num_available_blocks(self) -> int:
        """Free blocks that are promised to nobody; negative where saves keep what windows will leave behind."""
        return self._pool.num_available

    @property
    def usage(self) -> float:
        """Share of the blocks that requests and transfers hold or are promised, 0 to 1."""
        return 1.0 - max(0, self._pool.num_available) / self._pool.num_blocks

    def admit(self, request: Request, spare_blocks: int, max_new_tokens: int | None = None) -> Grant | None:
        """Give the request what all its known tokens need, the longest cached prefix first.

        Returns None, and changes nothing, when fewer than `spare_blocks` blocks per group would stay available.
        `max_new_tokens` bounds the tokens of its first step (default: `chunk`).
        """
        hit = self._find_hit(request)
        span = self._first_span(request, hit, max_new_tokens)
        parts = list(zip(self._groups, hit.blocks, strict=True))
        if self._pool.num_available - self._taken_by_admission(request, hit, span) < spare_blocks * len(parts):
            return None
        for group, cached in parts:
            group.hold(cached)
        tables = [group.admit(cached, span) for group, cached in parts]
        self._tables[request.request_id] = _Table(tables, hit.num_blocks)
        request.room = self._room(tables, span)
        return Grant(tuple((*[NULL_BLOCK] * table.start, *table.blocks) for table in tables), span.computed)

    def note_lookup(self, request: Request, num_cached_tokens: int) -> None:
        """Count what a request found that was just admitted for the first time."""
        if self.enable_prefix_caching and request.reads_prefix_cache:
            self.lookups.note(request, num_cached_tokens, self._pool)

    def taken_by_admission(self, request: Request) -> int:
        """Blocks that will no more be available when the request is in."""
        hit = self._find_hit(request)
        return self._taken_by_admission(request, hit, self._first_span(request, hit, None))

    def num_cached_tokens(self, request: Request) -> int:
        """Leading tokens of the request whose K/V is here."""
        return self._find_hit(request).num_blocks * self.block_size

    def num_blocks_of(self, num_prefix_blocks: int) -> int:
        """Blocks over all groups without which a prefix is none."""
        return sum(num_prefix_blocks - index.start(num_prefix_blocks, self.block_size) for index in self._indexes)

    def reserve(self, request: Request, num_blocks: int, spare_blocks: int) -> Sequence[BlockRun] | None:
        """Hold what the first `num_blocks` blocks of a request that is not in need: those found here, and new ones for
        the rest, which are returned.

        Returns None, and changes nothing, when fewer than `spare_blocks` would stay available.
        """
        hit = self._find_hit(request, num_blocks)
        cached: list[int] = []
        missing = []
        for number, (index, found) in enumerate(zip(self._indexes, hit.blocks, strict=True)):
            start = index.start(num_blocks, self.block_size)
            cached += found[len(found) - max(0, hit.num_blocks - start) :]
            if (first := max(start, hit.num_blocks)) < num_blocks:
                missing.append((number, first, request.block_hashes[first:num_blocks]))
        num_missing = sum(len(hashes) for _, _, hashes in missing)
        num_taken = num_missing + self._pool.count_free(cached) + self._pool.count_promised(cached)
        if self._pool.num_available - num_taken < spare_blocks:
            return None
        keys = [key for number, _, hashes in missing for key in self._indexes[number].keys(hashes)]
        blocks = iter(self.holds.reserve(request.request_id, cached, keys))
        return [BlockRun(first, [next(blocks) for _ in hashes], hashes, number) for number, first, hashes in missing]

    def block_runs(self, request: Request, first: int, last: int) -> Sequence[BlockRun]:
        """The blocks `first` to `last` (excluded) of a request that is in, as far as it still holds them in each group;
        they are full."""
        runs = []
        for number, table in enumerate(self._tables[request.request_id].groups):
            begin = max(first, table.start)
            if begin < last:
                blocks = table.blocks[begin - table.start : last - table.start]
                runs.append(BlockRun(begin, blocks, request.block_hashes[begin:last], number))
        return runs

    def pinnable(self, request: Request, runs: Sequence[BlockRun]) -> tuple[Sequence[BlockRun], set[int]]:
        """Those of a running request's blocks that may be kept, and which of them are in its windows to its end.

        For what a window will leave behind another block must be available, as the request counts on it; one that was
        preempted keeps none of it, so that its own saves can never be what it lacks blocks for.
        """
        last = request.ends_at - 2  # the last that is computed before another
        staying = [run.since(self._indexes[run.group].start_for(last, self.block_size)) for run in runs]
        blocks = {block for run in staying for block in run.blocks}
        leaving = [block for run in runs for block in run.blocks if block not in blocks]
        are_spare = not request.num_preemptions and self._pool.count_promised(leaving) <= self._pool.num_available
        return runs if are_spare or not leaving else [run for run in staying if run.blocks], blocks

    def grow(self, request: Request, num_new_tokens: int) -> Sequence[Sequence[int]] | None:
        """Make room for the request's next tokens; returns what each group adds, or None when too few are free."""
        end = request.num_computed_tokens + num_new_tokens
        return NO_BLOCKS if end <= request.room else self._extend(self._tables[request.request_id], request, end)

    def publish_computed(self, request: Request, num_tokens: int) -> None:
        """Offer the full blocks among the first `num_tokens` tokens, which are computed by now, to later requests."""
        if not self.enable_prefix_caching:
            return
        table = self._tables[request.request_id]
        num_full = num_tokens // self.block_size
        if num_full == table.num_published:
            return
        extend_hashes(request.block_hashes, request.prefix_root, request.token_ids, self.block_size)
        for group, blocks in zip(self._groups, table.groups, strict=True):
            group.publish(blocks, request.block_hashes, table.num_published, num_full)
        table.num_published = num_full

    def free(self, request_id: str) -> None:
        """Give the request's blocks back; those published stay findable until they are reused."""
        for group, blocks in zip(self._groups, self._tables.pop(request_id).groups, strict=True):
            group.release(blocks)

    def discard(self, request: Request) -> None:
        """As `free`, but nothing that the request touched is found again: its K/V may be wrong."""
        for group, blocks in zip(self._groups, self._tables[request.request_id].groups, strict=True):
            group.forget(blocks, request.block_hashes)
        self.free(request.request_id)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds; returns their number."""
        for table in self._tables.values():
            for blocks in table.groups:
                blocks.unpublished.clear()
        return self._pool.reset_prefix_cache()

    def num_common_blocks(self) -> int:
        """Leading blocks of the full-attention tables that all requests share; 0 for fewer than two requests.

        Only blocks found in the cache are shared, so their K/V is there, and each table has them in the same places.
        """
        if self._first_full is None or len(self._tables) < 2:
            return 0
        any_table = next(iter(self._tables.values()))
        return self._pool.count_leading(any_table.groups[self._first_full].blocks, len(self._tables))

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Check that only the running requests and transfers hold blocks, enough of them, and that all counts agree.

        Raises:
            IntegrityError: the accounts do not add up.
        """
        if self._tables.keys() != {request.request_id for request in running}:
            raise IntegrityError("the requests with blocks are not the running ones")
        held = [0] * self._pool.num_blocks
        self.holds.count(held)
        in_windows = set()
        num_quotas = 0
        for request in running:
            table = self._tables[request.request_id]
            for index, blocks in zip(self._indexes, table.groups, strict=True):
                if blocks.end * self.block_size < max(request.num_computed_tokens, request.room):
                    raise IntegrityError(f"{request.request_id}: {blocks.end} blocks do not fit its tokens")
                if index.window is not None:
                    most = most_window_blocks(index.window, self._chunk, self.block_size)
                    if not len(blocks.blocks) <= blocks.quota <= most:
                        raise IntegrityError(f"{request.request_id}: a window holds {len(blocks.blocks)} blocks")
                    in_windows.update(blocks.blocks)
                    num_quotas += blocks.quota
                for block in blocks.blocks:
                    held[block] += 1
        if in_windows != self._pool.in_windows:
            raise IntegrityError("the blocks in windows are not those of the tables")
        num_promised = num_quotas - self._pool.count_promised(in_windows)
        if self._pool.num_promised != num_promised or self._pool.num_available < -self._pool.num_kept:
            raise IntegrityError(f"{self._pool.num_promised} blocks are promised, of {self._pool.num_free} free ones")
        self._pool.check_integrity(held)

    def _taken_by_admission(self, request: Request, hit: PrefixHit, span: Span) -> int:
        """Over all groups; what a load holds for the request alone goes over into its windows."""
        taken = 0
        reserved = set(self.holds.reserved(request.request_id))
        for index, group, found in zip(self._indexes, self._groups, hit.blocks, strict=True):
            taken += group.taken_by_admission(found, span)
            if reserved and index.window is not None:
                taken -= self._pool.count_single([block for block in found if block in reserved])
        return taken

    def _first_span(self, request: Request, hit: PrefixHit, max_new_tokens: int | None) -> Span:
        num_cached, known = hit.num_blocks * self.block_size, request.num_tokens
        return Span(num_cached, min(known, num_cached + (max_new_tokens or self._chunk)), known)

    def _find_hit(self, request: Request, most_blocks: int | None = None) -> PrefixHit:
        if not self.enable_prefix_caching or not request.reads_prefix_cache:
            return PrefixHit(0, [[] for _ in self._groups])
        extend_hashes(request.block_hashes, request.prefix_root, request.token_ids, self.block_size)
        # At least one token must be computed, for its logits. Where all is cached, the whole last block is computed
        # again, into a block of the request's own: shared blocks are only ever read.
        limit = (request.num_tokens - 1) // self.block_size
        limit = limit if most_blocks is None else min(limit, most_blocks)
        return find_hit(self._pool, self._indexes, request.block_hashes, limit, self.block_size)

    def _extend(self, table: _Table, request: Request, end: int) -> Sequence[Sequence[int]] | None:
        if not self._has_windows:
            return self._extend_full(table.groups, request, end)
        span = Span(request.num_computed_tokens, end, request.num_tokens)
        num_settled = table.num_published if self.enable_prefix_caching else num_blocks_for(end, self.block_size)
        parts = list(zip(self._groups, table.groups, strict=True))
        for group, blocks in parts:
            group.slide(blocks, span.computed, num_settled)
        if sum(group.taken_by_growth(blocks, span) for group, blocks in parts) > self._pool.num_available:
            return None
        added = [group.grow(blocks, span) for group, blocks in parts]
        request.room = self._room(table.groups, span)
        return added if any(added) else NO_BLOCKS

    def _extend_full(self, tables: Sequence[GroupTable], request: Request, end: int) -> Sequence[Sequence[int]] | None:
        """As `_extend`, in a third of the time: all groups need the same, and there is nothing to give back."""
        count = -(-(end - request.room) // self.block_size)
        if count * len(tables) > self._pool.num_available:
            return None
        added = []
        for table in tables:
            blocks = self._pool.allocate(count)
            table.blocks += blocks
            added.append(blocks)
        request.room += count * self.block_size
        return added

    def _room(self, tables: Sequence[GroupTable], span: Span) -> int:
        """Tokens up to which every group has blocks and none to give back."""
        if self._has_windows and span.end - span.computed > 1:  # after a chunk the next step finds blocks to give back
            return span.end
        return min([table.end for table in tables]) * self.block_size
