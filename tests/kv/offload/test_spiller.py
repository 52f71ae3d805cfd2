from __future__ import annotations

from pagefleet_kv.offload import tier as spiller_module
from pagefleet_kv.offload.eviction import Lru
from pagefleet_kv.offload.tier import Spiller, Tier
from pagefleet_kv.store.block_key import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(2, "big"))


def make(num_in_memory: int, num_files: int = 100) -> tuple[Tier, Tier, Spiller]:
    host, disk = Tier(8, Lru()), Tier(num_files, Lru())
    for number in range(num_in_memory):
        host.add_ready(key(number))
    return host, disk, Spiller(host, disk)


def test_nothing_is_due_while_there_is_room() -> None:
    _, _, spiller = make(4)
    assert list(spiller.due()) == []


def test_the_coldest_are_written_so_that_half_can_go() -> None:
    _, disk, spiller = make(8)
    spills = list(spiller.due())
    assert [(spill.key, spill.slot) for spill in spills] == [(key(number), number) for number in range(4)]
    assert list(spiller.due()) == [], "they are on their way"
    for spill in spills:
        assert not spiller.ended(spill.key, written=True)
    assert all(disk.has(key(number)) for number in range(4))
    assert list(spiller.due()) == []


def test_what_is_being_written_is_not_evicted() -> None:
    host, _, spiller = make(8)
    list(spiller.due())
    places = [host.reserve(key(number)) for number in range(20, 25)]
    assert [None if place is None else place.evicted for place in places] == [*(key(n) for n in range(4, 8)), None]


def test_what_was_not_written_is_due_again() -> None:
    host, disk, spiller = make(5)
    (spill,) = spiller.due()
    assert not spiller.ended(spill.key, written=False)
    assert host.has(spill.key)
    assert spill.key not in disk
    assert [again.key for again in spiller.due()] == [spill.key]


def test_disk_that_failed_gives_up_one_block_for_the_next_attempt() -> None:
    _, disk, spiller = make(8, num_files=3)
    for number in (50, 51, 52):
        disk.add_ready(key(number))
    first = list(spiller.due())
    assert len(first) == 3
    for spill in first:
        spiller.ended(spill.key, written=False)
    disk.add_ready(key(53))
    disk.add_ready(key(54))
    (attempt,) = spiller.due()
    spiller.ended(attempt.key, written=True)
    assert len(list(spiller.due())) > 1


def test_disk_gives_up_its_coldest_and_refuses_when_all_is_under_way() -> None:
    _, disk, spiller = make(8, num_files=2)
    disk.add_ready(key(50))
    disk.add_ready(key(51))
    assert [spill.evicted for spill in spiller.due()] == [key(50), key(51)]
    assert list(spiller.due()) == []


def test_block_that_is_forgotten_while_it_is_written_is_deleted() -> None:
    host, disk, spiller = make(5)
    (spill,) = spiller.due()
    assert spiller.reset() == []
    host.doom_all()
    assert spiller.ended(spill.key, written=True)
    assert len(disk) == len(host) == 0


def test_found_blocks_are_adopted_as_far_as_there_is_room() -> None:
    _, disk, spiller = make(0, num_files=2)
    assert spiller.adopt([key(1), key(2), key(3)]) == [key(3)]
    assert spiller.adopt([key(1)]) == []
    assert spiller.reset() == [key(1), key(2)]
    assert spiller.adopt([key(4)]) == [key(4)], "it is of before the reset"
    assert len(disk) == 0


def test_blocks_ahead_are_bounded() -> None:
    capacity = 4 * spiller_module.MOST_AHEAD
    host, disk = Tier(capacity, Lru()), Tier(capacity, Lru())
    for number in range(capacity):
        host.add_ready(BlockKey(number.to_bytes(4, "big")))
    assert len(list(Spiller(host, disk).due())) == spiller_module.MOST_AHEAD
