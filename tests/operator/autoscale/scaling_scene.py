"""A service whose decisions follow one another, on a clock of its own. No test in here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagefleet_operator.autoscale.decide import decide
from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.autoscale.policy import ScalingPolicy
from pagefleet_operator.autoscale.signals import FleetSignals
from pagefleet_operator.autoscale.state import Decision, ScalingState, begin

BUSY = FleetSignals(
    routers=1,
    fresh=1,
    age_s=0.0,
    arrivals=30.0,
    running=20.0,
    engines=2.0,
    prompt_tokens_per_s=0.0,
    prefill_rate=10_000.0,
)
SILENT = FleetSignals(routers=1)
QUIET = FleetSignals(routers=1, fresh=1, age_s=0.0, prefill_rate=10_000.0)


def arriving(engines: float, **more: Any) -> FleetSignals:
    """Return signals whose prompts ask for so many engines."""
    return replace(BUSY, prompt_tokens_per_s=engines * 0.95 * 10_000, **more)


class Scene:
    """Engines become ready `start_up_s` after they were wanted."""

    def __init__(self, engines: int = 2, start_up_s: float = 60.0, now: float = 0.0, **policy: Any) -> None:
        self.policy = ScalingPolicy(**{"max": 8, "ttft_s": 2.0, **policy})
        self.now, self.start_up_s = now, start_up_s
        self.state: ScalingState = begin(engines, now)
        self.ready_at = [now] * engines
        self.refused = 0
        self.line = [engines]

    @property
    def desired(self) -> int:
        return self.state.desired

    def decide(self, signals: FleetSignals, seconds: float = 2.0) -> Decision:
        """Let time pass, and decide once."""
        self.now += seconds
        ready = sum(at <= self.now for at in self.ready_at)
        engines = EnginesSeen(
            ready=ready, warming=len(self.ready_at) - ready, refused=self.refused, start_up_s=self.start_up_s
        )
        decision = decide(self.policy, signals, engines, self.state, self.now)
        self.state = decision.state
        if not self.refused:
            more = decision.desired - len(self.ready_at)
            self.ready_at += [self.now + self.start_up_s] * max(0, more)
            self.ready_at = sorted(self.ready_at)[: decision.desired]
        if decision.desired != self.line[-1]:
            self.line.append(decision.desired)
        return decision

    def last(self, signals: FleetSignals, seconds: float) -> Decision:
        """Go on with the same signals for so long."""
        decision = self.decide(signals)
        for _ in range(int(seconds / 2) - 1):
            decision = self.decide(signals)
        return decision
