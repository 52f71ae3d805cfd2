from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pagefleet_kv.config import OffloadPolicy
from pagefleet_kv.offload.eviction import Lru, make_policy
from pagefleet_kv.offload.tier import Tier
from pagefleet_kv.store.block_key import BlockKey

from tests.example_counts import examples


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(2, "big"))


def full_tier(capacity: int) -> Tier:
    tier = Tier(capacity, Lru())
    for number in range(capacity):
        assert tier.add_ready(key(number))
    return tier


def test_a_block_is_found_once_it_is_filled() -> None:
    tier = Tier(2, Lru())
    assert tier.reserve(key(1)) is not None
    assert key(1) in tier
    assert not tier.has(key(1))
    assert tier.commit(key(1))
    assert tier.has(key(1))


def test_the_least_recently_used_goes_and_its_slot_is_used_again() -> None:
    tier = full_tier(3)
    tier.touch([key(0)])
    place = tier.reserve(key(7))
    assert place is not None
    assert place.evicted == key(1)
    assert place.slot == 1
    assert tier.num_evictions == 1
    assert len(tier) == 3


def test_held_blocks_stay_and_a_full_tier_of_them_refuses() -> None:
    tier = full_tier(2)
    assert [tier.hold(key(0)), tier.hold(key(1))] == [0, 1]
    assert tier.reserve(key(7)) is None
    assert not tier.release(key(1))
    place = tier.reserve(key(7))
    assert place is not None
    assert place.evicted == key(1)
    assert tier.has(key(0))


def test_tail_of_a_prefix_goes_before_its_head() -> None:
    tier = full_tier(4)
    tier.settle([key(0), key(1), key(2)])
    evicted = [place.evicted for place in (tier.reserve(key(number)) for number in range(10, 14)) if place is not None]
    assert evicted == [key(3), key(2), key(1), key(0)]


def test_abandoned_block_is_gone_with_its_last_holder() -> None:
    tier = full_tier(2)
    tier.hold(key(0))
    tier.hold(key(0))
    assert not tier.abandon(key(0))
    assert not tier.has(key(0))
    assert key(0) in tier
    assert tier.release(key(0))
    assert key(0) not in tier
    assert tier.num_evictions == 0


def test_doomed_blocks_are_found_no_more_and_go_when_nobody_holds_them() -> None:
    tier = full_tier(3)
    tier.hold(key(1))
    tier.reserve(key(5))  # being filled, for key(0)
    assert sorted(tier.doom_all()) == [key(2)]
    assert not any(tier.has(key(number)) for number in range(6))
    assert not tier.commit(key(5))
    assert tier.release(key(1))
    assert len(tier) == 0
    assert tier.reserve(key(9)) is not None


def test_ready_blocks_are_added_to_free_slots_only() -> None:
    tier = full_tier(2)
    assert not tier.add_ready(key(0))
    assert not tier.add_ready(key(9))
    assert tier.num_evictions == 0


class TierMachine(RuleBasedStateMachine):
    """Random use of a small tier against a plain model: what it may evict, and that slots are never shared."""

    policy: OffloadPolicy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.tier = Tier(4, make_policy(self.policy, 4))
        self.holders: dict[BlockKey, int] = {}
        self.ready: set[BlockKey] = set()
        self.doomed: set[BlockKey] = set()
        self.slots: dict[BlockKey, int] = {}

    numbers = st.integers(0, 7)

    @rule(number=numbers)
    def reserve(self, number: int) -> None:
        wanted = key(number)
        if wanted in self.holders:
            assert wanted in self.tier
            return
        free = [other for other, count in self.holders.items() if count == 0]
        place = self.tier.reserve(wanted)
        if place is None:
            assert len(self.holders) == 4
            assert not free
            return
        if place.evicted is not None:
            assert place.evicted in free
            assert len(self.holders) == 4
            self._forget(place.evicted)
        assert place.slot not in self.slots.values()
        self.holders[wanted] = 1
        self.slots[wanted] = place.slot

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        found = sorted(self.ready - self.doomed)
        if found:
            wanted = data.draw(st.sampled_from(found))
            assert self.tier.hold(wanted) == self.slots[wanted]
            self.holders[wanted] += 1

    @rule(data=st.data(), how=st.sampled_from(["commit", "abandon", "release"]))
    def let_go(self, data: st.DataObject, how: str) -> None:
        held = sorted(wanted for wanted, count in self.holders.items() if count)
        if not held:
            return
        wanted = data.draw(st.sampled_from(held))
        if wanted not in self.ready:
            how = "abandon" if how == "abandon" else "commit"
        elif how == "commit":
            how = "release"
        self.holders[wanted] -= 1
        if how == "abandon":
            self.doomed.add(wanted)
        is_gone = wanted in self.doomed and self.holders[wanted] == 0
        if how == "commit":
            assert self.tier.commit(wanted) is not is_gone
            self.ready.add(wanted)
        elif how == "abandon":
            assert self.tier.abandon(wanted) is is_gone
        else:
            assert self.tier.release(wanted) is is_gone
        if is_gone:
            self._forget(wanted)

    @rule(numbers=st.lists(numbers, unique=True))
    def touch(self, numbers: list[int]) -> None:
        self.tier.touch([key(number) for number in numbers])

    @rule(chosen=st.one_of(st.none(), st.lists(numbers.map(key))))
    def doom(self, chosen: list[BlockKey] | None) -> None:
        """Some, or all."""
        doomed = self.holders.keys() if chosen is None else self.holders.keys() & set(chosen)
        gone = {wanted for wanted in doomed if self.holders[wanted] == 0}
        self.doomed.update(doomed)
        told = self.tier.doom_all() if chosen is None else self.tier.doom(chosen)
        assert sorted(told) == sorted(gone)
        for wanted in gone:
            self._forget(wanted)

    @invariant()
    def agrees(self) -> None:
        assert len(self.tier) == len(self.holders) <= 4
        for number in range(8):
            wanted = key(number)
            assert (wanted in self.tier) == (wanted in self.holders)
            assert self.tier.has(wanted) == (wanted in self.ready and wanted not in self.doomed)

    def _forget(self, wanted: BlockKey) -> None:
        del self.holders[wanted]
        del self.slots[wanted]
        self.ready.discard(wanted)
        self.doomed.discard(wanted)


class ArcTierMachine(TierMachine):
    policy: OffloadPolicy = "arc"


TestLruTier = TierMachine.TestCase
TestLruTier.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestArcTier = ArcTierMachine.TestCase
TestArcTier.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_search_for_a_block_to_evict_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagefleet_kv.offload.tier.MOST_HELD_CANDIDATES", 2)
    tier = full_tier(4)
    for number in range(3):
        tier.hold(key(number))
    assert tier.reserve(key(9)) is None
    tier.release(key(2))
    assert tier.reserve(key(9)) is not None
