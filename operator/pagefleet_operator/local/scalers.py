"""The autoscalers of one service on this machine: one for its engines, or one for each part that scales by itself.

They go by the same routers, each of which is asked once, every second, for all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pagefleet_protocol.inference_service import Autoscaling, InferenceService
from pagefleet_protocol.inference_status import EngineRole, PairRole

from pagefleet_operator.autoscale.decide import decide
from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.autoscale.policy import ScalingPolicy, Tempo, scaling_policy
from pagefleet_operator.autoscale.signals import FleetSignals, FleetWindow
from pagefleet_operator.autoscale.state import Decision, ScalingReason, begin
from pagefleet_operator.local.probe import listen
from pagefleet_operator.local.settings import Timing
from pagefleet_operator.plan.autoscaling import wanted_engines
from pagefleet_operator.plan.observed import ScalingSeen
from pagefleet_operator.plan.roles import PAIR_ROLES, is_disaggregated, role_view


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


class Scalers:
    """Has decisions made while somebody here has to make them."""

    def __init__(
        self,
        timing: Timing,
        tasks: asyncio.TaskGroup,
        look: Callable[[EngineRole], Surroundings],
        tell: Callable[[str], None],
    ) -> None:
        """Begin without any; `look` says what is so for engines of a kind, `tell` takes what is to be said."""
        self._timing = timing
        self._tasks = tasks
        self._look = look
        self._tell = tell
        self._window = FleetWindow()
        self._scalers: dict[EngineRole, Autoscaler] = {}
        self._asking: asyncio.Task[None] | None = None

    def follow(self, service: InferenceService | None, count: Callable[[EngineRole], int]) -> None:
        """Decide by this spec from now on; None: not at all. `count` says how many engines of a kind there are."""
        views = engine_views(service) if service is not None else {}
        wanted = {role: view for role, view in views.items() if scales_itself(view.spec.autoscaling)}
        for role in self._scalers.keys() - wanted.keys():
            del self._scalers[role]
        for role, view in wanted.items():
            if role not in self._scalers:
                self._scalers[role] = self._begin(role, view, count(role))
            assert view.spec.autoscaling is not None, "it scales itself"
            self._scalers[role].follow(view.spec.autoscaling)
        if wanted and self._asking is None:
            self._asking = self._tasks.create_task(self._ask())
        elif not wanted and self._asking is not None:
            self._asking.cancel()
            self._asking, self._window = None, FleetWindow()

    def desired(self, role: EngineRole) -> ScalingSeen | None:
        """Return how many engines of a kind are wanted, from the start on; None: nobody decides that here."""
        scaler = self._scalers.get(role)
        return ScalingSeen(scaler.desired, "", "") if scaler else None

    def seen(self, role: EngineRole) -> ScalingSeen | None:
        """Return the last decision about engines of a kind; None: there is none."""
        scaler = self._scalers.get(role)
        return scaler.seen if scaler else None

    async def step(self) -> None:
        """Ask each router once, and decide about engines of every kind."""
        around = [self._look(role) for role in self._scalers]
        running = {name: url for one in around if not one.paused for name, url in one.routers.items() if url}
        now, _ = await listen(self._window, running, self._timing.probe_timeout)
        for role, scaler in self._scalers.items():
            here = self._look(role)
            scaler.decide(here, self._window.signals(here.routers.keys(), now), now)

    async def _ask(self) -> None:
        while True:
            await self.step()
            await asyncio.sleep(self._timing.scaling_period)

    def _begin(self, role: EngineRole, view: InferenceService, count: int) -> Autoscaler:
        part = "" if role == "engine" else f"{role}: "
        return Autoscaler(
            wanted_engines(view, view.status, None, count),
            self._timing.tempo,
            lambda text: self._tell(f"{part}{text}" if text else ""),
            None if role == "engine" else role,
        )


def engine_views(service: InferenceService) -> dict[EngineRole, InferenceService]:
    """Return the service as each kind of its engines sees it."""
    if is_disaggregated(service):
        return {role: role_view(service, role) for role in PAIR_ROLES}
    return {"engine": service}
