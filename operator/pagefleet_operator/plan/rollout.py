"""The next steps from the instances that exist to those that are wanted: start, drain, scale, roll over.

One rule for all of it, applied until it returns nothing:
- there are `replicas + max_surge` slots; an instance holds its slot until it is gone, a new one takes the lowest free;
- an old instance that serves goes only while enough others are ready; one that never served goes at once; one that
  served and does not now may recover, so it stays until the new revision has proved itself;
- a new revision that fails takes no further slot, so the rollout stops there and the old one keeps serving.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pagefleet_operator.plan.workloads import Workload


class State(StrEnum):
    """Where an instance is in its life."""

    STARTING = "starting"
    """Runs, was never ready."""
    READY = "ready"
    """Answers requests."""
    NOT_READY = "not-ready"
    """Runs and was ready, and is not now."""
    FAILED = "failed"
    """Ended, or was ended, without being asked to; it is started again after a pause."""
    DRAINING = "draining"
    """Finishes what it has, then ends."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What is known of one instance."""

    number: int
    revision: str
    state: State
    served: bool = False
    """Was ready at least once."""
    restarts: int = 0
    """Times that it ended without being asked to."""
    detail: str = ""
    """Its last words, or what it does now."""

    @property
    def failing(self) -> bool:
        """Whether it ended at least once and is not ready again."""
        return self.state is State.FAILED or (self.restarts > 0 and self.state is State.STARTING)


@dataclass(frozen=True, slots=True)
class Start:
    """Start an instance of the wanted revision under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take this instance out of traffic, let it finish, end it."""

    number: int


Step = Start | Drain


def next_steps(workload: Workload, instances: Iterable[Instance]) -> tuple[Step, ...]:
    """Return what to do now; nothing when all is as wanted or something has to happen first."""
    existing = tuple(instances)
    live = [instance for instance in existing if instance.state is not State.DRAINING]
    current = [instance for instance in live if instance.revision == workload.revision]
    old = [instance for instance in live if instance.revision != workload.revision]
    slots = _free_slots(workload, existing)
    blocked = not slots and not current and len(live) == len(existing)
    drains = _surplus(workload, current) + _idle(workload, current, old, blocked) + _serving(workload, current, old)
    stopped = bool(old) and any(instance.failing for instance in current)
    starts = [] if stopped else slots[: max(0, workload.replicas - len(current))]
    return (*(Drain(instance.number) for instance in drains), *(Start(number) for number in starts))


def _free_slots(workload: Workload, existing: tuple[Instance, ...]) -> list[int]:
    taken = {instance.number for instance in existing}
    total = workload.replicas + workload.rollout.max_surge
    return [number for number in range(total) if number not in taken][: max(0, total - len(taken))]


def _surplus(workload: Workload, current: list[Instance]) -> list[Instance]:
    """Return those of the wanted revision that are too many: idle ones first, then the highest numbers."""
    if workload.rollout.keep_slots:
        return [instance for instance in current if instance.number >= workload.replicas]
    by_worth = sorted(current, key=lambda one: (one.state is not State.READY, one.failing, one.number))
    return by_worth[workload.replicas :]


def _idle(workload: Workload, current: list[Instance], old: list[Instance], blocked: bool) -> list[Instance]:
    """Return the old ones that do not serve and can go; `blocked`: the new revision has no slot to prove itself in."""
    idle = [instance for instance in old if instance.state is not State.READY]
    if workload.replicas == 0 or any(instance.state is State.READY for instance in current):
        return idle
    hopeless = [instance for instance in idle if not instance.served]
    return hopeless or (idle[:1] if blocked else [])


def _serving(workload: Workload, current: list[Instance], old: list[Instance]) -> list[Instance]:
    """Return the old ones that serve and can go without leaving too few."""
    serving = [instance for instance in old if instance.state is State.READY]
    ready = len(serving) + min(workload.replicas, sum(one.state is State.READY for one in current))
    spare = max(0, ready - (workload.replicas - workload.rollout.max_unavailable))
    return sorted(serving, key=lambda one: -one.number)[:spare]
