"""The decision: how many engines from now on, and why. A pure function of what is wanted, seen and remembered.

Up: the greatest demand, once it has lasted; at once in panic. Down: the greatest demand of the last minutes, of fewer
where it fell all the time, step by step. Never down on missing data, never above a quota, to none only where nobody
asks, from none as soon as any router knows of somebody who does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from pagefleet_operator.autoscale.decode_speed import Sighting
from pagefleet_operator.autoscale.demand import (
    Demand,
    EnginesSeen,
    Learned,
    load_demands,
    missed_targets,
    prefill_engines,
    pressure_demands,
)
from pagefleet_operator.autoscale.policy import ScalingPolicy
from pagefleet_operator.autoscale.signals import FleetSignals
from pagefleet_operator.autoscale.state import Moment, ScalingState
from pagefleet_operator.autoscale.trend import falls, projected

MARGIN_UP = 0.05
"""Of an engine: demand above a whole number by no more asks for no further one."""
MARGIN_DOWN = 0.35
"""Of an engine: one goes only if that much more demand would still be met without it."""


class ScalingReason(StrEnum):
    """One word for why."""

    STEADY = "Steady"
    """As many as the demand asks for."""
    DEMAND = "Demand"
    """More are added."""
    PANIC = "Panic"
    """More are added at once: demand is far above what serves."""
    LATE = "TargetMissed"
    """More are added as requests were too late."""
    LESS_DEMAND = "LessDemand"
    """Some go."""
    COOLING_DOWN = "CoolingDown"
    """Some could go, and will if demand stays low."""
    AT_MAXIMUM = "AtMaximum"
    """Demand asks for more than `max`."""
    AT_QUOTA = "AtQuota"
    """Demand asks for more than can be created."""
    IDLE = "Idle"
    """None, as nobody asks."""
    WOKEN_UP = "WokenUp"
    """Somebody asks, and there was none."""
    SIGNALS_MISSING = "SignalsMissing"
    """As many as before: routers do not say what they see."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How many engines from now on."""

    desired: int
    reason: ScalingReason
    message: str
    """One sentence with the numbers."""
    state: ScalingState
    """For the next decision."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The demand of this moment."""

    up: int
    down: int
    load: float
    strongest: Demand | None
    late: bool
    """Whether only missed targets ask for more."""


def decide(
    policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, state: ScalingState, now: float
) -> Decision:
    """Return the decision. The same arguments give the same one.

    Args:
        policy: what is wanted.
        signals: what routers say.
        engines: that exist.
        state: of the decision before.
        now: monotonic seconds.
    """
    state = _ceiling(replace(state, desired=_within(policy, state.desired)), policy, engines, now)
    if not signals.complete:
        return _by_part(policy, signals, engines, state, now)
    state = _learned(policy, signals, engines, state, now)
    if state.desired == 0:
        return _at_zero(policy, signals, state, now)
    if policy.idle_after_s is not None and state.idle_since is not None and not engines.warming:
        idle_s = now - state.idle_since
        if idle_s >= policy.idle_after_s:
            rested = replace(state, desired=0, history=(), lowered_at=now)
            return Decision(0, ScalingReason.IDLE, f"nobody asked for {idle_s:.0f} s", rested)
    return _by_demand(policy, signals, engines, state, now)


def _by_part(
    policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, state: ScalingState, now: float
) -> Decision:
    """Add what the routers that speak ask for: a silent one's demand would only come on top. Take nothing away."""
    if signals.fresh == 0 or signals.idle:
        return _hold(signals, state, now)
    learned = _learned(policy, signals, engines, state, now)
    if state.desired == 0:
        return _at_zero(policy, signals, learned, now)
    decision = _by_demand(policy, signals, engines, learned, now)
    if decision.desired > state.desired:
        return decision
    held, seen = _hold(signals, state, now), decision.state.history
    # Else a demand that lasts would never be seen to.
    moment = replace(held.state.history[-1], up=max(seen[-1].up, state.desired))
    return replace(held, state=replace(held.state, history=(*seen[:-1], moment)))


def _within(policy: ScalingPolicy, engines: int) -> int:
    if engines <= 0 and policy.idle_after_s is not None:
        return 0
    return policy.bounded(engines)


def _ceiling(state: ScalingState, policy: ScalingPolicy, engines: EnginesSeen, now: float) -> ScalingState:
    if engines.refused > 0 and engines.count < state.desired:
        # To want fewer takes none away that exists.
        most = max(1, engines.count)
        return replace(state, desired=most, ceiling=most, ceiling_until=now + policy.tempo.ceiling_lasts)
    if state.ceiling is not None and now >= state.ceiling_until:
        return replace(state, ceiling=None)
    if state.ceiling is None:
        return state
    ceiling = max(state.ceiling, engines.count)  # more exist: there is room again
    return replace(state, ceiling=ceiling, desired=min(state.desired, ceiling))


def _hold(signals: FleetSignals, state: ScalingState, now: float) -> Decision:
    """Keep the number. What was not seen counts as demand for all that there is, so nothing goes soon after either."""
    if signals.routers == 0:
        what = "there is no router to ask"
    else:
        what = f"{signals.routers - signals.fresh} of {signals.routers} routers say nothing"
    moment = Moment(now, None, state.desired, state.desired)
    kept = replace(state, idle_since=None, history=(*state.history[-1:], moment))
    number = f"{state.desired} engine{'' if state.desired == 1 else 's'}"
    return Decision(state.desired, ScalingReason.SIGNALS_MISSING, f"{what}: it stays at {number}", kept)


def _learned(
    policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, state: ScalingState, now: float
) -> ScalingState:
    rate, speed = signals.prefill_rate or state.prefill_rate, state.speed
    between = signals.seconds_between_tokens
    if policy.itl_s is not None and between is not None and engines.ready:
        share = min(1.0, prefill_engines(signals, rate) / engines.ready)
        speed = speed.seen(Sighting(signals.running / engines.ready, share, between), now)
    # As long as the first engines start nobody can be expected to ask.
    idle = signals.idle and (engines.ready > 0 or not engines.warming)
    idle_since = (now if state.idle_since is None else state.idle_since) if idle else None
    return replace(state, speed=speed, idle_since=idle_since, prefill_rate=rate)


def _at_zero(policy: ScalingPolicy, signals: FleetSignals, state: ScalingState, now: float) -> Decision:
    if signals.idle:
        return Decision(0, ScalingReason.IDLE, "nobody asks", state)
    asked = [demand.engines for demand in pressure_demands(policy, signals, EnginesSeen(), Learned(state.prefill_rate))]
    # Without a learned rate one engine has to show how fast it is.
    wanted = math.ceil(max(asked, default=0.0)) if state.prefill_rate else 1
    desired, _ = _limited(policy, state, max(1, wanted))
    woken = replace(state, desired=desired, raised_at=now, since=now, history=(Moment(now, None, desired, desired),))
    return Decision(desired, ScalingReason.WOKEN_UP, _who_asked(signals), woken)


def _who_asked(signals: FleetSignals) -> str:
    waiting = round(signals.held + signals.queued)
    tokens = f" with {signals.queued_tokens:.0f} tokens" if signals.queued_tokens else ""
    if waiting == 0:
        return "somebody asked, and waits no more"
    return (
        f"{waiting} request{tokens} waits for an engine"
        if waiting == 1
        else f"{waiting} requests{tokens} wait for an engine"
    )


def _by_demand(
    policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, state: ScalingState, now: float
) -> Decision:
    tempo = policy.tempo
    asked = _asked(policy, signals, engines, state, now)
    horizon = now - max(tempo.up_window + 60, tempo.down_window, tempo.trend_window)
    kept = tuple(one for one in state.history if one.at > horizon)
    history = (*kept, Moment(now, asked.load, asked.up, asked.down))
    state = replace(state, history=history)
    short = _lasting(state, tempo.panic_window, now)
    panics = short > state.desired and short >= tempo.panic_factor * max(1, engines.ready)
    if panics:
        state = replace(state, panicked_at=now)
    lasting = _lasting(state, tempo.up_window, now)
    wanted = short if panics else asked.up if asked.late else lasting
    numbers = asked.strongest.because if asked.strongest else "nothing is asked for"
    if wanted > state.desired:
        return _raise(policy, state, _Step(wanted, engines.ready, panics, asked.late), numbers, now)
    return _lower(policy, state, asked, numbers, now)


def _lasting(state: ScalingState, window_s: float, now: float) -> int:
    """Return what was asked for all the time of a window; what was not seen asked for no more than there is."""
    least = min(one.up for one in state.history if one.at >= now - window_s)
    return least if state.history[0].at <= now - window_s else min(least, state.desired)


def _asked(
    policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, state: ScalingState, now: float
) -> _Asked:
    tempo, learned = policy.tempo, Learned(state.prefill_rate, state.speed)
    loads = list(load_demands(policy, signals, engines, learned))
    pressures = list(pressure_demands(policy, signals, engines, learned))
    load = max((one.engines for one in loads), default=0.0)
    ahead_s = min(tempo.trend_at_most, engines.start_up_s or tempo.start_up)
    coming = projected(state.history, load, now, tempo.trend_window, ahead_s)
    later = projected(state.history, load, now, tempo.trend_window, 2 * ahead_s)
    now_needed = max((one.engines for one in (*loads, *pressures)), default=0.0)
    up = _whole(max(coming, now_needed))
    late = False
    quiet = state.raised_at is None or now - state.raised_at >= tempo.correction_pause + ahead_s
    if up <= state.desired and quiet and not engines.warming:
        corrections = list(missed_targets(policy, signals, engines))
        loads += corrections
        corrected = _whole(max((one.engines for one in corrections), default=0.0))
        late = corrected > state.desired
        up = max(up, corrected)
    strongest = max((*loads, *pressures), key=lambda one: one.engines, default=None)
    down = max(_whole(load + MARGIN_DOWN), _whole(later), _whole(now_needed))
    return _Asked(up=up, down=max(down, state.desired) if late else down, load=load, strongest=strongest, late=late)


def _whole(engines: float) -> int:
    return max(0, math.ceil(engines - MARGIN_UP))


@dataclass(frozen=True, slots=True)
class _Step:
    wanted: int
    ready: int
    panics: bool
    late: bool


def _raise(policy: ScalingPolicy, state: ScalingState, step: _Step, numbers: str, now: float) -> Decision:
    # At most twice as many as have shown that they serve, or four more: a wrong number does no more harm than that.
    careful = min(step.wanted, max(state.desired, 2 * step.ready, step.ready + 4))
    desired, limit = _limited(policy, state, careful)
    if desired <= state.desired:
        return Decision(state.desired, limit or ScalingReason.STEADY, numbers, state)
    reason = ScalingReason.PANIC if step.panics else ScalingReason.LATE if step.late else ScalingReason.DEMAND
    return Decision(desired, reason, numbers, replace(state, desired=desired, raised_at=now))


def _lower(policy: ScalingPolicy, state: ScalingState, asked: _Asked, numbers: str, now: float) -> Decision:
    tempo = policy.tempo
    window_s = tempo.down_window
    if falls(state.history, asked.load, now, window_s):
        window_s = min(window_s, tempo.falling_window)
    needed, _ = _limited(policy, state, max(one.down for one in state.history if one.at >= now - window_s))
    lowest, limit = _limited(policy, state, asked.down)
    if needed >= state.desired or lowest >= state.desired:
        if needed > lowest and lowest < state.desired:
            return Decision(state.desired, ScalingReason.COOLING_DOWN, f"{numbers}; {lowest} would do", state)
        reached = limit if lowest <= state.desired else None  # else more are about to be added
        return Decision(state.desired, reached or ScalingReason.STEADY, numbers, state)
    rests = [state.since + tempo.down_window]
    if state.raised_at is not None:
        rests.append(state.raised_at + tempo.down_window)
    if state.lowered_at is not None:
        rests.append(state.lowered_at + tempo.down_pause)
    if state.panicked_at is not None:
        rests.append(state.panicked_at + tempo.panic_lasts)
    rests_from = max(rests)
    if now < rests_from:
        return Decision(state.desired, ScalingReason.COOLING_DOWN, f"{numbers}; {lowest} would do", state)
    desired = max(needed, state.desired - max(1, state.desired // 4))
    return Decision(desired, ScalingReason.LESS_DEMAND, numbers, replace(state, desired=desired, lowered_at=now))


def _limited(policy: ScalingPolicy, state: ScalingState, wanted: int) -> tuple[int, ScalingReason | None]:
    """Return the number within all bounds, and which one cut it."""
    if state.ceiling is not None and policy.bounded(wanted) > state.ceiling:
        return state.ceiling, ScalingReason.AT_QUOTA
    if wanted > policy.max:
        return policy.max, ScalingReason.AT_MAXIMUM
    return policy.bounded(wanted), None
