"""The autoscalers of one service on this machine: one for its engines, or one for each part that scales by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import EngineRole

from pagefleet_operator.local.autoscaler import Autoscaler, Surroundings, scales_itself
from pagefleet_operator.local.settings import Timing
from pagefleet_operator.plan.autoscaling import wanted_engines
from pagefleet_operator.plan.observed import ScalingSeen
from pagefleet_operator.plan.roles import PAIR_ROLES, is_disaggregated, role_view


@dataclass(frozen=True, slots=True)
class _Running:
    scaler: Autoscaler
    task: asyncio.Task[None]


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
        self._running: dict[EngineRole, _Running] = {}

    def follow(self, service: InferenceService | None, count: Callable[[EngineRole], int]) -> None:
        """Decide by this spec from now on; None: not at all. `count` says how many engines of a kind there are."""
        views = engine_views(service) if service is not None else {}
        wanted = {role: view for role, view in views.items() if scales_itself(view.spec.autoscaling)}
        for role in self._running.keys() - wanted.keys():
            self._running.pop(role).task.cancel()
        for role, view in wanted.items():
            if role not in self._running:
                self._running[role] = self._begin(role, view, count(role))
            assert view.spec.autoscaling is not None, "it scales itself"
            self._running[role].scaler.follow(view.spec.autoscaling)

    def desired(self, role: EngineRole) -> ScalingSeen | None:
        """Return how many engines of a kind are wanted, from the start on; None: nobody decides that here."""
        running = self._running.get(role)
        return ScalingSeen(running.scaler.desired, "", "") if running else None

    def seen(self, role: EngineRole) -> ScalingSeen | None:
        """Return the last decision about engines of a kind; None: there is none."""
        running = self._running.get(role)
        return running.scaler.seen if running else None

    def _begin(self, role: EngineRole, view: InferenceService, count: int) -> _Running:
        part = "" if role == "engine" else f"{role}: "
        scaler = Autoscaler(
            wanted_engines(view, view.status, None, count),
            self._timing,
            lambda: self._look(role),
            lambda text: self._tell(f"{part}{text}" if text else ""),
            None if role == "engine" else role,
        )
        return _Running(scaler, self._tasks.create_task(scaler.run()))


def engine_views(service: InferenceService) -> dict[EngineRole, InferenceService]:
    """Return the service as each kind of its engines sees it."""
    if is_disaggregated(service):
        return {role: role_view(service, role) for role in PAIR_ROLES}
    return {"engine": service}
