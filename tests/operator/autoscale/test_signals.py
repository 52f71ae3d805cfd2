"""What routers' pages say together: sums, differences, restarts, and what is too old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_operator.autoscale.decide import decide
from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.autoscale.policy import ScalingPolicy
from pagefleet_operator.autoscale.router_page import Histogram, RouterReading, read_router_page
from pagefleet_operator.autoscale.signals import LONG_S, SHORT_S, STALE_S, FleetWindow
from pagefleet_operator.autoscale.state import begin
from pagefleet_protocol import metric_names as names
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as Prometheus

_COUNTED = (
    names.ROUTER_PROMPT_TOKENS,
    names.ROUTER_FLEET_GENERATED_TOKENS,
    names.ROUTER_QUEUED_TOKENS,
    names.ROUTER_PREFILL_TOKENS,
    names.ROUTER_FLEET_ENGINES,
    names.ROUTER_FLEET_REQUESTS_RUNNING,
    names.ROUTER_FLEET_REQUESTS_WAITING,
    names.ROUTER_FLEET_KV_USAGE_RATIO,
)
PAGE = f"""# HELP {names.ROUTER_ARRIVALS} Requests.
# TYPE {names.ROUTER_ARRIVALS} counter
{names.ROUTER_ARRIVALS}{{model="a b}}\\""}} 7
{names.ROUTER_ARRIVALS}{{model="c"}} 3.0 1700000000000
{names.ROUTER_HELD}{{model="c"}} 2
{names.ROUTER_QUEUED_TOKENS}{{model="c"}} 900
{names.ROUTER_PREFILL_RATE}{{model="a"}} 100
{names.ROUTER_PREFILL_RATE}{{model="c"}} 300
{names.ROUTER_DECODE_RATE}{{model="c"}} NaN
{names.ROUTER_FLEET_ENGINES} 3
{names.ROUTER_FLEET_KV_USAGE_RATIO} 0.5
{names.ROUTER_FIRST_TOKEN_SECONDS}_bucket{{model="c",le="0.5"}} 6
{names.ROUTER_FIRST_TOKEN_SECONDS}_bucket{{le="+Inf",model="c"}} 10
{names.ROUTER_FIRST_TOKEN_SECONDS}_sum{{model="c"}} 12.5
pagefleet_router_requests_total{{route="/v1/models",status="200"}} 5
python_info 1
"""


def test_a_page_is_summed_over_models_and_rates_are_averaged() -> None:
    reading = read_router_page(PAGE.encode())
    assert reading is not None
    assert (reading.arrivals, reading.held, reading.queued, reading.queued_tokens) == (10, 2, 0, 900)
    assert reading.prefill_rate == 200
    assert reading.prompt_tokens is None
    assert (reading.engines, reading.kv_usage) == (3, 0.5)
    assert reading.first_token == Histogram((0.5, float("inf")), (6, 10), 12.5)


def test_what_the_library_writes_is_read() -> None:
    registry = CollectorRegistry()
    Counter(names.ROUTER_ARRIVALS.removesuffix("_total"), "x", ["model"], registry=registry).labels('m"\\\n').inc(4)
    Gauge(names.ROUTER_QUEUED, "x", ["model"], registry=registry).labels("m").set(2)
    seconds = Prometheus(names.ROUTER_TOKEN_SECONDS, "x", ["model"], buckets=(0.1, 1.0), registry=registry)
    for value in (0.05, 0.5, 5.0):
        seconds.labels("m").observe(value)
    reading = read_router_page(generate_latest(registry))
    assert reading is not None
    assert (reading.arrivals, reading.queued) == (4, 2)
    assert list(reading.between_tokens.counts) == [1, 2, 3]
    assert reading.between_tokens.mean == pytest.approx(5.55 / 3)


@pytest.mark.parametrize("page", [b"", b"\xff\xfe", b"<html>", b"pagefleet_engine_requests_running 1"])
def test_what_is_no_routers_page_says_nothing(page: bytes) -> None:
    assert read_router_page(page) is None


@given(st.binary(max_size=200), st.text(max_size=60))
def test_garbage_never_becomes_a_number_that_is_none(noise: bytes, value: str) -> None:
    page = f"{names.ROUTER_ARRIVALS} 1\n{names.ROUTER_HELD} {value}\n".encode() + noise
    reading = read_router_page(page)
    assert reading is not None
    assert 0 <= reading.held < float("inf")


@pytest.mark.parametrize("rate", ["1e308", "1e15", "1e-300"])
def test_no_number_of_a_router_is_too_large_to_decide_by(rate: str) -> None:
    """One router that lies must not end the decisions for all services."""
    policy = ScalingPolicy(max=8, ttft_s=1.0, itl_s=0.05)
    seen, state = FleetWindow(), begin(2, 0.0)
    for turn in range(1, 40):
        lines = [f"{names.ROUTER_ARRIVALS} {turn}", f"{names.ROUTER_PREFILL_RATE} {rate}"]
        for name in _COUNTED:
            lines += [f'{name}{{model="{one}"}} {value}' for one, value in (("a", "1e308"), ("b", f"{turn}e13"))]
        reading = read_router_page("\n".join(lines).encode())
        assert reading is not None
        seen.add("r", reading, 2.0 * turn)
        decision = decide(policy, seen.signals(["r"], 2.0 * turn), EnginesSeen(ready=2), state, 2.0 * turn)
        state = decision.state
        assert 1 <= decision.desired <= 8


def window(*readings: tuple[float, RouterReading], router: str = "r") -> FleetWindow:
    made = FleetWindow()
    for at, reading in readings:
        made.add(router, reading, at)
    return made


def test_flows_are_differences_and_a_restart_is_no_negative_rate() -> None:
    made = window(
        (0, RouterReading(prompt_tokens=1000, arrivals=10, generated=100)),
        (10, RouterReading(prompt_tokens=2000, arrivals=20, generated=600)),
        (20, RouterReading(prompt_tokens=300, arrivals=3, generated=50)),
    )
    signals = made.signals(["r"], 20)
    assert signals.prompt_tokens_per_s == pytest.approx((1000 + 300) / 20)
    assert signals.generated_per_s == pytest.approx((500 + 50) / 20)
    assert signals.arrivals == 3, "of the last seconds"
    assert signals.tokens_per_prompt == pytest.approx(1300 / 13)
    assert signals.complete


def test_one_reading_gives_no_flow_and_counts_from_before_do_not_count() -> None:
    signals = window((0, RouterReading(arrivals=1e6, prompt_tokens=1e9))).signals(["r"], 0)
    assert (signals.arrivals, signals.prompt_tokens_per_s, signals.idle) == (0, 0, True)


def test_routers_own_counts_add_up_and_the_fleet_is_one_routers_word() -> None:
    made = FleetWindow()
    for router, at in (("a", 0.0), ("b", 1.0)):
        made.add(router, RouterReading(held=2, queued=1, running=5, engines=4, kv_usage=0.5, prefill_rate=100), at)
    made.add("b", RouterReading(held=2, queued=1, running=7, engines=4, kv_usage=0.6, prefill_rate=300), 2.0)
    signals = made.signals(["a", "b"], 2.0)
    assert (signals.held, signals.queued, signals.running, signals.kv_usage) == (4, 2, 7, 0.6)
    assert signals.prefill_rate == 200


def test_a_silent_router_is_missing_and_one_that_is_gone_is_forgotten() -> None:
    made = window((0, RouterReading(held=1)))
    assert made.signals(["r"], STALE_S).complete
    late = made.signals(["r"], STALE_S + 1)
    assert (late.complete, late.fresh, late.age_s) == (False, 0, STALE_S + 1)
    assert not made.signals(["r", "new"], 1).complete
    assert made.signals(["r", "new"], 1).age_s == float("inf")
    assert not made.signals([], 1).complete
    assert made.signals(["r"], 1).age_s == float("inf"), "it was no router's a moment ago"


def test_latencies_are_those_of_the_last_minute() -> None:
    bounds = (1.0, float("inf"))
    made = FleetWindow()
    for step in range(120):
        late = 10.0 * min(step, 30)
        made.add("r", RouterReading(first_token=Histogram(bounds, (10.0 * step - late, 10.0 * step), step)), 2.0 * step)
    seen = made.signals(["r"], 238.0).first_token
    assert seen.share_within(1.0) == 1.0
    assert seen.total == pytest.approx(10 * LONG_S / 2, rel=0.35)


def test_memory_is_bounded_and_short_flows_stay_exact() -> None:
    made = FleetWindow()
    for step in range(5000):
        made.add("r", RouterReading(prompt_tokens=100.0 * step), 2.0 * step)
    assert len(made._routers["r"]) < 40
    assert made.signals(["r"], 2.0 * 4999).prompt_tokens_per_s == pytest.approx(50)
    assert SHORT_S < LONG_S


def test_histograms_tell_shares_and_quantiles() -> None:
    seen = Histogram((1.0, 2.0, float("inf")), (50, 90, 100), 120.0)
    assert seen.share_within(1.5) == pytest.approx(0.7)
    assert seen.share_within(5.0) == pytest.approx(0.9)
    assert seen.quantile(0.7) == pytest.approx(1.5)
    assert seen.quantile(0.99) == 2.0
    assert Histogram().share_within(1.0) is Histogram().quantile(0.5) is Histogram().mean is None
    assert seen.since(seen).total == 0
    assert Histogram(seen.bounds, (1, 2, 3), 1).since(seen).total == 3, "a restart"
    assert seen.plus(Histogram((9.0, float("inf")), (1, 1))) is seen, "another version's buckets"


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1e6)), min_size=1, max_size=60))
def test_no_rate_is_ever_negative(steps: list[tuple[float, float]]) -> None:
    made, at = FleetWindow(), 0.0
    for wait, count in steps:
        at += wait
        made.add("r", RouterReading(arrivals=count, prompt_tokens=count, generated=count), at)
    signals = made.signals(["r"], at)
    assert signals.arrivals >= 0
    assert (signals.prompt_tokens_per_s or 0) >= 0
    assert signals.generated_per_s >= 0
