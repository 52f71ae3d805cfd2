"""What the policies choose, with live tallies and a fake clock."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_router.config import PolicyName
from pagefleet_router.engines.endpoints import EngineView, PolledLoad, build_snapshot
from pagefleet_router.engines.rates import EngineRates
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.knowledge import ApproximatePrefixes
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.auto import Auto
from pagefleet_router.scheduling.cost import (
    LEAST_FREE,
    SLOW_START_S,
    STORED_SLACK,
    bounds_of,
    crowding_seconds,
    place_seconds,
    predicted_seconds,
)
from pagefleet_router.scheduling.in_flight import InFlight
from pagefleet_router.scheduling.policies import make_policy
from pagefleet_router.scheduling.policy import Choice, Policy
from pagefleet_router.scheduling.selection import (
    LARGE_FLEET,
    candidates,
    home,
    pick_random_lowest,
    ranked,
    shortlist,
)

FACTS = EngineFacts(
    incarnation="0" * 32, model="m", scope="s", block_size=16, num_blocks=1000, max_model_len=4096, max_num_seqs=4,
    max_num_batched_tokens=2048, vocab_size=100,
)  # fmt: skip


def engine(name: str, *, requests: int = 0, queued: int = 0, foreign: float = 0.0, **fields: Any) -> EngineView:
    load = PolledLoad(num_foreign=foreign)
    view = EngineView(Endpoint(name, f"http://{name}:1", "m"), ready=True, load=load)
    for number in range(requests):
        view.tally.begin(queued if number == 0 else 0, 0.0)
    view.tally.recent = 0.0
    return replace(view, **fields)


def request(*pieces: int, tokens: int | None = None, session: int | None = None, stream: bool = True) -> RequestView:
    num_tokens = 128 * len(pieces) if tokens is None else tokens
    return RequestView("m", pieces, num_tokens, session=session, stream=stream)


def told(choice: Choice) -> tuple[EngineView, int]:
    """What a choice of one engine says."""
    assert choice.prefill is None
    return choice.engine, choice.cached_tokens


class Known:
    """Prefixes that a test says the engines have."""

    def __init__(self, tokens: dict[str, int] | None = None) -> None:
        self.tokens = tokens or {}

    def cached_tokens(self, engines: object, request: RequestView) -> list[int]:
        return [self.tokens.get(engine.id, 0) for engine in engines]  # type: ignore[attr-defined]

    def cached_by_rank(self, engine: EngineView, request: RequestView) -> list[int]:
        return self.cached_tokens((engine,), request)

    def sent(self, engine: EngineView, request: RequestView, rank: int | None = None) -> None:
        self.tokens[engine.id] = request.num_tokens

    def lost(self, engine_id: str) -> None:
        self.tokens.pop(engine_id, None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def auto(known: Known | None = None, clock: Clock | None = None, seed: int = 0) -> Policy:
    return make_policy("auto", known or Known(), clock or Clock(), random.Random(seed))


@pytest.mark.parametrize(
    ("cached", "queued", "requests", "wanted"),
    [
        ((4000, 0, 0), (0, 0, 0), (0, 0, 0), 0),
        ((0, 4000, 0), (0, 2000, 0), (0, 4, 0), 1),
        ((4000, 0, 0), (0, 0, 0), (30, 2, 3), 1),
        ((4000, 0, 0), (50_000, 0, 0), (3, 3, 2), 2),
        ((4000, 4000, 0), (0, 0, 0), (3, 2, 0), 1),
        ((500, 4000, 0), (0, 0, 0), (0, 0, 0), 1),
        ((0, 0, 0), (9000, 9000, 0), (3, 2, 1), 2),
    ],
    ids=["cached", "cached though busier", "crowded", "long queue", "cached twice", "longer match", "cold"],
)  # fmt: skip
def test_auto_weighs_cache_against_load(
    cached: tuple[int, ...], queued: tuple[int, ...], requests: tuple[int, ...], wanted: int
) -> None:
    engines = [engine(f"e{n}", requests=requests[n], queued=queued[n]) for n in range(3)]
    choice = auto(Known({f"e{n}": cached[n] for n in range(3)})).choose(request(1, tokens=5000), engines)
    assert told(choice) == (engines[wanted], cached[wanted])


def test_costs_are_seconds() -> None:
    one = engine("a", requests=1, queued=3000)
    for estimate, value in ((one.rates.prefill, 1000.0), (one.rates.overhead, 0.5), (one.rates.decode, 100.0)):
        for _ in range(200):
            estimate.observe(value, 0.0)
    assert predicted_seconds(one, 2000, 2000, 0.0) == pytest.approx(0.5 + 3.0 + 0.01, rel=0.01)
    assert predicted_seconds(one, 2000, 0, 0.0) - predicted_seconds(one, 2000, 1000, 0.0) >= 1.0


def test_an_engine_without_room_costs_the_wait_for_a_place() -> None:
    full, other = engine("a", requests=4, facts=FACTS), engine("b", requests=4)
    waits = [place_seconds(one, one.num_requests) for one in (full, other)]
    assert waits == [pytest.approx(full.rates.request_seconds.value / 4 / LEAST_FREE), 0.0]
    assert predicted_seconds(full, 10, 0, 0.0) > predicted_seconds(other, 10, 0, 0.0) + 1.0
    assert place_seconds(full, 9.0) > waits[0], "the more wait, the longer"


def test_kv_costs_nothing_until_it_is_short_and_less_for_what_is_cached() -> None:
    def cost(usage: float, cached: int = 0) -> float:
        one = engine("a", requests=20, load=PolledLoad(kv_usage=usage))
        return predicted_seconds(one, 4000, cached, 0.0) - predicted_seconds(
            engine("b", requests=20), 4000, cached, 0.0
        )

    assert cost(0.05) == 0.0
    assert cost(0.5) < 0.01
    assert 0.01 < cost(0.8) < cost(0.95)
    assert cost(0.95, cached=4000) < 0.2 * cost(0.95)
    full = engine("a", requests=20, load=PolledLoad(kv_usage=0.95))
    assert cost(0.95) > 4 * place_seconds(full, 20.0), "others wait for the KV that this one takes"


def test_what_was_sent_since_the_last_poll_counts_as_kv() -> None:
    one = engine("a", facts=FACTS, load=PolledLoad(kv_usage=0.5))
    assert one.kv_usage == 0.5
    one.tally.begin(1600, 0.0)
    assert one.kv_usage == pytest.approx(0.6)
    assert replace(one, facts=None).kv_usage == 0.5
    assert replace(one, load=None).kv_usage == 0.0


def test_a_new_engine_is_trusted_slowly() -> None:
    old, new = engine("a"), engine("b", usable_since=100.0)
    costs = [predicted_seconds(new, 1000, 0, 100.0 + age) for age in (0.0, 5.0, 10.0, SLOW_START_S)]
    assert costs == sorted(costs, reverse=True)
    settled = predicted_seconds(old, 1000, 0, 120.0)
    assert costs[-1] == settled
    assert costs[0] == pytest.approx(10 * settled)
    assert costs[2] == pytest.approx(2 * settled)


def test_new_tokens_go_where_the_cache_turns_over_slowly_and_cached_ones_stay() -> None:
    engines = [engine("a"), engine("b")]
    engines[0].tally.stored = 6 * STORED_SLACK
    known = Known({"a": 5000, "b": 5000})
    assert auto(known).choose(request(1, tokens=5500), engines).engine.id == "b", "both have as much of it"
    known.tokens["b"] = 0
    assert auto(known).choose(request(1, tokens=5500), engines).engine.id == "a", "a copy costs more than it saves"
    assert bounds_of(engines, 60.0).stored == pytest.approx((6 / 8 / 2 + 1) * STORED_SLACK), "old traffic is forgotten"


def test_a_few_prompts_tell_nothing_of_a_cache() -> None:
    one = engine("a", queued=2000, requests=1)
    assert one.tally.stored == 2000
    assert (one.tally.stored + STORED_SLACK) / bounds_of([one, engine("b")], 0.0).stored < 1.1
    assert predicted_seconds(one, 500, 500, 0.0, 3.0) == predicted_seconds(one, 500, 500, 0.0)
    assert predicted_seconds(one, 500, 0, 0.0, 3.0) > predicted_seconds(one, 500, 0, 0.0)


@pytest.mark.parametrize("age", [0.0, 3.0, 100.0])
def test_crowding_takes_the_cache_s_advantage_away_however_new_the_fleet_is(age: float) -> None:
    engines = [engine(name, requests=30 if name == "a" else 0, usable_since=-age) for name in "abc"]
    bounds = bounds_of(engines, 0.0)
    assert [one.num_requests > bounds.requests for one in engines] == [True, False, False]
    costs = [predicted_seconds(one, 1000, hit, 0.0) for one, hit in zip(engines, (1000, 0, 0), strict=True)]
    assert costs[0] < costs[1] < costs[0] + crowding_seconds(engines[0], 1000, bounds)


def test_an_engine_with_too_large_a_share_loses_its_advantage() -> None:
    clock = Clock()
    engines = [engine("a"), engine("b")]
    engines[0].tally.recent = 60.0
    policy = auto(Known({"a": 1000}), clock)
    assert policy.choose(request(1, tokens=1000), engines).engine.id == "b"
    clock.now = 200.0
    assert policy.choose(request(1, tokens=1000), engines).engine.id == "a", "old traffic is forgotten"


def test_a_session_breaks_near_ties_and_nothing_else() -> None:
    engines = [engine(name) for name in "abcd"]
    own = home(7, engines)
    other = next(one for one in engines if one is not own)
    policy = auto(Known({one.id: 1000 for one in engines}))
    assert policy.choose(request(1, tokens=1000, session=7), engines).engine is own
    known = auto(Known({other.id: 4000}))
    assert known.choose(request(1, tokens=5000, session=7), engines).engine is other


def test_a_slow_engine_gets_few_requests() -> None:
    """Fault F11: one answers ten times slower; the load leaves it, and comes back when it recovers."""
    clock = Clock()
    common = EngineRates()
    engines = [engine(name, rates=EngineRates(common)) for name in "abcd"]
    policy = auto(clock=clock)

    def run(seconds_of_a: float, number: int) -> Counter[str]:
        counts: Counter[str] = Counter()
        running: list[tuple[float, InFlight]] = []
        for _ in range(number):
            clock.now += 0.02
            for end, attempt in list(running):
                if end <= clock.now:
                    attempt.answering(end)
                    attempt.end(end)
                    running.remove((end, attempt))
            attempt = InFlight(request(tokens=400), policy.choose(request(tokens=400), engines), clock.now)
            took = seconds_of_a if attempt.choice.engine.id == "a" else 0.05
            running.append((clock.now + took, attempt))
            counts[attempt.choice.engine.id] += 1
        return counts

    even = run(0.05, 400)
    assert min(even.values()) > 80
    run(0.5, 200)
    assert run(0.5, 400)["a"] < 40
    for _ in range(60):
        clock.now += 30.0
        for one in engines:
            one.rates.refresh(clock.now)
    run(0.05, 800)
    assert run(0.05, 400)["a"] > 30


def test_cold_prompts_go_where_least_was_sent() -> None:
    policy = auto()
    engines = [engine(name) for name in "abcd"]
    chosen: Counter[str] = Counter()
    for number in range(40):
        attempt = InFlight(request(number), policy.choose(request(number), engines), 0.0)
        attempt.end(0.0)
        chosen[attempt.choice.engine.id] += 1
    assert set(chosen.values()) == {10}


def test_a_cold_prompt_counts_by_its_tokens() -> None:
    """Caches fill with tokens: who took in one long prompt gets none of the short ones for a while."""
    policy = auto()
    engines = [engine(name) for name in "ab"]
    InFlight(request(tokens=40_000), Choice(engines[0]), 0.0).end(0.0)
    chosen = []
    for number in range(30):
        attempt = InFlight(request(tokens=2000), policy.choose(request(number, tokens=2000), engines), 0.0)
        attempt.end(0.0)
        chosen.append(attempt.choice.engine.id)
    assert set(chosen[:20]) == {"b"}, chosen
    assert Counter(chosen[20:]) == {"a": 5, "b": 5}, "both took in as much by then"


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_every_policy_is_deterministic_and_explains_itself(name: str) -> None:
    def chosen() -> list[str]:
        policy = make_policy(name, Known({"b": 300}), Clock(), random.Random(3))  # type: ignore[arg-type]
        engines = [engine(letter, requests=number) for number, letter in enumerate("abc")]
        found = []
        for number in range(20):
            asked = request(number, tokens=400, session=number % 3)
            found.append(policy.choose(asked, engines).engine.id)
            policy.sent(asked, engines[0])
        scores = policy.explain(request(1, tokens=400), engines)
        assert [score.engine_id for score in scores] == ["a", "b", "c"]
        assert all(score.seconds > 0 for score in scores)
        policy.lost("a")
        return found

    assert chosen() == chosen()


def test_an_explanation_names_what_counts() -> None:
    engines = [
        engine("a", requests=30, facts=FACTS), engine("b", requests=1, queued=700), engine("c", usable_since=-1.0)
    ]  # fmt: skip
    engines[1].tally.recent = 500.0
    scores = auto(Known({"b": 640})).explain(request(1, tokens=1000), engines)
    assert [score.cached_tokens for score in scores] == [0, 640, 0]
    assert [score.queued_tokens for score in scores] == [0, 700, 0]
    assert [score.reason for score in scores] == ["crowded, full", "had more than its share", "new"]
    own = home(5, engines)
    assert "session" in next(
        one.reason for one in auto().explain(request(1, session=5), engines) if one.engine_id == own.id
    )


def test_least_load_takes_the_fewest_foreign_ones_included() -> None:
    policy = make_policy("least-load", Known(), Clock(), random.Random(0))
    engines = [engine("a", requests=2), engine("b", foreign=1.0), engine("c", requests=2)]
    assert policy.choose(request(), engines).engine.id == "b"
    assert not policy.uses_prefixes


def test_round_robin_takes_turns_also_when_engines_come_and_go() -> None:
    policy = make_policy("round-robin", Known(), Clock(), random.Random(0))
    engines = [engine(name) for name in "abc"]

    def turns(number: int, among: list[EngineView]) -> str:
        names = []
        for _ in range(number):
            choice = policy.choose(request(), among)
            policy.sent(request(), choice.engine)
            names.append(choice.engine.id)
        return "".join(names)

    assert turns(6, engines) == "abcabc"
    assert turns(2, engines[1:]) == "bc"
    assert turns(3, engines) == "abc"
    policy.lost("c")
    assert turns(1, engines) == "c"


def test_prefix_takes_the_longest_unless_that_is_crowded() -> None:
    policy = make_policy("prefix", Known({"a": 4000, "b": 3000}), Clock(), random.Random(0))
    engines = [engine("a", requests=4, queued=90_000), engine("b"), engine("c")]
    assert told(policy.choose(request(1, tokens=5000), engines)) == (engines[0], 4000)
    engines[0] = engine("a", requests=40)
    assert told(policy.choose(request(1, tokens=5000), engines)) == (engines[1], 3000)


def test_sessions_spread_stay_and_leave_a_crowd() -> None:
    policy = make_policy("session", Known(), Clock(), random.Random(0))
    engines = [engine(name) for name in "abcd"]
    homes = Counter(policy.choose(request(session=number), engines).engine.id for number in range(400))
    assert min(homes.values()) > 70
    first, second = ranked(11, engines)[:2]
    assert policy.choose(request(session=11), engines).engine is first
    for _ in range(40):
        first.tally.begin(0, 0.0)
    assert policy.choose(request(session=11), engines).engine is second


def test_an_engine_that_leaves_moves_only_its_sessions() -> None:
    engines = [engine(name) for name in "abcde"]
    before = {number: home(number, engines) for number in range(300)}
    after = {number: home(number, engines[:-1]) for number in range(300)}
    moved = [number for number in before if before[number] is not after[number]]
    assert all(before[number].id == "e" for number in moved)
    assert 30 < len(moved) < 90


def test_a_large_fleet_is_sampled() -> None:
    engines = [engine(f"e{number}") for number in range(100)]
    cached = [0] * 100
    cached[17], cached[40] = 500, 900
    few, hits = shortlist(engines, cached, engines[60], random.Random(0))
    assert {"e17", "e40", "e60"} < {one.id for one in few}
    assert len(few) == 5
    assert sorted(hits) == [0, 0, 0, 500, 900]


def test_a_large_fleet_is_used_evenly_and_keeps_prefixes() -> None:
    policy = auto(Known({"e9": 900}))
    engines = [engine(f"e{number}") for number in range(LARGE_FLEET + 8)]
    assert told(policy.choose(request(1, tokens=1000), engines)) == (engines[9], 900)
    cold = auto(Known())
    counts: Counter[str] = Counter()
    for number in range(400):
        choice = cold.choose(request(number), engines)
        InFlight(request(number), choice, 0.0)
        counts[choice.engine.id] += 1
    assert max(counts.values()) <= 16


def test_engines_with_room_come_first() -> None:
    full, roomy, unknown = engine("a", requests=4, facts=FACTS), engine("b", requests=3, facts=FACTS), engine("c")
    assert candidates(build_snapshot([full, roomy, unknown]), request(), ()) == [roomy, unknown]
    assert list(candidates(build_snapshot([full]), request(), ())) == [full], "all, where none has room"
    assert list(candidates(build_snapshot([full, roomy]), request(), ("b",))) == [full]


def test_a_prefix_returns_to_its_engine_until_that_loses_its_cache() -> None:
    policy = make_policy("auto", ApproximatePrefixes(PrefixIndex(100)), Clock(), random.Random(0))
    engines = [engine(name) for name in "abc"]
    first = policy.choose(request(1, 2, 3), engines)
    assert first.cached_tokens == 0
    policy.sent(request(1, 2, 3), first.engine)
    again = policy.choose(request(1, 2, 9), engines)
    assert told(again) == (first.engine, 256)
    policy.lost(first.engine.id)
    assert policy.choose(request(1, 2, 9), engines).cached_tokens == 0


def test_ties_are_spread() -> None:
    engines = [engine(name) for name in "abcd"]
    rng = random.Random(1)
    counts = Counter(pick_random_lowest(engines, [1, 0, 0, 2], rng).id for _ in range(400))
    assert set(counts) == {"b", "c"}
    assert min(counts.values()) > 150


def test_of_those_that_cost_about_the_same_a_cold_prompt_goes_to_the_emptiest() -> None:
    policy = auto(Known())
    engines = [engine(name) for name in "abc"]
    for one, stored in zip(engines, (300.0, 200.0, 100.0), strict=True):
        one.tally.stored = stored
    assert policy.choose(request(tokens=10), engines).engine.id == "c"
    engines[2].tally.begin(40_000, 0.0)
    assert policy.choose(request(tokens=10), engines).engine.id == "b", "the emptiest costs much more"


@pytest.mark.parametrize(("first_age", "second_age"), [(3.0, 2.0), (8.0, 3.0), (60.0, 1.0)])
def test_an_engine_that_came_first_does_not_keep_everything(first_age: float, second_age: float) -> None:
    now = 100.0
    first, second = engines = [
        engine("first", usable_since=now - first_age),
        engine("second", usable_since=now - second_age),
    ]
    index = PrefixIndex(1000)
    policy = Auto(ApproximatePrefixes(index), random.Random(0), lambda: now)
    shared = tuple(range(8))
    index.record(first.id, shared)
    sent = Counter[str]()
    for number in range(96):
        chosen = policy.choose(RequestView("m", (*shared, 100 + number), num_tokens=1100), engines).engine
        sent[chosen.id] += 1
        chosen.tally.begin(0, now, until=now)
        policy.sent(RequestView("m", (*shared, 100 + number), num_tokens=1100), chosen)
        chosen.tally.end()
    assert sent[second.id] > 96 / 8, sent


def test_cold_whole_answers_leave_an_engine_that_works_off_less() -> None:
    """Nobody streams, so that no engine's speed is learned: what is still there has to tell."""
    slow, *quick = engines = [engine("slow"), engine("b"), engine("c")]
    for one in engines:
        one.tally.recent = 300.0
    policy = Auto(ApproximatePrefixes(PrefixIndex(1000)), random.Random(0), lambda: 0.0)
    sent = Counter[str]()
    for number in range(120):
        chosen = policy.choose(RequestView("m", (number,), num_tokens=20), engines).engine
        sent[chosen.id] += 1
        chosen.tally.begin(20, 0.0, until=0.0)
        if chosen is not slow or slow.tally.num_requests > 8:
            chosen.tally.end()
    assert 2 * sent["slow"] < min(sent[one.id] for one in quick), sent
