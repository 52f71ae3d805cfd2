"""The decision: how many engines from now on, and why. A pure function of what is wanted, seen and remembered.

Up: the greatest demand, once it has lasted; at once in panic. Down: the load with its bursts of the last minutes, step
by step. Never down on missing data, never above a quota, to none only where nobody
asks, from none as soon as any router knows of somebody who does.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pagefleet_operator.autoscale.asked import MEMORY_S, Asked, asked, rises
from pagefleet_operator.autoscale.decode_speed import Sighting
from pagefleet_operator.autoscale.demand import EnginesSeen, prefill_engines
from pagefleet_operator.autoscale.policy import ScalingPolicy
from pagefleet_operator.autoscale.signals import FleetSignals
from pagefleet_operator.autoscale.state import Decision, Moment, ScalingReason, ScalingState

WOKEN_WITHIN_S = 10.0
"""From the start of the engines to the last answer to those who were held."""
UNKNOWN_RATE = 5000.0
"""Prompt tokens per second of an engine of which nothing was learned: what a small accelerator does."""


def decide(
    policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, state: ScalingState, now: float
) -> Decision:
    """Return the decision. The same arguments give the same one."""
    signals = signals.of_whole(engines.endpoints)
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
    kept = replace(state, since=now, idle_since=None, history=(*state.history[-1:], moment))
    number = f"{state.desired} engine{'' if state.desired == 1 else 's'}"
    return Decision(state.desired, ScalingReason.SIGNALS_MISSING, f"{what}: it stays at {number}", kept)


def _learned(
    policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, state: ScalingState, now: float
) -> ScalingState:
    rate, speed = signals.prefill_rate or state.prefill_rate, state.speed
    between = signals.seconds_between_tokens
    if policy.itl_s is not None and between is not None and engines.ready:
        share = min(1.0, prefill_engines(policy, signals, rate) / engines.ready)
        speed = speed.seen(Sighting(signals.running / engines.ready, share, between), now)
    # As long as the first engines start nobody can be expected to ask.
    idle = signals.idle and (engines.ready > 0 or not engines.warming)
    idle_since = (now if state.idle_since is None else state.idle_since) if idle else None
    return replace(state, speed=speed, idle_since=idle_since, prefill_rate=rate)


def _at_zero(policy: ScalingPolicy, signals: FleetSignals, state: ScalingState, now: float) -> Decision:
    if signals.idle:
        return Decision(0, ScalingReason.IDLE, "nobody asks", state)
    # Whoever is held waits for the start anyway: engines are for what they hold, not for a target missed already.
    computed = (state.prefill_rate or UNKNOWN_RATE) * WOKEN_WITHIN_S
    desired, _ = _limited(policy, state, max(1, math.ceil(signals.queued_tokens / computed)))
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
    demand = asked(policy, signals, engines, state, now)
    kept = tuple(one for one in state.history if one.at > now - MEMORY_S)
    return _step(policy, replace(state, history=(*kept, demand.moment)), demand, engines.ready, now)


def _step(policy: ScalingPolicy, state: ScalingState, asked: Asked, ready: int, now: float) -> Decision:
    """Return the decision by demand; `state` has this moment at the end of its history.

    One engine more or fewer is within the noise of most loads, so a step of one takes longer than a larger one.
    """
    tempo = policy.tempo
    short = _lasting(state, tempo.panic_window, now)
    panics = short > state.desired and short >= tempo.panic_factor * max(1, ready)
    if panics:
        state = replace(state, panicked_at=now)
        wanted, reason = short, ScalingReason.PANIC
    elif asked.late:
        wanted, reason = asked.moment.up, ScalingReason.LATE
    else:
        wanted, reason = _lasting(state, tempo.up_window, now), ScalingReason.DEMAND
        if wanted == state.desired + 1:
            wanted = _lasting(state, tempo.one_up_window, now)
    numbers = asked.strongest.because if asked.strongest else "nothing is asked for"
    if wanted <= state.desired:
        return _lower(policy, state, asked, numbers, now)
    # At most twice as many as have shown that they serve, or four more: a wrong number does no more harm than that.
    careful = min(wanted, max(state.desired, 2 * ready, ready + 4))
    desired, limit = _limited(policy, state, careful)
    if desired <= state.desired:
        return Decision(state.desired, limit or ScalingReason.STEADY, numbers, state)
    return Decision(desired, reason, numbers, replace(state, desired=desired, raised_at=now))


def _lasting(state: ScalingState, window_s: float, now: float) -> int:
    """Return what was asked for all the time of a window; what was not seen asked for no more than there is."""
    least = min(one.up for one in state.history if one.at >= now - window_s)
    return least if state.history[0].at <= now - window_s else min(least, state.desired)


def _limited(policy: ScalingPolicy, state: ScalingState, wanted: int) -> tuple[int, ScalingReason | None]:
    """Return the number within all bounds, and which one cut it."""
    if state.ceiling is not None and policy.bounded(wanted) > state.ceiling:
        return state.ceiling, ScalingReason.AT_QUOTA
    if wanted > policy.max:
        return policy.max, ScalingReason.AT_MAXIMUM
    return policy.bounded(wanted), None


def _lower(policy: ScalingPolicy, state: ScalingState, asked: Asked, numbers: str, now: float) -> Decision:
    lowest, limit = _limited(policy, state, max(asked.moment.down, asked.needed))
    if lowest >= state.desired:
        reached = limit if lowest == state.desired else None  # else more are about to be added
        return Decision(state.desired, reached or ScalingReason.STEADY, numbers, state)
    needed = max(lowest, _kept(policy, state, policy.tempo.down_window, now))
    if needed == state.desired - 1:
        needed = max(needed, _kept(policy, state, policy.tempo.one_down_window, now))
    rests = now < _rests_until(policy, state, needed) or rises(state.history, now)
    if needed >= state.desired or rests:
        return Decision(state.desired, ScalingReason.COOLING_DOWN, f"{numbers}; {lowest} would do", state)
    desired = max(needed, state.desired - max(1, state.desired // 4))
    return Decision(desired, ScalingReason.LESS_DEMAND, numbers, replace(state, desired=desired, lowered_at=now))


def _kept(policy: ScalingPolicy, state: ScalingState, window_s: float, now: float) -> int:
    return _limited(policy, state, max(one.down for one in state.history if one.at >= now - window_s))[0]


def _rests_until(policy: ScalingPolicy, state: ScalingState, needed: int) -> float:
    tempo = policy.tempo
    rests = [state.since + tempo.first_down]
    if state.raised_at is not None:
        rests.append(
            state.raised_at + (tempo.one_down_after_up if needed == state.desired - 1 else tempo.down_after_up)
        )
    if state.lowered_at is not None:
        rests.append(state.lowered_at + tempo.down_pause)
    if state.panicked_at is not None:
        rests.append(state.panicked_at + tempo.panic_lasts)
    return max(rests)
