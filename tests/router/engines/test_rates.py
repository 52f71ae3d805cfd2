"""What is learned of engines' speed, and the tally it is learned from."""

from __future__ import annotations

import math
import random

import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_router.engines.endpoints import EndpointTable, EngineView
from pagefleet_router.engines.rates import EngineRates, Estimate
from pagefleet_router.engines.tally import Tally
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.in_flight import InFlight
from pagefleet_router.scheduling.policy import Choice


def test_an_estimate_follows_its_samples() -> None:
    estimate = Estimate(10.0)
    estimate.observe(200.0, 0.0)
    assert estimate.value == pytest.approx(200.0), "the first sample replaces the guess"
    rng = random.Random(0)
    for _ in range(300):
        estimate.observe(500.0 * math.exp(rng.gauss(0.0, 0.5)), 0.0)
    assert 400 < estimate.value < 600


def test_one_outlier_hardly_moves_it() -> None:
    estimate = Estimate(1.0, Estimate(100.0))
    for _ in range(30):
        estimate.observe(100.0, 0.0)
    estimate.observe(1e6, 0.0)
    assert 100 < estimate.value < 115
    estimate.observe(1e-6, 0.0)
    assert 90 < estimate.value < 110


def test_twenty_samples_show_that_an_engine_became_ten_times_slower() -> None:
    estimate = Estimate(1.0, Estimate(1000.0))
    for _ in range(50):
        estimate.observe(1000.0, 0.0)
    for _ in range(20):
        estimate.observe(100.0, 0.0)
    assert estimate.value < 300


@pytest.mark.parametrize("sample", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_nonsense_is_dropped(sample: float) -> None:
    estimate = Estimate(10.0)
    estimate.observe(sample, 0.0)
    assert estimate.value == 10.0
    assert not estimate.is_learned


@pytest.mark.parametrize("sample", [5e-324, 1e308])
def test_it_stays_finite_and_above_zero(sample: float) -> None:
    estimate = Estimate(10.0, Estimate(10.0))
    for _ in range(2000):
        estimate.observe(sample, 0.0)
    assert 0 < estimate.value < math.inf


def test_a_new_engine_is_taken_to_be_like_its_siblings() -> None:
    common = EngineRates()
    old = EngineRates(common)
    for _ in range(50):
        old.prefill.observe(3000.0, 0.0)
    new = EngineRates(common)
    assert new.prefill.value == pytest.approx(3000.0)
    assert new.prefill.is_learned
    new.prefill.observe(1000.0, 0.0)
    assert 1000 < new.prefill.value < 3000


def test_an_engine_that_nobody_asks_becomes_like_its_siblings_again() -> None:
    common = EngineRates()
    slow, fast = EngineRates(common), EngineRates(common)
    for _ in range(50):
        slow.prefill.observe(100.0, 0.0)
        for _ in range(9):
            fast.prefill.observe(1000.0, 0.0)
    assert slow.prefill.value < 150
    slow.refresh(300.0)
    halfway = slow.prefill.value
    slow.refresh(6000.0)
    assert 100 < halfway < slow.prefill.value
    assert slow.prefill.value == pytest.approx(common.prefill.value, rel=0.01)


def test_rate_and_overhead_are_told_apart() -> None:
    rates = EngineRates()
    for _ in range(100):
        rates.first_byte(10, 0.3 + 10 / 2000, 0.0)
        rates.first_byte(4000, 0.3 + 4000 / 2000, 0.0)
    assert rates.overhead.value == pytest.approx(0.3, rel=0.1)
    assert rates.prefill.value == pytest.approx(2000, rel=0.1)


def test_a_whole_answer_says_only_that_the_engine_is_faster() -> None:
    rates = EngineRates()
    rates.whole(5000, 100.0, 0.0)
    assert not rates.prefill.is_learned
    rates.whole(50_000, 1.0, 0.0)
    assert rates.prefill.value > 50_000


def test_decoding_is_learned_between_polls_that_find_work() -> None:
    rates = EngineRates()
    for number in range(30):
        rates.polled(1000.0 * number, 4.0, float(number))
    assert rates.decode.value == pytest.approx(1000.0)
    before = rates.decode.value
    rates.polled(29_000.0, 0.0, 30.0)
    rates.polled(29_001.0, 1.0, 60.0)
    assert rates.decode.value == before, "it was idle"
    rates.polled(29_100.0, 1.0, 60.1)
    rates.polled(0.0, 1.0, 70.0)
    rates.polled(None, 1.0, 71.0)
    assert rates.decode.value == before, "too soon, restarted, unknown"


def engine() -> EngineView:
    return EngineView(Endpoint("a", "http://a:1", "m"), ready=True)


def request(tokens: int, stream: bool = True) -> RequestView:
    return RequestView("m", num_tokens=tokens, stream=stream)


def test_a_stream_s_tokens_count_until_its_answer_begins() -> None:
    one = engine()
    first = InFlight(request(3000), Choice(one, 1000), 0.0)
    second = InFlight(request(1000), Choice(one), 1.0)
    assert (one.tally.num_requests, one.tally.queued(50.0)) == (2, 3000)
    first.answering(2.0)
    first.answering(3.0)
    assert one.tally.queued(50.0) == 1000
    second.end(4.0)
    second.end(4.0)
    assert (one.tally.num_requests, one.tally.queued(50.0)) == (1, 0)
    first.end(5.0)
    assert one.tally.num_requests == 0
    assert one.rates.prefill.value == pytest.approx(2000 / (2.0 - 0.02), rel=0.01)


def test_what_is_not_streamed_counts_for_the_predicted_time() -> None:
    one = engine()
    attempt = InFlight(request(5000, stream=False), Choice(one), 0.0)
    assert one.tally.queued(0.4) == 5000
    assert one.tally.queued(0.6) == 0
    attempt.answering(9.0)
    attempt.end(9.0)
    assert (one.tally.num_requests, one.tally.num_tokens) == (0, 0)
    assert not one.rates.prefill.is_learned
    assert one.rates.request_seconds.value == pytest.approx(9.0)


def test_what_failed_teaches_nothing() -> None:
    one = engine()
    InFlight(request(5000), Choice(one), 0.0).end(0.001)
    assert not one.rates.prefill.is_learned
    assert not one.rates.request_seconds.is_learned


def test_a_tally_keeps_no_more_than_what_runs() -> None:
    tally = Tally()
    long = tally.begin(10**6, 0.0, 1e9)
    for second in range(5000):
        tally.prefilled(tally.begin(10, second, second + 1.0))
        tally.end()
    assert tally.num_timed < 200, "however long the first one takes"
    assert (tally.num_requests, tally.queued(5000.0)) == (1, 10**6)
    tally.prefilled(long)
    assert tally.queued(5000.0) == 0


def test_a_tally_forgets() -> None:
    tally = Tally()
    tally.begin(5, now=0.0)
    prefill = tally.begin(7, now=20.0)
    assert (tally.num_requests, tally.queued(20.0)) == (2, 12)
    assert tally.recent == pytest.approx(1.5)
    assert tally.settle(40.0) == pytest.approx(0.75)
    tally.prefilled(prefill)
    tally.prefilled(prefill)
    tally.end()
    assert (tally.num_requests, tally.queued(20.0)) == (1, 5)


def test_the_table_shares_what_is_learned_and_knows_since_when_an_engine_is_used() -> None:
    now = 5.0
    table = EndpointTable(clock=lambda: now)
    table.replace([Endpoint("a", "http://a:1", "m"), Endpoint("b", "http://b:1", "m")])
    assert table.snapshot.engines[0].usable_since == -math.inf
    table.set_ready("a", True)
    now = 9.0
    table.set_load("a", running=1, waiting=0, kv_usage=0.5, generated=100)
    assert table.snapshot.engines[0].usable_since == 5.0
    table.set_ejected("a", True)
    now = 30.0
    table.set_ejected("a", False)
    assert table.snapshot.engines[0].usable_since == 30.0
    table.snapshot.engines[0].rates.prefill.observe(77.0, now)
    table.snapshot.engines[1].rates.refresh(now)
    assert table.snapshot.engines[1].rates.prefill.value == pytest.approx(77.0, rel=0.01)
