"""Filters, scorers, pickers, policies, ejection and budget: tables and fake clocks, no sockets."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_router.endpoints import EndpointTable, EngineView, PolledLoad, Tally, build_snapshot
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.filters import candidates
from pagefleet_router.scheduling.outliers import OutlierDetector
from pagefleet_router.scheduling.pickers import pick_lowest_then, pick_random_lowest
from pagefleet_router.scheduling.policy import LeastLoad, PrefixAffinity
from pagefleet_router.scheduling.retry_budget import RetryBudget
from pagefleet_router.scheduling.scorers import prefix_costs, request_counts


def engine(name: str, *, requests: int = 0, foreign: float = 0.0, model: str = "m", **fields: object) -> EngineView:
    view = EngineView(Endpoint(name, f"http://{name}:1", model), ready=True, load=PolledLoad(num_foreign=foreign))
    view.tally.num_requests = requests
    return replace(view, **fields)  # type: ignore[arg-type]


def test_only_usable_engines_of_the_model_are_candidates() -> None:
    draining = Endpoint("d", "http://d:1", "m", draining=True)
    snapshot = build_snapshot(
        [
            engine("a"), engine("b", ready=False), engine("c", ejected=True), engine("d", endpoint=draining),
            engine("e"), engine("f", model="other"),
        ]
    )  # fmt: skip

    def names(model: str | None, *tried: str) -> list[str]:
        return [one.id for one in candidates(snapshot, RequestView(model), tried)]

    assert names("m") == ["a", "e"]
    assert names("m", "a") == ["e"]
    assert names("m", "a", "e") == []
    assert names("other") == ["f"]
    assert names("unknown") == []
    assert names(None) == ["a", "e", "f"]
    assert snapshot.models == ("m", "other")
    assert [one.state for one in snapshot.engines] == ["ready", "unready", "ejected", "draining", "ready", "ready"]


def test_load_is_our_own_and_what_others_sent() -> None:
    assert request_counts([engine("a", requests=3), engine("b", requests=1, foreign=4.0)]) == [3, 5]


@pytest.mark.parametrize(
    ("matched", "requests", "wanted"),
    [
        ((12, 0, 0), (0, 0, 0), 0),
        ((0, 12, 0), (0, 4, 0), 1),
        ((12, 0, 0), (30, 2, 2), 1),
        ((12, 12, 0), (3, 2, 0), 1),
        ((2, 12, 0), (0, 0, 0), 1),
        ((0, 0, 0), (3, 2, 1), 2),
    ],
    ids=["cached", "cached though busier", "crowded", "cached twice", "longer match", "cold"],
)  # fmt: skip
def test_costs_weigh_cache_against_load(matched: tuple[int, ...], requests: tuple[int, ...], wanted: int) -> None:
    engines = [engine(f"e{n}", requests=count) for n, count in enumerate(requests)]
    costs = prefix_costs(engines, matched, num_pieces=20, now=0.0)
    assert costs.index(min(costs)) == wanted


def test_an_engine_with_too_large_a_share_loses_its_advantage() -> None:
    engines = [engine("a"), engine("b")]
    engines[0].tally.recent = 60.0
    costs = prefix_costs(engines, (20, 0), num_pieces=20, now=0.0)
    assert costs[1] < costs[0]
    costs = prefix_costs(engines, (20, 0), num_pieces=20, now=200.0)
    assert costs[0] < costs[1], "old traffic is forgotten"


def test_queued_work_counts() -> None:
    engines = [engine("a"), engine("b")]
    engines[0].tally.num_pieces = 500
    costs = prefix_costs(engines, (12, 0), num_pieces=20, now=0.0)
    assert costs[1] < costs[0]


def test_ties_are_spread() -> None:
    engines = [engine(name) for name in "abcd"]
    rng = random.Random(1)
    counts = Counter(pick_random_lowest(engines, [1, 0, 0, 2], rng).id for _ in range(400))
    assert set(counts) == {"b", "c"}
    assert min(counts.values()) > 150


def test_the_second_criterion_decides_within_the_slack() -> None:
    engines = [engine(name) for name in "abc"]
    order = {"a": 3.0, "b": 2.0, "c": 1.0}
    assert pick_lowest_then(engines, [0, 1, 5], lambda one: order[one.id], 2.0).id == "b"
    assert pick_lowest_then(engines, [0, 3, 5], lambda one: order[one.id], 2.0).id == "a"


def test_least_load_takes_the_fewest() -> None:
    policy = LeastLoad(random.Random(0))
    engines = [engine("a", requests=2), engine("b", foreign=1.0), engine("c", requests=2)]
    assert policy.choose(RequestView("m"), engines).engine.id == "b"
    assert not policy.uses_prefixes


def test_a_prefix_returns_to_its_engine_until_that_loses_its_cache() -> None:
    policy = PrefixAffinity(PrefixIndex(100), random.Random(0), lambda: 0.0)
    engines = [engine(name) for name in "abc"]
    first = policy.choose(RequestView("m", (1, 2, 3)), engines)
    assert first.num_matched == 0
    policy.sent(RequestView("m", (1, 2, 3)), first.engine)
    again = policy.choose(RequestView("m", (1, 2, 9)), engines)
    assert (again.engine, again.num_matched) == (first.engine, 2)
    policy.lost(first.engine.id)
    assert policy.choose(RequestView("m", (1, 2, 9)), engines).num_matched == 0


def test_cold_prompts_go_where_least_was_sent() -> None:
    policy = PrefixAffinity(PrefixIndex(1000), random.Random(0), lambda: 0.0)
    engines = [engine(name) for name in "abcd"]
    chosen: Counter[str] = Counter()
    for number in range(40):
        view = RequestView("m", (number,))
        choice = policy.choose(view, engines)
        choice.engine.tally.begin(1, 0.0)
        choice.engine.tally.end(1)
        policy.sent(view, choice.engine)
        chosen[choice.engine.id] += 1
    assert set(chosen.values()) == {10}


def test_a_tally_forgets() -> None:
    tally = Tally()
    tally.begin(5, now=0.0)
    tally.begin(7, now=20.0)
    assert (tally.num_requests, tally.num_pieces) == (2, 12)
    assert tally.recent == pytest.approx(1.5)
    assert tally.settle(40.0) == pytest.approx(0.75)
    tally.end(5)
    assert (tally.num_requests, tally.num_pieces) == (1, 7)


def fail(detector: OutlierDetector, times: int, now: float, engines: int = 4, name: str = "a") -> list[bool]:
    return [detector.failed(name, now, engines) for _ in range(times)]


def test_five_failures_in_a_row_eject() -> None:
    detector = OutlierDetector()
    assert fail(detector, 4, 0.0) == [False] * 4
    detector.succeeded("a")
    assert fail(detector, 5, 0.0) == [False] * 4 + [True]
    assert fail(detector, 9, 1.0) == [False] * 9, "it is ejected already"
    assert detector.num_ejected() == 1


def test_ejections_double_up_to_a_minute_and_end_by_a_probe() -> None:
    detector = OutlierDetector()
    now, lengths = 0.0, []
    fail(detector, 4, now)
    for _ in range(6):
        assert detector.failed("a", now, 4)
        started = now
        while not detector.probed("a", now):
            now += 0.5
        lengths.append(now - started)
    assert lengths == [5, 10, 20, 40, 60, 60]
    assert not detector.probed("a", now), "it was not ejected any more"


def test_a_success_after_an_ejection_wipes_the_slate() -> None:
    detector = OutlierDetector()
    fail(detector, 5, 0.0)
    detector.succeeded("a")  # an answer to an old request
    assert detector.num_ejected() == 1
    assert detector.probed("a", 5.0)
    detector.succeeded("a")
    assert fail(detector, 5, 6.0) == [False] * 4 + [True]
    assert not detector.probed("a", 10.9)
    assert detector.probed("a", 11.0)


@pytest.mark.parametrize(("num_engines", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_at_most_half_is_ejected(num_engines: int, most: int) -> None:
    detector = OutlierDetector()
    for number in range(num_engines):
        fail(detector, 5, 0.0, num_engines, f"e{number}")
    assert detector.num_ejected() == most
    detector.forget("e0")
    assert detector.num_ejected() == max(0, most - 1)


@pytest.mark.parametrize(("live", "allowed"), [(1, 3), (15, 3), (20, 4), (50, 10)])
def test_retries_in_flight_are_a_share_of_live_requests(live: int, allowed: int) -> None:
    budget = RetryBudget()
    for _ in range(live):
        budget.request_began()
    assert [budget.try_retry() for _ in range(allowed + 2)] == [True] * allowed + [False] * 2
    budget.request_ended(num_retries=1)
    assert budget.live_requests == live - 1


def test_retries_over_time_are_a_share_of_the_traffic() -> None:
    budget = RetryBudget()
    granted = 0
    for _ in range(1000):
        budget.request_began()
        retries = int(budget.try_retry())
        granted += retries
        budget.request_ended(retries)
    assert 200 <= granted <= 221


def test_the_table_keeps_the_state_of_engines_that_stay() -> None:
    table = EndpointTable()
    changes: list[tuple[set[str], set[str]]] = []
    table.subscribe(lambda left, came: changes.append((left, came)))
    a, b = Endpoint("a", "http://a:1", "m"), Endpoint("b", "http://b:1", "m")
    table.replace([a, b])
    assert table.set_ready("a", True)
    assert not table.set_ready("a", True), "no news"
    assert not table.set_ready("z", True)
    before = table.snapshot
    view = before.engines[0]
    view.tally.num_requests = 2
    table.set_load("a", running=4, waiting=1, kv_usage=0.5)
    assert before.engines[0].load is None, "a snapshot does not change"
    assert table.snapshot.engines[0].num_requests == 5
    table.replace([replace_endpoint(a, draining=True), Endpoint("b", "http://elsewhere:1", "m")])
    kept, new = table.snapshot.engines
    assert (kept.ready, kept.tally) == (True, view.tally)
    assert not new.ready
    table.set_ejected("a", True)
    assert table.snapshot.engines[0].ejected
    table.replace([])
    assert changes == [(set(), {"a", "b"}), ({"b"}, {"b"}), ({"a", "b"}, set())]


def replace_endpoint(endpoint: Endpoint, draining: bool) -> Endpoint:
    return Endpoint(endpoint.id, endpoint.url, endpoint.model, draining)
