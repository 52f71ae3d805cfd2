"""What a decision remembers. An operator that starts again begins with the engines that it finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pagefleet_operator.autoscale.decode_speed import DecodeSpeed


@dataclass(frozen=True, slots=True)
class Moment:
    """One decision's view of the demand."""

    at: float
    load: float | None
    """Engines that what arrives asked for, not rounded; None: routers were silent."""
    up: int
    """Engines to have at least, if it lasts."""
    down: int
    """Engines to keep, whatever came before."""
    surge: float = 1.0
    """How far the load a little before stood above the mean around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """Constant; each decision returns the next one. Times are monotonic seconds."""

    desired: int
    since: float
    """When scaling began here: nothing goes before a whole window was seen."""
    history: tuple[Moment, ...] = ()
    raised_at: float | None = None
    """When engines were last added."""
    lowered_at: float | None = None
    panicked_at: float | None = None
    """The last moment of panic."""
    idle_since: float | None = None
    ceiling: int | None = None
    """More engines could not be created."""
    ceiling_until: float = 0.0
    prefill_rate: float | None = None
    """The last one that routers had learned: with the last engine they may forget it."""
    speed: DecodeSpeed = field(default_factory=DecodeSpeed)


def begin(desired: int, now: float) -> ScalingState:
    """Return the state of a service that has `desired` engines, whoever decided that."""
    return ScalingState(desired=desired, since=now)


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
