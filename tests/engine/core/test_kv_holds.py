"""Blocks that belong to transfers: they are counted, published only as asked, and always given back."""

from __future__ import annotations

import pytest
from pagefleet_engine.core.block_pool import BlockPool, IntegrityError
from pagefleet_engine.core.kv_holds import KVHolds
from pagefleet_protocol.block_hash import BlockHash

HASHES = [BlockHash(bytes([number]) * 32) for number in range(6)]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8)


def cache(pool: BlockPool, *numbers: int) -> list[int]:
    """Put these contents into free blocks."""
    blocks = pool.allocate(len(numbers))
    pool.publish(blocks, [HASHES[number] for number in numbers])
    pool.release(blocks)
    return blocks


def check(pool: BlockPool, holds: KVHolds) -> None:
    held = [0] * pool.num_blocks
    holds.count(held)
    pool.check_integrity(held)


def test_a_reservation_keeps_what_was_found_and_takes_the_rest(pool: BlockPool) -> None:
    holds = KVHolds(pool)
    found = cache(pool, 0, 1)
    blocks = holds.reserve("a", found, HASHES[2:5])
    assert len(blocks) == 3
    assert list(holds.reserved("a")) == [*found, *blocks]
    assert (pool.num_free, holds.num_reserved, holds.reserved_for) == (3, 5, {"a"})
    check(pool, holds)
    holds.unreserve("a")
    assert pool.num_free == 8
    assert pool.find(HASHES[2]) is None
    check(pool, holds)


def test_only_what_came_is_found(pool: BlockPool) -> None:
    holds = KVHolds(pool)
    blocks = holds.reserve("a", [], HASHES[:4])
    assert not holds.publish("a", 2)
    assert pool.find_prefix(HASHES, 4) == list(blocks[:2]) == list(holds.reserved("a"))
    assert pool.num_free == 6
    check(pool, holds)


def test_what_others_have_published_meanwhile_is_held_instead(pool: BlockPool) -> None:
    holds = KVHolds(pool)
    own = holds.reserve("a", [], HASHES[:3])
    theirs = cache(pool, 0)
    assert holds.publish("a", 3)
    assert list(holds.reserved("a")) == [*theirs, *own[1:]]
    assert pool.num_free == 5
    check(pool, holds)


def test_more_than_was_reserved_cannot_come(pool: BlockPool) -> None:
    holds = KVHolds(pool)
    holds.reserve("a", [], HASHES[:3])
    with pytest.raises(IntegrityError, match="4 blocks were filled"):
        holds.publish("a", 4)


def test_a_request_has_one_reservation(pool: BlockPool) -> None:
    holds = KVHolds(pool)
    holds.reserve("a", [], HASHES[:1])
    with pytest.raises(IntegrityError, match="reservation already"):
        holds.reserve("a", [], HASHES[:1])


def test_pins_outlive_the_request(pool: BlockPool) -> None:
    holds = KVHolds(pool)
    blocks = pool.allocate(2)
    holds.pin(7, blocks)
    pool.release(blocks)
    assert (pool.num_free, holds.pins) == (6, {7})
    check(pool, holds)
    holds.unpin(7)
    assert pool.num_free == 8
    with pytest.raises(IntegrityError, match="no save 7"):
        holds.unpin(7)
    holds.pin(8, blocks)
    with pytest.raises(IntegrityError, match="save 8 has blocks"):
        holds.pin(8, blocks)
