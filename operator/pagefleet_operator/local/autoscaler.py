"""Asks the routers of one service what they see, every second, and decides how many engines it should have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pagefleet_protocol.inference_service import Autoscaling
from pagefleet_protocol.inference_status import PairRole

from pagefleet_operator.autoscale.decide import decide
from pagefleet_operator.autoscale.decision import Decision, ScalingReason
from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.autoscale.policy import ScalingPolicy, scaling_policy
from pagefleet_operator.autoscale.signals import FleetWindow
from pagefleet_operator.autoscale.state import begin
from pagefleet_operator.local.router_pages import listen
from pagefleet_operator.local.settings import Timing
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
    """Keeps the last decision for one service; `run` until it is cancelled."""

    def __init__(
        self,
        desired: int,
        timing: Timing,
        look: Callable[[], Surroundings],
        tell: Callable[[str], None],
        part: PairRole | None = None,
    ) -> None:
        """Begin with the engines that are wanted now.

        Args:
            desired: so many.
            part: of a disaggregated service that it decides about.
            timing: how often, and how quickly.
            look: says what is so.
            tell: called after each decision that differs from the one before, with what is to be said of it.
        """
        self._timing = timing
        self._look = look
        self._tell = tell
        self._part = part
        self._window = FleetWindow()
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
        self._policy = replace(scaling_policy(autoscaling, self._part), tempo=self._timing.tempo)
        self._verb = "would scale" if autoscaling.mode == "Advisory" else "scaled"

    async def run(self) -> None:
        """Ask and decide for ever."""
        while True:
            await self.step()
            await asyncio.sleep(self._timing.scaling_period)

    async def step(self) -> None:
        """Ask and decide once."""
        before = self._look()
        if before.paused or self._policy is None:
            return
        running = {name: url for name, url in before.routers.items() if url is not None}
        now = await listen(self._window, running, self._timing.probe_timeout)
        here = self._look()
        signals = self._window.signals(here.routers.keys(), now)
        decision = decide(self._policy, signals, here.engines, self._state, now)
        desired, last = self._state.desired, self._decision
        self._decision, self._state = decision, decision.state
        if decision.desired != desired:
            self._tell(f"{self._verb} from {desired} to {decision.desired}: {decision.message} ({decision.reason})")
        elif last is None or last.reason != decision.reason:
            self._tell("")
