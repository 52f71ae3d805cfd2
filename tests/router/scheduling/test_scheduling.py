"""Filters, scorers, pickers, policies, ejection and budget: tables and fake clocks, no sockets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from pagefleet_protocol.endpoints import Endpoint, OnTrial
from pagefleet_router.engines.endpoints import EndpointTable, EngineView, PolledLoad, build_snapshot
from pagefleet_router.errors import Failure
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.outliers import OutlierDetector
from pagefleet_router.scheduling.retry_budget import RetryBudget
from pagefleet_router.scheduling.selection import candidates
from pagefleet_router.telemetry.revisions import RevisionMetrics

from tests.fakes.exchange_scene import ExchangeScene
from tests.fakes.pair_fleet import pair_facts


def engine(name: str, *, requests: int = 0, foreign: float = 0.0, model: str = "m", **fields: Any) -> EngineView:
    view = EngineView(Endpoint(name, f"http://{name}:1", model), ready=True, load=PolledLoad(num_foreign=foreign))
    view.tally.num_requests = requests
    return replace(view, **fields)


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


def on_trial(name: str, percent: int = 10, **fields: Any) -> EngineView:
    return engine(name, endpoint=Endpoint(name, f"http://{name}:1", "m", on_trial=OnTrial("r2", percent)), **fields)


def chosen(engines: list[EngineView], draw: int, *tried: str, store: str = "") -> list[str]:
    found = candidates(build_snapshot(engines), RequestView("m", draw=draw, store=store), tried)
    return [one.id for one in found]


def test_a_revision_on_trial_gets_its_share_and_no_more() -> None:
    both = [engine("a"), engine("b"), on_trial("n")]
    assert [chosen(both, draw) for draw in (0, 9, 10, 99)] == [["n"], ["n"], ["a", "b"], ["a", "b"]]
    assert chosen([engine("a"), on_trial("n", 0)], 0) == ["a"]


def test_what_is_on_trial_gets_no_second_try_and_nothing_that_would_wait_there() -> None:
    facts = msgspec.structs.replace(pair_facts("0" * 32, "decode"), kv_transfer=None)
    busy = on_trial("n", requests=facts.max_num_seqs, facts=facts)
    assert chosen([engine("a"), busy], 0) == ["a"]
    assert chosen([engine("a"), engine("b"), on_trial("n")], 0, "a") == ["b"]


def test_whoever_is_left_answers() -> None:
    assert chosen([engine("a", ready=False), on_trial("n", 0)], 99) == ["n"]
    assert chosen([engine("a"), on_trial("n", 50, ready=False)], 0) == ["a"]


def test_stored_responses_are_looked_for_on_both_sides() -> None:
    facts = msgspec.structs.replace(pair_facts("0" * 32, "decode"), response_store="abc", kv_transfer=None)
    assert chosen([engine("a"), on_trial("n", 0, facts=facts)], 99, store="abc") == ["n"]


def test_counts_both_revisions_while_one_is_tried_out() -> None:
    metrics, both = RevisionMetrics(), [engine("a"), on_trial("n")]
    trials = build_snapshot(both).trials
    metrics.answered(both[0], build_snapshot(both[:1]).trials, 200)
    assert next(iter(metrics.collect())).samples == []
    metrics.answered(both[0], trials, 200)
    metrics.answered(both[1], trials, 429)
    metrics.failed(both[1], trials, Failure.RESET)
    metrics.failed(both[1], trials, Failure.STOPPING)
    metrics.first_token(both[1], trials, 0.5)
    metrics.between_tokens(both[1], trials, 0.1)
    outcomes, first, token = metrics.collect()
    found = {(one.labels["revision"], one.labels["outcome"]): one.value for one in outcomes.samples}
    assert found == {("stable", "answered"): 1, ("r2", "refused"): 1, ("r2", "failed"): 1}
    sums = {one.labels["revision"]: one.value for one in first.samples if one.name.endswith("_sum")}
    assert sums == {"stable": 0.0, "r2": 0.5}
    assert [one.value for one in token.samples if one.name.endswith("_count")] == [1, 0]
    another = engine("m", endpoint=Endpoint("m", "http://m:1", "m", on_trial=OnTrial("r3", 5)))
    metrics.answered(another, build_snapshot([another]).trials, 200)
    assert {one.labels["revision"] for one in next(iter(metrics.collect())).samples} == {"r3"}


def fail(
    detector: OutlierDetector, times: int, now: float, name: str = "a", model: str = "m", num_engines: int = 4
) -> list[bool]:
    return [detector.failed(name, now, model, num_engines) for _ in range(times)]


def test_five_failures_in_a_row_eject() -> None:
    detector = OutlierDetector()
    assert fail(detector, 4, 0.0) == [False] * 4
    detector.succeeded("a")
    assert fail(detector, 5, 0.0) == [False] * 4 + [True]
    assert fail(detector, 9, 1.0) == [False] * 9, "it is ejected already"
    assert detector.num_ejected("m") == 1


def test_ejections_double_up_to_a_minute_and_end_by_a_probe() -> None:
    detector = OutlierDetector()
    now, lengths = 0.0, []
    fail(detector, 4, now)
    for _ in range(6):
        assert detector.failed("a", now, "m", 4)
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
    assert detector.num_ejected("m") == 1
    assert detector.probed("a", 5.0)
    detector.succeeded("a")
    assert fail(detector, 5, 6.0) == [False] * 4 + [True]
    assert not detector.probed("a", 10.9)
    assert detector.probed("a", 11.0)


@pytest.mark.parametrize(("num_engines", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_at_most_half_is_ejected(num_engines: int, most: int) -> None:
    detector = OutlierDetector()
    for number in range(num_engines):
        fail(detector, 5, 0.0, f"e{number}", "m", num_engines)
    assert detector.num_ejected("m") == most
    detector.forget("e0")
    assert detector.num_ejected("m") == max(0, most - 1)
    detector.forget(f"e{num_engines - 1}")
    assert detector.num_ejected("m") == max(0, most - 1), "that one was none of them"


def test_the_engines_of_one_model_are_a_pool() -> None:
    detector = OutlierDetector()
    assert fail(detector, 5, 0.0, "a", "m", 2)[-1]
    assert not fail(detector, 5, 0.0, "c", "n", 1)[-1], "the only one stays, however many engines other models have"
    assert fail(detector, 5, 0.0, "d", "o", 2)[-1]


def test_failures_of_an_engine_that_left_count_against_nobody() -> None:
    """Requests that it had end later; were it ejected then, others could not be for as long as the router runs."""
    scene = ExchangeScene(num_engines=4)
    engines = scene.table.snapshot.engines
    dispatcher = scene.services.dispatcher
    scene.table.replace([engine.endpoint for engine in engines[2:]])
    for gone in engines[:2]:
        dispatcher.forget(gone.id)
        for _ in range(10):
            dispatcher.failed(gone, Failure.RESET)
    assert dispatcher.outliers.num_ejected("m") == 0
    for _ in range(10):
        dispatcher.failed(engines[2], Failure.RESET)
    assert [engine.ejected for engine in scene.table.snapshot.engines] == [True, False]


def test_a_failure_costs_no_look_at_the_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = ExchangeScene(num_engines=4)
    engine = scene.table.snapshot.engines[0]
    with monkeypatch.context() as patched:
        patched.setattr(EndpointTable, "snapshot", None)
        for _ in range(5):
            scene.services.dispatcher.failed(engine, Failure.STATUS)
    assert [one.ejected for one in scene.table.snapshot.engines] == [True, False, False, False]


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
