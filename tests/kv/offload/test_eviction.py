from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pagefleet_kv.offload.eviction import Arc, EvictionPolicy, Lru, make_policy
from pagefleet_kv.store.block_key import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(2, "big"))


class Cache:
    """The simplest user of a policy: no holders."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.keys: set[BlockKey] = set()
        self.num_hits = 0

    def use(self, number: int) -> None:
        wanted = key(number)
        if wanted in self.keys:
            self.num_hits += 1
            self.policy.touch(wanted)
            return
        if len(self.keys) == self.capacity:
            victim = next(self.policy.candidates())
            self.keys.remove(victim)
            self.policy.remove(victim, evicted=True)
        self.keys.add(wanted)
        self.policy.insert(wanted)


def test_names() -> None:
    assert isinstance(make_policy("lru", 3), Lru)
    assert isinstance(make_policy("arc", 3), Arc)


def test_lru_order() -> None:
    lru = Lru()
    for number in range(4):
        lru.insert(key(number))
    lru.touch(key(0))
    lru.refresh(key(2))
    lru.remove(key(1), evicted=False)
    assert list(lru.candidates()) == [key(3), key(0), key(2)]


def test_arc_keeps_what_is_used_often_while_a_scan_passes() -> None:
    arc, lru = Cache(8, Arc(8)), Cache(8, Lru())
    trace = [*range(4), *range(4), *range(100, 140), *range(4)]
    for number in trace:
        arc.use(number)
        lru.use(number)
    assert arc.num_hits == 8
    assert lru.num_hits == 4


def test_arc_turns_to_recent_ones_when_their_ghosts_return() -> None:
    cache = Cache(4, Arc(4))
    for number in (0, 1, 0, 1):  # two frequent ones
        cache.use(number)
    for number in (2, 3, 4, 5):  # 2 and 3 are evicted, and are ghosts
        cache.use(number)
    assert cache.keys == {key(0), key(1), key(4), key(5)}
    cache.use(2)  # the ghost returns: recent ones get more room, at the cost of frequent ones
    cache.use(3)
    for number in (6, 7):
        cache.use(number)
    assert len(cache.keys & {key(0), key(1)}) < 2


def test_arc_refresh_is_no_use() -> None:
    arc = Arc(4)
    for number in range(3):
        arc.insert(key(number))
    arc.touch(key(1))
    arc.refresh(key(0))
    assert list(arc.candidates()) == [key(2), key(0), key(1)]


def test_what_was_removed_and_not_evicted_leaves_no_ghost() -> None:
    arc = Arc(2)
    arc.insert(key(0))
    arc.remove(key(0), evicted=False)
    arc.insert(key(0))
    arc.insert(key(1))
    assert list(arc.candidates()) == [key(0), key(1)], "a ghost would have come back as frequent"


@given(st.integers(1, 6), st.lists(st.integers(0, 12), max_size=200), st.sampled_from(["lru", "arc"]))
def test_candidates_are_what_is_there(capacity: int, trace: list[int], name: str) -> None:
    cache = Cache(capacity, make_policy("arc" if name == "arc" else "lru", capacity))
    for number in trace:
        cache.use(number)
        candidates = list(cache.policy.candidates())
        assert len(candidates) == len(set(candidates)) <= capacity
        assert set(candidates) == cache.keys


@given(st.integers(1, 6), st.lists(st.integers(0, 12), max_size=200))
def test_arc_remembers_at_most_as_many_ghosts_as_the_paper_says(capacity: int, trace: list[int]) -> None:
    policy = Arc(capacity)
    cache = Cache(capacity, policy)
    for number in trace:
        cache.use(number)
        assert policy.num_ghosts <= capacity
        assert 0 <= policy.target <= capacity
