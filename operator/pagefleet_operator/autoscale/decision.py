"""What a decision says: how many engines, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pagefleet_operator.autoscale.state import ScalingState


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
