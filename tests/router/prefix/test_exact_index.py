"""The exact index: which engine has which leading blocks, for how long what was sent counts, and its bounds."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.prefix.exact import LIFETIME_S, MAX_KEYS, SWEEP_KEYS, ExactIndex, Speculation, TooManyKeys
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.knowledge import ApproximatePrefixes, PrefixBook
from pagefleet_router.request_view import RequestView

from tests.example_counts import examples
from tests.fakes.pair_fleet import with_ranks
from tests.router.signals.test_engine_facts import facts

KEYS = st.lists(st.integers(0, 12), max_size=8)
ENGINES = ("a", "b", "c")


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "clear", "leave"]), st.sampled_from(ENGINES), KEYS)), KEYS)
def test_equals_a_set_per_engine(steps: list[tuple[str, str, list[int]]], prompt: list[int]) -> None:
    index, model = ExactIndex(), {engine: set[int]() for engine in ENGINES}
    for engine in ENGINES:
        index.join(engine, 13)
    for step, engine, keys in steps:
        if step == "add":
            index.add(engine, keys)
            model[engine] |= set(keys)
        elif step == "remove":
            index.remove(engine, keys)
            model[engine] -= set(keys)
        else:
            index.clear(engine) if step == "clear" else index.join(engine, 13)
            model[engine] = set()
    index.check_integrity()
    unbroken = {
        engine: next((i for i, key in enumerate(prompt) if key not in has), len(prompt))
        for engine, has in model.items()
    }
    assert index.match(ENGINES, prompt) == list(unbroken.values())
    assert len(index) == sum(map(len, model.values()))


def test_who_is_not_asked_for_or_not_known_has_nothing() -> None:
    index = ExactIndex()
    index.join("a", 10)
    index.add("a", [1, 2])
    index.add("stranger", [1])
    assert index.match(["stranger", "a"], [1, 2, 3]) == [0, 2]
    assert index.match([], [1]) == []
    assert index.match(["a"], []) == [0]
    assert index.match(["stranger"], [1]) == [0]


def test_what_was_sent_counts_until_its_event_or_its_time() -> None:
    index = ExactIndex()
    index.join("a", 10)
    index.join("b", 10)
    index.tick(0.0)
    index.sent("a", [1, 2, 3])
    assert index.match(["a", "b"], [1, 2, 3, 4]) == [3, 0]
    index.add("a", [1, 2])
    index.remove("a", [2])
    assert index.match(["a"], [1, 2, 3]) == [1], "the event came, so that its word counts"
    index.add("a", [2])
    assert index.match(["a"], [1, 2, 3]) == [3], "the third is still only sent"
    index.tick(LIFETIME_S)
    assert index.match(["a"], [1, 2, 3]) == [3]
    index.tick(2 * LIFETIME_S)
    assert index.match(["a"], [1, 2, 3]) == [2]


def test_a_liar_is_stopped() -> None:
    index = ExactIndex()
    index.join("a", 4)
    index.add("a", [1, 2, 3])
    index.add("a", [1, 2, 3, 4])
    with pytest.raises(TooManyKeys):
        index.add("a", [4, 5])
    assert index.num_keys("a") == 4


def test_a_large_cache_is_taken_back_bit_by_bit() -> None:
    index = ExactIndex()
    size = 2 * SWEEP_KEYS + 10
    index.join("b", size)
    index.join("a", size)
    index.add("a", range(size))
    index.add("b", range(5))
    index.clear("a")
    assert index.match(["a", "b"], range(10)) == [0, 5], "gone at once"
    index.add("a", range(3))
    for tick in range(8):
        index.check_integrity()
        index.tick(tick * LIFETIME_S)
    assert index.match(["a", "b"], range(10)) == [3, 5]
    assert len(index._masks) == 5
    index.join("c", 1)
    assert index._num_bits == 3, "a slot is used again"


def test_clearing_again_and_again_stays_bounded() -> None:
    index = ExactIndex()
    size = SWEEP_KEYS + 1
    index.join("a", size)

    def clear_for_ever() -> None:
        for _ in range(10):
            index.add("a", range(size))
            index.clear("a")

    with pytest.raises(TooManyKeys):
        clear_for_ever()
    for _ in range(100):
        index.join("b", 5)
        index.add("b", [1, 2])
        index.clear("b")
        index.leave("b")
        index.tick(0.0)
    index.check_integrity()


def test_speculation_is_bounded() -> None:
    speculation = Speculation()
    for number in range(5):
        speculation.add(1, range(number * MAX_KEYS, (number + 1) * MAX_KEYS))
    speculation.add(1, range(5 * MAX_KEYS, 7 * MAX_KEYS))
    assert len(speculation) == 2 * MAX_KEYS
    assert speculation.get(5 * MAX_KEYS - 1) == speculation.get(6 * MAX_KEYS - 1) == 1
    assert speculation.get(0) == speculation.get(6 * MAX_KEYS) == 0
    speculation.add(2, [7])
    speculation.confirm(1, [7])
    assert speculation.get(7) == 2


def engine(name: str, **fields: Any) -> EngineView:
    return EngineView(Endpoint(name, f"http://127.0.0.1:{ord(name[0])}", "m"), facts=facts(**fields))


def book() -> tuple[PrefixBook, ExactIndex]:
    index = ExactIndex()
    return PrefixBook(ApproximatePrefixes(PrefixIndex(1000)), index), index


def test_the_engines_word_counts_where_it_is_known() -> None:
    known, index = book()
    engines = [engine("a"), engine("b"), engine("c", scope="other"), engine("d", block_size=8)]
    for one in engines:
        index.join(one.id, 100)
        index.add(one.id, [1, 2, 3])
        if one.id != "b":
            known.set_live(one.id, True)
    request = RequestView("m", (5, 6), num_tokens=100, blocks=[1, 2, 9], block_size=16, scope="s")
    assert known.cached_tokens(engines, request) == [32, 0, 0, 0]
    known.sent(engines[1], request)
    known.sent(engines[0], request)
    assert known.cached_tokens(engines, request) == [48, 99, 0, 0], "b is guessed, never more than what there is"
    known.set_live("a", False)
    known.lost("b")
    assert known.cached_tokens(engines, request) == [99, 0, 0, 0]
    assert known.cached_tokens(engines[:1], RequestView("m", (5, 7))) == [128]


def test_an_engine_of_data_ranks_has_what_its_best_rank_has() -> None:
    known, index = book()
    told = facts()
    one = EngineView(Endpoint("a", "http://127.0.0.1:1", "m"), facts=with_ranks(told, 2))
    for name, keys in zip(one.cache_ids, ([1], [1, 2, 3]), strict=True):
        index.join(name, 100)
        index.add(name, keys)
    request = RequestView("m", (5, 6), num_tokens=100, blocks=[1, 2, 9], block_size=16, scope="s")
    known.set_live(one.cache_ids[0], True)
    assert known.cached_tokens([one], request) == [0], "half of what it says is nothing"
    known.set_live(one.cache_ids[1], True)
    alone = engine("b")
    assert known.cached_tokens([alone, one], request) == [0, 32]
    assert known.cached_by_rank(one, request) == [16, 32]
    known.sent(one, request, rank=0)
    assert known.cached_by_rank(one, request) == [48, 32]
    known.sent(one, request)
    assert known.cached_by_rank(one, request) == [48, 48], "the engine has chosen"
    assert known.cached_by_rank(alone, request) == [0]
    index.check_integrity()


def test_the_last_token_is_always_computed() -> None:
    known, index = book()
    index.join("a", 100)
    index.add("a", [1, 2])
    known.set_live("a", True)
    for num_tokens, cached in ((32, 16), (33, 32)):
        request = RequestView("m", num_tokens=num_tokens, blocks=[1, 2], block_size=16, scope="s")
        assert known.cached_tokens([engine("a")], request) == [cached]
