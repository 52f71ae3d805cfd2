"""When engines come and go, and what keeps them: tables and properties of the decision."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pagefleet_operator.autoscale.decide import decide
from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.autoscale.policy import ScalingPolicy, Tempo, scaling_policy
from pagefleet_operator.autoscale.router_page import Histogram
from pagefleet_operator.autoscale.signals import FleetSignals
from pagefleet_operator.autoscale.state import ScalingReason, begin
from pagefleet_protocol.inference_service import Autoscaling, ScaleToZero, ScalingTarget

from tests.example_counts import examples
from tests.operator.autoscale.scaling_scene import BUSY, QUIET, SILENT, Scene, arriving


def test_demand_that_lasts_adds_engines_and_a_moment_of_it_does_not() -> None:
    scene = Scene(4)
    for _ in range(5):
        scene.last(arriving(3.8), 58)
        scene.decide(arriving(6.5))
    assert scene.desired == 4
    assert scene.last(arriving(5.8), 20).desired == 6
    assert scene.decide(arriving(5.8)).reason in (ScalingReason.STEADY, ScalingReason.COOLING_DOWN)


def test_routers_count_endpoints_and_engines_are_counted_here() -> None:
    each = EnginesSeen(ready=2, endpoints=4)
    rate = arriving(6).prefill_rate
    assert rate is not None
    signals = replace(arriving(6), engines=8.0, prefill_rate=rate / 4)
    state = replace(begin(2, 0.0), prefill_rate=None)
    policy = ScalingPolicy(max=8, ttft_s=2.0)
    by_ranks = decide(policy, signals, each, state, 100.0)
    whole = decide(policy, replace(signals, engines=2.0, prefill_rate=rate), EnginesSeen(ready=2), state, 100.0)
    assert by_ranks == whole
    assert by_ranks.state.prefill_rate == rate


def test_panic_adds_engines_sooner_and_keeps_them() -> None:
    scene = Scene(2)
    slow, fast = Scene(2), scene.last(arriving(6), 8)
    assert (fast.desired, slow.last(arriving(3), 8).desired) == (6, 2)
    assert scene.state.panicked_at is not None
    assert scene.last(arriving(1), 120).desired == 6


def test_engines_go_step_by_step_after_minutes_without_need() -> None:
    scene = Scene(8)
    assert scene.last(arriving(2), 298).desired == 8
    assert scene.decide(arriving(2)).reason in (ScalingReason.COOLING_DOWN, ScalingReason.LESS_DEMAND)
    scene.last(arriving(2), 240)
    assert scene.line == [8, 6, 5, 4, 3]
    assert scene.last(arriving(2), 600).desired == 3, "the margin is kept"


def test_one_engine_more_takes_longer_than_two() -> None:
    one, two = Scene(4), Scene(4)
    one.last(arriving(3.0), 60)
    two.last(arriving(3.0), 60)
    assert (one.last(arriving(4.5), 14).desired, one.last(arriving(4.5), 6).desired) == (4, 5)
    assert (two.last(arriving(5.5), 6).desired, two.last(arriving(5.5), 6).desired) == (4, 6)


def test_one_engine_fewer_takes_longer_than_two() -> None:
    one, two = Scene(5), Scene(5)
    for scene in (one, two):
        scene.last(arriving(4.5), 400)
    two.last(arriving(2.5), 180)
    assert (one.last(arriving(3.5), 180).desired, two.desired) == (5, 4)
    assert one.last(arriving(3.5), 120).desired == 4


def test_one_engine_that_came_of_late_stays_ten_minutes_though_it_is_not_needed() -> None:
    scene = Scene(4)
    scene.last(arriving(3.5), 400)
    assert scene.last(arriving(4.5), 60).desired == 5
    assert scene.last(arriving(3.5), 520).desired == 5
    assert scene.last(arriving(3.5), 120).desired == 4


def test_bursts_keep_engines_between_them_and_go_with_the_load_that_carries_them() -> None:
    """Bursts of half a minute every two minutes, a half upon a mean that falls from four engines to two."""
    scene = Scene(6)

    def bursts(mean: float, times: int) -> int:
        for _ in range(times):
            scene.last(arriving(mean), 90)
            scene.last(arriving(1.4 * mean), 30)
        return scene.desired

    assert bursts(4.0, 12) >= 6
    assert scene.line == sorted(scene.line), "none went between two bursts"
    assert bursts(2.0, 5) == 4, "in ten minutes; a mean of two alone would do with three"


@pytest.mark.parametrize("missing", [SILENT, FleetSignals(), replace(arriving(1), routers=2)])
def test_missing_data_holds_the_number_and_what_follows_waits_too(missing: FleetSignals) -> None:
    scene = Scene(5, idle_after_s=60.0)
    scene.last(arriving(4.8), 400)
    held = scene.last(missing, 3600)
    assert (held.desired, held.reason) == (5, ScalingReason.SIGNALS_MISSING)
    assert "stays at 5 engines" in held.message
    assert scene.last(arriving(1), 290).desired == 5, "nothing was seen for an hour"
    assert scene.last(arriving(1), 60).desired < 5


def test_to_zero_only_after_idleness_and_from_zero_with_the_first_request() -> None:
    scene = Scene(3, idle_after_s=120.0)
    scene.last(QUIET, 100)
    scene.decide(replace(QUIET, arrivals=1.0))
    assert scene.last(QUIET, 118).desired >= 1, "somebody asked meanwhile"
    gone = scene.last(QUIET, 8)
    assert (gone.desired, gone.reason) == (0, ScalingReason.IDLE)
    assert scene.last(QUIET, 600).desired == 0
    woken = scene.decide(replace(QUIET, arrivals=1.0, held=1.0, queued_tokens=500.0))
    assert (woken.desired, woken.reason) == (1, ScalingReason.WOKEN_UP)
    assert woken.message == "1 request with 500 tokens waits for an engine"
    impatient = Scene(0, idle_after_s=120.0).decide(replace(QUIET, arrivals=1.0))
    assert (impatient.desired, impatient.message) == (1, "somebody asked, and waits no more")


def test_one_router_that_holds_a_request_wakes_the_service_while_another_is_silent() -> None:
    scene = Scene(0, idle_after_s=60.0)
    part = replace(QUIET, routers=2, fresh=1)
    assert (scene.last(part, 60).desired, scene.decide(part).reason) == (0, ScalingReason.SIGNALS_MISSING)
    woken = scene.decide(replace(part, held=1.0))
    assert (woken.desired, woken.reason) == (1, ScalingReason.WOKEN_UP)
    assert scene.last(part, 600).desired == 1, "never down on missing data"


def test_demand_that_lasts_adds_engines_though_a_router_is_silent() -> None:
    """A router that crashes again and again must not keep the others' requests from getting engines."""
    scene = Scene(4)
    scene.last(arriving(3.8), 60)
    part = replace(arriving(6.5), routers=2)
    held = scene.decide(part)
    assert (held.desired, held.reason) == (4, ScalingReason.SIGNALS_MISSING)
    raised = scene.last(part, 20)
    assert raised.desired == 7
    assert scene.last(replace(arriving(1), routers=2), 3600).desired == 7, "never down on missing data"


def test_the_start_of_the_first_engine_is_no_idleness() -> None:
    scene = Scene(0, start_up_s=300.0, idle_after_s=60.0)
    scene.decide(replace(QUIET, arrivals=1.0, held=1.0))
    assert scene.last(QUIET, 350).desired == 1, "whoever asked has left, and it is ready for less than a minute"
    assert scene.last(QUIET, 20).desired == 0


def test_what_is_held_decides_how_many_wake_up() -> None:
    def woken(tokens: float, rate: float | None, **policy: Any) -> int:
        held = replace(QUIET, held=50.0, queued_tokens=tokens, prefill_rate=rate)
        return Scene(0, idle_after_s=60.0, **policy).decide(held).desired

    assert woken(60_000.0, 10_000.0) == 1, "six seconds of one engine"
    assert woken(250_000.0, 10_000.0) == 3
    assert woken(60_000.0, None) == 2, "by a rate that is assumed"
    assert woken(0.0, None, queue=1.0) == 1, "not one for each of those who wait"
    assert woken(9e9, 10_000.0) == 8


@pytest.mark.parametrize(
    "work",
    [{"held": 1.0}, {"queued": 1.0}, {"running": 1.0}, {"waiting": 1.0}, {"prefill_tokens": 9.0}, {"arrivals": 1.0}],
)
def test_never_to_zero_with_work(work: dict[str, Any]) -> None:
    scene = Scene(2, idle_after_s=10.0)
    assert scene.last(replace(QUIET, **work), 1200).desired >= 1


def test_without_scale_to_zero_the_minimum_stays() -> None:
    scene = Scene(3, min=2)
    assert scene.last(QUIET, 3600).desired == 2


def test_a_quota_is_a_ceiling_that_is_tried_again_later() -> None:
    scene = Scene(3)
    assert scene.last(arriving(6), 20).desired == 6
    scene.ready_at, scene.refused = scene.ready_at[:3], 3
    held = scene.decide(arriving(6))
    assert held.desired == 3
    scene.refused = 0
    held = scene.last(arriving(6), 200)
    assert (held.desired, held.reason) == (3, ScalingReason.AT_QUOTA)
    assert scene.last(arriving(6), 130).desired == 6


def test_demand_above_the_maximum_says_so() -> None:
    scene = Scene(8)
    full = scene.last(arriving(12), 30)
    assert (full.desired, full.reason) == (8, ScalingReason.AT_MAXIMUM)


def test_demand_above_the_maximum_that_has_not_lasted_yet_is_not_at_it() -> None:
    scene = Scene(2)
    asked = scene.decide(arriving(12))
    assert (asked.desired, asked.reason) == (2, ScalingReason.STEADY)


def test_engines_that_warm_up_count() -> None:
    scene = Scene(2, start_up_s=120.0)
    waits = replace(arriving(3.5), prefill_tokens=40_000.0)
    scene.last(waits, 20)
    first = scene.desired
    assert scene.last(waits, 60).desired <= first + 1, "what waits is for those that are on their way"


def test_missed_targets_add_an_engine_where_rates_were_learned_wrongly() -> None:
    late = Histogram((2.0, 4.0, float("inf")), (80.0, 100.0, 100.0), 150.0)
    scene = Scene(3)
    scene.last(arriving(2.5), 200)
    found = scene.decide(replace(arriving(2.5), first_token=late))
    assert (found.desired, found.reason) == (6, ScalingReason.LATE)
    assert "80% of requests within 2000 ms" in found.message
    assert scene.last(replace(arriving(2.5), first_token=late), 60).desired == 6, "not again while they start"


def test_growth_is_carried_on_as_far_as_an_engine_takes_to_start() -> None:
    slow, fast = Scene(3, start_up_s=10.0), Scene(3, start_up_s=150.0)
    for step in range(90):
        load = arriving(2.0 + step * 0.011)
        slow.decide(load)
        fast.decide(load)
    assert (slow.desired, fast.desired) == (3, 4)


def test_a_load_that_falls_takes_engines_with_it_before_it_has_ended_to_fall() -> None:
    scene = Scene(8)
    scene.last(arriving(7.9), 600)
    for number in range(300):
        scene.decide(arriving(7.9 - 5.0 * number / 300))
    assert 3 <= scene.desired <= 5
    assert all(after < before for before, after in pairwise(scene.line)), "down only"


def test_noise_makes_no_flapping() -> None:
    scene = Scene(4)
    for step in range(3600):
        scene.decide(arriving(3.5 + 0.6 * ((step * 7919) % 13 / 6 - 1)))
    assert len(scene.line) <= 3


def test_a_restarted_operator_goes_on_with_what_there_is() -> None:
    scene = Scene(6)
    scene.last(arriving(5.5), 900)
    scene.state = begin(scene.desired, scene.now)
    assert scene.last(arriving(1.0), 290).desired == 6


def test_unknown_rates_divide_nothing_and_requests_that_wait_ask() -> None:
    signals = replace(BUSY, prefill_rate=None, prompt_tokens_per_s=5000.0, waiting=20.0)
    assert Scene(2).last(signals, 30).desired == 5
    assert Scene(2).last(replace(signals, waiting=0.0), 30).desired == 2


@pytest.mark.parametrize(
    ("signals", "wanted"),
    [
        (replace(BUSY, waiting=30.0), 8),
        (replace(BUSY, queued=11.0, held=0.0), 3),
        (replace(BUSY, kv_usage=0.9, engines=4.0), 6),
        (replace(BUSY, kv_usage=0.2, engines=2.0), 2),
    ],
)
def test_targets_of_queue_and_cache(signals: FleetSignals, wanted: int) -> None:
    scene = Scene(2, ttft_s=None, queue=4.0, kv_usage=0.6, max=8)
    assert scene.last(signals, 140).desired == wanted


def test_the_specification_becomes_a_policy() -> None:
    latency = ScalingTarget(ttft_ms=1500, itl_ms=50)
    found = scaling_policy(Autoscaling(min=2, max=9, target=latency, scale_to_zero=ScaleToZero(after=90)))
    assert found == ScalingPolicy(min=2, max=9, ttft_s=1.5, itl_s=0.05, idle_after_s=90.0)
    assert scaling_policy(Autoscaling(max=4)) == ScalingPolicy(max=4, queue=4.0, kv_usage=0.8)
    by_cache = scaling_policy(Autoscaling(max=4, target=ScalingTarget(kv_usage=0.5)))
    assert (by_cache.queue, by_cache.kv_usage, by_cache.ttft_s) == (4.0, 0.5, None)


number = st.floats(0, 1e4)
signal = st.builds(
    FleetSignals,
    routers=st.integers(0, 3),
    fresh=st.integers(0, 3),
    age_s=st.floats(0, 100),
    arrivals=number,
    held=number,
    queued=number,
    queued_tokens=st.floats(0, 1e6),
    prefill_tokens=st.floats(0, 1e6),
    prompt_tokens_per_s=st.none() | st.floats(0, 1e6),
    generated_per_s=number,
    tokens_per_prompt=number,
    engines=st.floats(0, 64),
    running=number,
    waiting=number,
    kv_usage=st.floats(0, 1),
    prefill_rate=st.none() | st.floats(1e-3, 1e5),
)
policies = st.builds(
    ScalingPolicy,
    min=st.integers(1, 4),
    max=st.integers(4, 64),
    ttft_s=st.none() | st.floats(0.001, 100),
    itl_s=st.none() | st.floats(0.001, 10),
    queue=st.none() | st.floats(1, 100),
    idle_after_s=st.none() | st.floats(10, 100),
    tempo=st.builds(Tempo, up_window=st.floats(0, 30), down_window=st.floats(0, 60)),
)
seen = st.builds(EnginesSeen, ready=st.integers(0, 70), warming=st.integers(0, 70), refused=st.integers(0, 3))


@settings(deadline=None, max_examples=examples(60), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(policies, st.integers(0, 64), st.lists(st.tuples(signal, seen, st.floats(0, 200)), max_size=25))
def test_whatever_happens_the_bounds_hold(
    policy: ScalingPolicy, engines: int, steps: list[tuple[FleetSignals, EnginesSeen, float]]
) -> None:
    state, now = begin(engines, 0.0), 0.0
    for signals, found, wait in steps:
        now += wait
        before = state.desired
        decision = decide(policy, signals, found, state, now)
        desired, state = decision.desired, decision.state
        assert desired == state.desired
        assert desired <= policy.max
        quota = found.refused > 0 or state.ceiling is not None
        assert desired >= policy.min or quota or (desired == 0 and policy.idle_after_s is not None)
        if not signals.complete:
            kept = max(policy.min if before or policy.idle_after_s is None else 0, min(policy.max, before))
            assert desired >= (min(kept, max(1, found.count)) if quota else kept), "never down"
            assert desired <= kept or (signals.fresh and not signals.idle), "up only by what somebody saw"
        if signals.complete and not signals.idle:
            assert desired >= 1, "somebody waits"
        assert decision.message
        if state.ceiling is not None and desired > before:
            assert desired <= max(state.ceiling, before)


@settings(deadline=None, max_examples=examples(8), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.floats(0, 12), st.floats(0, 12), st.integers(1, 8))
def test_more_demand_never_wants_fewer(one: float, other: float, engines: int) -> None:
    low, high = sorted((one, other))
    assert Scene(engines).last(arriving(low), 700).desired <= Scene(engines).last(arriving(high), 700).desired
