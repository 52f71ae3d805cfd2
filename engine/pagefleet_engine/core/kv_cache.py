"""Which blocks hold each running request's K/V. The scheduler asks in tokens and passes block numbers on unread.

    known tokens   |<--------------------------- num_tokens --------------------------->|
    blocks         |<----------------------- table, taken at admission ------------------------>|  room for the next
    K/V written    |<- found in the cache ->|<- computed ->|                                       tokens
    published      |<--------- full blocks with K/V -->|

A request gets the blocks for all its known tokens when it is admitted, so a long prompt never runs out half way; only
growth by sampled tokens can. Blocks are published to the prefix index after the step that filled them, never before:
whoever finds a block finds its K/V written. A published block is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.block_hash import extend_hashes

from pagefleet_engine.core.block_pool import BlockPool, IntegrityError
from pagefleet_engine.core.request import Request

NO_BLOCKS: Sequence[Sequence[int]] = ()


@dataclass(slots=True)
class _Table:
    blocks: list[int]
    room: int
    """Tokens that the blocks can hold."""
    num_published: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request gets on admission."""

    blocks: Sequence[Sequence[int]]
    """Per KV group: its whole table."""
    num_cached_tokens: int
    """Leading tokens whose K/V is there already; always less than the known tokens."""


class KVCache:
    """Block tables over one pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, _Table] = {}

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; some may still serve as cached prefixes."""
        return self._pool.num_free

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request can have at most, alone in the pool."""
        return self._pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def admit(self, request: Request, spare_blocks: int) -> Grant | None:
        """Give the request blocks for all its known tokens, the longest cached prefix first.

        Returns None, and changes nothing, when fewer than `spare_blocks` blocks would stay free.
        """
        cached = self._find_cached(request)
        num_blocks = -(-request.num_tokens // self.block_size)
        num_taken = num_blocks - len(cached) + self._pool.count_free(cached)
        if self._pool.num_free - num_taken < spare_blocks:
            return None
        self._pool.hold(cached)
        blocks = cached + self._pool.allocate(num_blocks - len(cached))
        self._tables[request.request_id] = _Table(blocks, num_blocks * self.block_size, len(cached))
        return Grant((tuple(blocks),), len(cached) * self.block_size)

    def grow(self, request_id: str, num_tokens: int) -> Sequence[Sequence[int]] | None:
        """Make room for `num_tokens` tokens in all; returns what each group adds, or None when too few are free."""
        table = self._tables[request_id]
        if num_tokens <= table.room:
            return NO_BLOCKS
        count = -(-(num_tokens - table.room) // self.block_size)
        if count > self._pool.num_free:
            return None
        added = self._pool.allocate(count)
        table.blocks += added
        table.room += count * self.block_size
        return (added,)

    def publish_computed(self, request: Request, num_tokens: int) -> None:
        """Offer the full blocks among the first `num_tokens` tokens, which are computed by now, to later requests."""
        if not self.enable_prefix_caching:
            return
        table = self._tables[request.request_id]
        num_full = num_tokens // self.block_size
        if num_full == table.num_published:
            return
        extend_hashes(request.block_hashes, request.prefix_root, request.token_ids, self.block_size)
        new = slice(table.num_published, num_full)
        self._pool.publish(table.blocks[new], request.block_hashes[new])
        table.num_published = num_full

    def free(self, request_id: str) -> None:
        """Give the request's blocks back; those published stay findable until they are reused."""
        self._pool.release(self._tables.pop(request_id).blocks)

    def discard(self, request_id: str) -> None:
        """As `free`, but nothing that the request touched is found again: its K/V may be wrong."""
        self._pool.unpublish(self._tables[request_id].blocks)
        self.free(request_id)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds; returns their number."""
        return self._pool.reset_prefix_cache()

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Check that exactly the running requests hold blocks, enough of them, and that the pool's counts agree.

        Raises:
            IntegrityError: the accounts do not add up.
        """
        if self._tables.keys() != {request.request_id for request in running}:
            raise IntegrityError("the requests with blocks are not the running ones")
        held = [0] * self._pool.num_blocks
        for request in running:
            table = self._tables[request.request_id]
            if table.room != len(table.blocks) * self.block_size or table.room < request.num_computed_tokens:
                raise IntegrityError(f"{request.request_id}: {len(table.blocks)} blocks do not fit its tokens")
            for block in table.blocks:
                held[block] += 1
        self._pool.check_integrity(held)

    def _find_cached(self, request: Request) -> list[int]:
        if not self.enable_prefix_caching or not request.reads_prefix_cache:
            return []
        extend_hashes(request.block_hashes, request.prefix_root, request.token_ids, self.block_size)
        # At least one token must be computed, for its logits. Where all is cached, the whole last block is computed
        # again, into a block of the request's own: shared blocks are only ever read.
        limit = (request.num_tokens - 1) // self.block_size
        return self._pool.find_prefix(request.block_hashes, limit)
