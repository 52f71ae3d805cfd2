"""Decides how many engines of one kind a service on this machine should have, by what its routers see."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pagefleet_protocol.inference_service import Autoscaling
from pagefleet_protocol.inference_status import PairRole

from pagefleet_operator.autoscale.decide import decide
from pagefleet_operator.autoscale.decision import Decision, ScalingReason
from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.autoscale.policy import ScalingPolicy, Tempo, scaling_policy
from pagefleet_operator.autoscale.signals import FleetSignals
from pagefleet_operator.autoscale.state import begin
from pagefleet_operator.plan.observed import ScalingSeen


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a decision depends on, apart from what routers say."""

    engines: EnginesSeen = field(default_factory=EnginesSeen)
    routers: Mapping[str, str | None] = field(default_factory=dict)
    """URL of each router that is to run; None while its process does not."""
    paused: bool = False
    """Nothing is decided."""


def scales_itself(autoscaling: Autoscaling | None) -> bool:
    """Return whether there is something to decide here."""
    return autoscaling is not None and autoscaling.mode != "External"


class Autoscaler:
    """Keeps the last decision about engines of one kind."""

    def __init__(self, desired: int, tempo: Tempo, tell: Callable[[str], None], part: PairRole | None = None) -> None:
        """Begin with the engines that are wanted now.

        Args:
            desired: so many.
            tempo: how quickly it follows what it sees.
            tell: called after each decision that differs from the one before, with what is to be said of it.
            part: of a disaggregated service that it decides about.
        """
        self._tempo = tempo
        self._tell = tell
        self._part = part
        self._state = begin(desired, time.monotonic())
        self._policy: ScalingPolicy | None = None
        self._verb = "scaled"
        self._decision: Decision | None = None

    @property
    def desired(self) -> int:
        """Engines that are wanted: those that it began with until the first decision."""
        return self._state.desired

    @property
    def seen(self) -> ScalingSeen | None:
        """The last decision; None: there is none yet."""
        if self._decision is None:
            return None
        message, reason = self._decision.message, self._decision.reason
        if reason is ScalingReason.AT_QUOTA:
            message += "; no GPU of this machine is free for more"
        return ScalingSeen(self._decision.desired, str(reason), message)

    def follow(self, autoscaling: Autoscaling) -> None:
        """Decide by these settings from now on."""
        self._policy = replace(scaling_policy(autoscaling, self._part), tempo=self._tempo)
        self._verb = "would scale" if autoscaling.mode == "Advisory" else "scaled"

    def decide(self, here: Surroundings, signals: FleetSignals, now: float) -> None:
        """Decide once.

        Args:
            here: what is so.
            signals: what the routers say.
            now: monotonic seconds.
        """
        if here.paused or self._policy is None:
            return
        decision = decide(self._policy, signals, here.engines, self._state, now)
        desired, last = self._state.desired, self._decision
        self._decision, self._state = decision, decision.state
        if decision.desired != desired:
            self._tell(f"{self._verb} from {desired} to {decision.desired}: {decision.message} ({decision.reason})")
        elif last is None or last.reason != decision.reason:
            self._tell("")
