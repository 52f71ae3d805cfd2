"""A new revision that is tried out on this machine: its engines beside all of the old one's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from datetime import datetime

from pagefleet_protocol.endpoints import OnTrial
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import CanaryStatus, EngineRole

from pagefleet_operator.plan.canary import TrialFigures, TrialSeen, engines_on_trial, next_status
from pagefleet_operator.plan.pair_steps import Instances
from pagefleet_operator.plan.role_health import see_instances
from pagefleet_operator.plan.role_seen import see_trial
from pagefleet_operator.plan.rollout import Drain, Instance, Start, State, Step, next_steps
from pagefleet_operator.plan.workloads import Workload

FIRST_NUMBER = 1000
"""Of engines that are tried out: no service has so many others."""
Led = tuple[tuple[Workload, Sequence[Step]], ...]


class LocalTrial:
    """Remembers the engines that serve, which a new revision has to be no worse than."""

    def __init__(self) -> None:
        self.status: CanaryStatus | None = None
        self._stable: tuple[Workload, ...] = ()

    def share(self, revision: str) -> OnTrial | None:
        """Return what requests engines of a revision get, where it is tried out; None: it is not."""
        status = self.status
        if status is None or status.phase == "Promoted" or status.revision != revision:
            return None
        return OnTrial(revision, status.percent)

    def steps(
        self, service: InferenceService, wanted: tuple[Workload, ...], existing: Instances,
        heard: tuple[TrialFigures | None, datetime],
    ) -> Led | None:  # fmt: skip
        """Return what to do now, for both revisions; None: there is nothing to be tried out, or to be compared with.

        Args:
            wanted: engines for whole requests, or both parts.
            heard: what routers say, and when it is.
        """
        canary, stable, revision = service.spec.rollout.canary, self._stable, wanted[0].revision
        others = [one.role for one in stable] != [one.role for one in wanted]
        if canary is None or others or stable[0].revision == revision:
            done = self.status if canary and self.status and self.status.phase == "Promoted" else None
            self._serve(wanted, done if done and done.revision == revision else None)
            return None
        known = self.status if self.status and self.status.revision == revision else None
        replicas = sum(one.replicas for one in wanted)
        if known is None and not (replicas and all(_serves(one, existing) for one in stable)):
            self._serve(wanted, None)
            return None
        if replicas or known is None:
            roles = see_trial([see_instances(one, existing[_role(one)]) for one in wanted])
            seen = TrialSeen(revision, heard[1], roles.engines, heard[0], roles.trouble, roles.hopeless)
            known = next_status(canary, service.spec.rollout.progress_seconds, known, seen)
        self.status = known
        if known.phase == "Promoted":
            self._serve(wanted, known)
            return None
        led: list[tuple[Workload, Sequence[Step]]] = []
        for kept, new in zip(stable, wanted, strict=True):
            count = engines_on_trial(canary, known, new.replicas) if replicas else 0
            led += _both(replace(kept, replicas=new.replicas), new, existing[_role(new)], count)
        return tuple(led)

    def _serve(self, wanted: tuple[Workload, ...], status: CanaryStatus | None) -> None:
        """Have the wanted engines replace all others, as without a trial."""
        self.status, self._stable = status, wanted


def _serves(workload: Workload, existing: Instances) -> bool:
    return any(one.state is State.READY and one.revision == workload.revision for one in existing[_role(workload)])


def _role(workload: Workload) -> EngineRole:
    assert workload.role != "router", "engines are tried out"
    return workload.role


def _both(
    kept: Workload, new: Workload, engines: Sequence[Instance], count: int
) -> Iterator[tuple[Workload, Sequence[Step]]]:
    """Yield the steps of the old revision, and those to so many engines of the new one."""
    yield kept, next_steps(kept, [one for one in engines if one.revision != new.revision])
    tried = [one for one in engines if one.revision == new.revision]
    yield new, _beside(tried, count, {one.number for one in engines})


def _beside(engines: Sequence[Instance], count: int, taken: Set[int]) -> tuple[Step, ...]:
    """Return the steps to so many engines of a revision that is tried out; `taken`: numbers of all engines."""
    live = sorted((one for one in engines if one.state is not State.DRAINING), key=lambda one: one.number)
    free = (number for number in range(FIRST_NUMBER, FIRST_NUMBER + len(taken) + count) if number not in taken)
    starts = [Start(number) for number, _ in zip(free, range(count - len(live)), strict=False)]
    return (*(Drain(one.number) for one in live[count:]), *starts)
