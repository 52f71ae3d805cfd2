"""The free list's order, reference counts, and a prefix index that never names a block that was reused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.core.block_pool import BlockPool, FreeList, IntegrityError
from pagefleet_protocol.block_hash import BlockHash

from tests.example_counts import examples


def content(name: str) -> BlockHash:
    return BlockHash(name.encode())


def filled(pool: BlockPool, names: str) -> list[int]:
    """Allocate and publish one block per letter."""
    blocks = pool.allocate(len(names))
    pool.publish(blocks, [content(name) for name in names])
    return blocks


def find(pool: BlockPool, names: str) -> list[int]:
    return pool.find_prefix([content(name) for name in names], len(names))


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["take", "back", "front", "remove"]), st.integers(0, 7))))
def test_free_list_behaves_like_a_list(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    free = FreeList(num_blocks)
    model = list(range(num_blocks))
    for name, number in operations:
        block = number % num_blocks
        if name == "take" and number <= len(model):
            assert free.take(number) == model[:number]
            del model[:number]
        elif name == "remove" and block in model:
            free.remove(block)
            model.remove(block)
        elif name == "back" and block not in model:
            free.push_back(block)
            model.append(block)
        elif name == "front" and block not in model:
            free.push_front(block)
            model.insert(0, block)
        assert list(free) == model
        assert len(free) == len(model)
        free.check_integrity()


def test_allocated_blocks_are_distinct_and_counted() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(IntegrityError, match="1 blocks were asked for and 0 are free"):
        pool.allocate(1)


def test_a_prefix_is_found_up_to_the_first_miss_and_up_to_the_limit() -> None:
    pool = BlockPool(8)
    blocks = filled(pool, "abc")
    assert find(pool, "abxc") == blocks[:2]
    assert find(pool, "xabc") == []
    assert pool.find_prefix([content("a"), content("b")], 1) == blocks[:1]


def test_a_freed_prefix_is_found_and_held_again() -> None:
    pool = BlockPool(4)
    blocks = filled(pool, "ab")
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.count_free(find(pool, "ab")) == 2
    pool.hold(find(pool, "ab"))
    assert pool.num_free == 2
    assert not set(pool.allocate(2)) & set(blocks)


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = filled(pool, "a")
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_blocks_without_a_known_prefix_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached = filled(pool, "a")
    private = pool.allocate(2)
    pool.release(cached)
    pool.release(private)
    assert set(pool.allocate(2)) == set(private)
    assert find(pool, "a") == cached


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(3)
    for name in "abc":
        pool.release(filled(pool, name))
    pool.hold(find(pool, "a"))
    pool.release(find(pool, "a"))
    pool.allocate(1)
    assert find(pool, "b") == []
    assert find(pool, "c")
    assert find(pool, "a")


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    pool.release(filled(pool, "abc"))
    for remaining in (2, 1, 0):
        pool.allocate(1)
        assert len(find(pool, "abc")) == remaining


def test_equal_content_keeps_the_first_block_and_evicting_it_leaves_no_trace() -> None:
    pool = BlockPool(3)
    first = filled(pool, "a")
    second = filled(pool, "a")
    assert find(pool, "a") == first
    pool.release(second)
    assert find(pool, "a") == first
    pool.release(first)
    pool.allocate(3)
    assert find(pool, "a") == []
    pool.check_integrity([1, 1, 1])


def test_unpublished_content_is_not_found_but_stays_held() -> None:
    pool = BlockPool(2)
    blocks = filled(pool, "ab")
    pool.unpublish(blocks[:1])
    assert find(pool, "ab") == []
    assert find(pool, "b") == blocks[1:]
    assert pool.num_free == 0


def test_reset_forgets_free_blocks_and_spares_held_ones() -> None:
    pool = BlockPool(4)
    held = filled(pool, "a")
    pool.release(filled(pool, "bc"))
    assert pool.num_cached == 3
    assert pool.reset_prefix_cache() == 2
    assert find(pool, "a") == held
    assert find(pool, "b") == []
    assert pool.num_free == 3


def test_integrity_names_a_wrong_reference_count() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.check_integrity([1, 0])
    with pytest.raises(IntegrityError, match="block 0 has 1 references and 2 holders"):
        pool.check_integrity([2, 0])


def test_integrity_finds_a_block_released_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    pool.release(blocks)
    with pytest.raises(IntegrityError):
        pool.check_integrity([0, 0])


def test_integrity_finds_broken_links() -> None:
    free = FreeList(3)
    free.remove(1)
    free.remove(1)
    with pytest.raises(IntegrityError, match="free list"):
        free.check_integrity()


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["fill", "drop", "find"]), st.lists(st.sampled_from("abcd"), max_size=4))))
def test_whatever_is_found_holds_what_was_published(operations: list[tuple[str, list[str]]]) -> None:
    pool = BlockPool(6)
    holds: dict[int, str] = {}
    tables: list[list[int]] = []
    for name, letters in operations:
        if name == "fill" and len(letters) <= pool.num_free:
            blocks = filled(pool, "".join(letters))
            holds |= dict(zip(blocks, letters, strict=True))
            tables.append(blocks)
        elif name == "drop" and tables:
            pool.release(tables.pop(0))
        elif name == "find":
            found = find(pool, "".join(letters))
            assert [holds[block] for block in found] == letters[: len(found)]
            pool.hold(found)
            tables.append(found)
        pool.check_integrity([sum(table.count(block) for table in tables) for block in range(6)])
