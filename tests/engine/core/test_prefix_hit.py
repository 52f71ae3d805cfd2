"""The longest prefix that all groups have, against trying every length."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.core.block_pool import BlockPool
from pagefleet_engine.core.prefix_hit import GroupIndex, find_hit
from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_blob import first_needed_block

from tests.example_counts import examples

NUM_HASHES = 12
HASHES = [BlockHash(f"hash {number}".encode()) for number in range(NUM_HASHES)]


class CountingPool(BlockPool):
    """Counts the look-ups of single blocks."""

    num_lookups = 0

    def find(self, content: BlockHash) -> int | None:
        self.num_lookups += 1
        return super().find(content)


def make_pool(
    windows: Sequence[int | None], cached: Sequence[set[int]], chunked: bool = False
) -> tuple[CountingPool, list[GroupIndex]]:
    """A pool in which group g has the blocks of `cached[g]`."""
    groups = [GroupIndex(window, bytes([number]) if number else b"", chunked) for number, window in enumerate(windows)]
    pool = CountingPool(NUM_HASHES * len(groups))
    for group, numbers in zip(groups, cached, strict=True):
        hashes = [HASHES[number] for number in sorted(numbers)]
        pool.publish(pool.allocate(len(hashes)), group.keys(hashes))
    return pool, groups


def has_prefix(window: int | None, cached: set[int], length: int, block_size: int, chunked: bool) -> bool:
    first = 0 if window is None else first_needed_block(length * block_size, window, block_size, chunked=chunked)
    return cached.issuperset(range(first, length))


def test_a_window_group_needs_only_the_end_of_the_prefix() -> None:
    pool, groups = make_pool([None, 6], [{0, 1, 2, 3, 4}, {3, 4}])
    hit = find_hit(pool, groups, HASHES, NUM_HASHES, block_size=4)
    assert hit.num_blocks == 5
    assert list(map(len, hit.blocks)) == [5, 2]


def test_a_chunk_group_needs_only_the_chunk_of_the_next_token() -> None:
    for end, found in ((5, 2), (6, 0), (7, 1), (8, 2)):  # chunks of 12 tokens: 3 blocks
        pool, groups = make_pool([None, 12], [{*range(end)}, {*range(end - found, end)}], chunked=True)
        hit = find_hit(pool, groups, HASHES, NUM_HASHES, block_size=4)
        assert (hit.num_blocks, [*map(len, hit.blocks)]) == (end, [end, found])


def test_a_hole_in_a_window_shortens_the_prefix_of_all_groups() -> None:
    pool, groups = make_pool([None, 6], [{0, 1, 2, 3, 4}, {1, 2, 4}])
    hit = find_hit(pool, groups, HASHES, NUM_HASHES, block_size=4)
    assert hit.num_blocks == 3
    assert list(map(len, hit.blocks)) == [3, 2]


def test_equal_tokens_in_another_group_are_not_a_hit() -> None:
    pool, groups = make_pool([None, 6], [{0, 1, 2}, set()])
    assert find_hit(pool, groups, HASHES, NUM_HASHES, block_size=4).num_blocks == 0


def test_a_window_of_one_token_needs_no_block() -> None:
    pool, groups = make_pool([None, 1], [{0, 1, 2}, set()])
    hit = find_hit(pool, groups, HASHES, NUM_HASHES, block_size=4)
    assert (hit.num_blocks, hit.blocks[1]) == (3, [])


cached_blocks = st.sets(st.integers(0, NUM_HASHES - 1)).flatmap(
    lambda few: st.sampled_from([few, set(range(NUM_HASHES)) - few])
)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(1, 20)), cached_blocks), min_size=1, max_size=4),
    st.integers(0, NUM_HASHES),
    st.integers(1, 5),
    st.booleans(),
)
def test_the_hit_is_the_longest_there_is(
    parts: list[tuple[int | None, set[int]]], limit: int, block_size: int, chunked: bool
) -> None:
    windows, cached = [window for window, _ in parts], [numbers for _, numbers in parts]
    pool, groups = make_pool(windows, cached, chunked)
    hit = find_hit(pool, groups, HASHES, limit, block_size)
    lengths = [
        length
        for length in range(limit + 1)
        if all(has_prefix(window, numbers, length, block_size, chunked) for window, numbers in parts)
    ]
    assert hit.num_blocks == max(lengths)
    assert pool.num_lookups <= limit * len(groups)
    for group, blocks in zip(groups, hit.blocks, strict=True):
        assert len(blocks) <= hit.num_blocks
        wanted = group.keys(HASHES[hit.num_blocks - len(blocks) : hit.num_blocks])
        assert [BlockPool.find(pool, content) for content in wanted] == list(blocks)
        found = set(range(hit.num_blocks - len(blocks), hit.num_blocks))
        assert has_prefix(group.window, found, hit.num_blocks, block_size, chunked)
