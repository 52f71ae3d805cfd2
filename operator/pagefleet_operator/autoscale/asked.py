"""The demand of one moment in whole engines: how many at least, and how many to keep."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pagefleet_operator.autoscale.demand import (
    Demand,
    EnginesSeen,
    Learned,
    load_demands,
    missed_targets,
    of_part,
    pressure_demands,
)
from pagefleet_operator.autoscale.policy import ScalingPolicy
from pagefleet_operator.autoscale.signals import FleetSignals
from pagefleet_operator.autoscale.state import Moment, ScalingState
from pagefleet_operator.autoscale.trend import level, projected, surge_learned, surge_seen

MARGIN_UP = 0.05
"""Of an engine: demand above a whole number by no more asks for no further one."""
MARGIN_DOWN = 0.3
"""Of an engine: one goes only if that much more demand would still be met without it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The demand of this moment."""

    moment: Moment
    """To be remembered."""
    needed: int
    """Engines that what waits or grows asks for now: of no meaning once it has been answered."""
    strongest: Demand | None
    late: bool
    """Whether only missed targets ask for more."""


def asked(policy: ScalingPolicy, signals: FleetSignals, engines: EnginesSeen, state: ScalingState, now: float) -> Asked:
    """Return what is asked for.

    Args:
        policy: what is wanted.
        signals: what routers say.
        engines: that exist.
        state: of the decision before, with what has been learned since.
        now: monotonic seconds.
    """
    tempo, learned = policy.tempo, Learned(state.prefill_rate, state.speed)
    loads = of_part(policy, load_demands(policy, signals, engines, learned))
    pressures = of_part(policy, pressure_demands(policy, signals, engines, learned))
    load = max((one.engines for one in loads), default=0.0)
    ahead_s = min(tempo.trend_at_most, engines.start_up_s or tempo.start_up)
    coming = projected(state.history, load, now, tempo.trend_window, ahead_s)
    later = projected(state.history, load, now, tempo.trend_window, 2 * ahead_s)
    seen = (*state.history, Moment(now, load, 0, 0))
    moment = replace(seen[-1], surge=surge_seen(seen, now))
    bursts = level(seen, now) * surge_learned((*state.history, moment), now)
    pressing = max((one.engines for one in (*loads, *pressures)), default=0.0)
    up, down = whole(max(coming, pressing, bursts)), whole(bursts + MARGIN_DOWN)
    late = False
    quiet = state.raised_at is None or now - state.raised_at >= tempo.correction_pause + ahead_s
    if up <= state.desired and quiet and not engines.warming:
        corrections = of_part(policy, missed_targets(policy, signals, engines))
        loads += corrections
        corrected = whole(max((one.engines for one in corrections), default=0.0))
        late = corrected > state.desired
        up = max(up, corrected)
    return Asked(
        moment=replace(moment, up=up, down=max(down, state.desired) if late else down),
        needed=max(whole(pressing), whole(later)),
        strongest=max((*loads, *pressures), key=lambda one: one.engines, default=None),
        late=late,
    )


def whole(engines: float) -> int:
    """Return the engines that so much demand asks for."""
    return max(0, math.ceil(engines - MARGIN_UP))
