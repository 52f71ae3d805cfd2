"""The longest prefix of which every group has cached what later tokens can see.

blocks of the prefix        0   1   2   3   4   5  |  computed
full group needs            x   x   x   x   x   x  |
window group needs                          x   x  |  those that overlap the last window - 1 tokens
chunk group needs                               x  |  those that overlap the chunk of the next token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_blob import first_needed_block

from pagefleet_engine.core.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class GroupIndex:
    """One group as the prefix index knows it."""

    window: int | None
    suffix: bytes
    """Added to a block's hash, so that equal tokens have one block in each group; none for the first group."""
    chunked: bool = False
    """The window is a chunk."""

    def keys(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """What the index calls this group's blocks with these hashes."""
        suffix = self.suffix
        return [BlockHash(block_hash + suffix) for block_hash in hashes] if suffix else hashes

    def start(self, num_blocks: int, block_size: int) -> int:
        """The first block that the tokens after a prefix of so many blocks can see."""
        return self.start_for(num_blocks * block_size, block_size)

    def start_for(self, num_tokens: int, block_size: int) -> int:
        """The same for a prefix of so many tokens."""
        if self.window is None:
            return 0
        return first_needed_block(num_tokens, self.window, block_size, chunked=self.chunked)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks, of which nothing is held yet."""

    num_blocks: int
    """Length of the prefix."""
    blocks: Sequence[list[int]]
    """Per group: the last blocks of the prefix, as far back as the group's window asks."""


def find_hit(
    pool: BlockPool, groups: Sequence[GroupIndex], hashes: Sequence[BlockHash], limit: int, block_size: int
) -> PrefixHit:
    """Return the longest prefix of at most `limit` blocks that all groups have; looks each block up once a group."""
    runs: list[list[int] | None] = []
    for group in groups:
        run = None
        if group.window is None:
            run = pool.find_prefix(group.keys(hashes), limit)
            limit = len(run)
        runs.append(run)
    tails = [_Tail(pool, group, hashes, block_size, limit) for group in groups if group.window is not None]
    shorter = True
    while shorter:
        before = limit
        for tail in tails:
            limit = tail.longest(limit)
        shorter = limit < before
    remaining = iter(tails)
    return PrefixHit(limit, [next(remaining).take(limit) if run is None else run[:limit] for run in runs])


class _Tail:
    """The cached blocks of one window group, looked up from the end of a prefix that only gets shorter."""

    def __init__(
        self, pool: BlockPool, group: GroupIndex, hashes: Sequence[BlockHash], block_size: int, limit: int
    ) -> None:
        self._pool = pool
        self._group = group
        self._suffix = group.suffix
        self._hashes = hashes
        self._block_size = block_size
        self._found: dict[int, int] = {}
        self._checked = limit
        """From this block on, up to the last answer, all were found."""

    def longest(self, limit: int) -> int:
        """Return the longest prefix of at most `limit` blocks whose end this group has."""
        self._checked = min(self._checked, limit)
        while self._checked > self._start(limit):
            index = self._checked - 1
            block = self._pool.find(BlockHash(self._hashes[index] + self._suffix))
            if block is None:
                limit = index
            else:
                self._found[index] = block
            self._checked = index
        return limit

    def take(self, num_blocks: int) -> list[int]:
        """Return the blocks that a prefix needs which `longest` has allowed."""
        return [self._found[index] for index in range(self._start(num_blocks), num_blocks)]

    def _start(self, num_blocks: int) -> int:
        return self._group.start(num_blocks, self._block_size)
