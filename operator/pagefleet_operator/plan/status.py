"""The status of an InferenceService: what is so, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import Condition, ConditionType, InferenceServiceStatus, RoleStatus

from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.workloads import Plan, Workload


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of one InferenceService."""

    engines: tuple[Instance, ...]
    routers: tuple[Instance, ...]
    generation: int
    """Of the spec that the plan was made from."""
    url: str | None = None
    """Where its first router listens."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A condition before it has a time."""

    holds: bool
    reason: str
    message: str


def service_status(service: InferenceService, plan: Plan, seen: Observation, now: str) -> InferenceServiceStatus:
    """Return the new status; `service.status` is the previous one, whose transition times are kept.

    Args:
        service: what is wanted, and its last status.
        plan: what `service` needs.
        seen: what exists.
        now: RFC 3339, for conditions that change.
    """
    engine = _workload_verdict(plan.engine, seen.engines)
    router = _workload_verdict(plan.router, seen.routers)
    if engine.holds and router.holds:
        ready = _Verdict(
            True, "Serving", f"requests are answered at {seen.url}" if seen.url else "requests are answered"
        )
    else:
        ready = router if engine.holds else engine
    verdicts: dict[ConditionType, _Verdict] = {
        "Ready": ready,
        "EngineReady": engine,
        "RouterReady": router,
        "Progressing": _progress(plan, seen),
    }
    return InferenceServiceStatus(
        observed_generation=seen.generation,
        model_name=service.model_name,
        url=seen.url,
        ready=f"{_count_ready(seen.engines)}/{plan.engine.replicas}",
        conditions=tuple(_condition(service, kind, verdict, seen, now) for kind, verdict in verdicts.items()),
        roles=(_role_status(plan.engine, seen.engines), _role_status(plan.router, seen.routers)),
    )


def find_condition(status: InferenceServiceStatus | None, kind: ConditionType) -> Condition | None:
    """Return the condition of that type, if there is one."""
    return next((one for one in status.conditions if one.type == kind), None) if status else None


def _condition(
    service: InferenceService, kind: ConditionType, verdict: _Verdict, seen: Observation, now: str
) -> Condition:
    before = find_condition(service.status, kind)
    status: Literal["True", "False"] = "True" if verdict.holds else "False"
    return Condition(
        type=kind,
        status=status,
        reason=verdict.reason,
        message=verdict.message,
        last_transition_time=before.last_transition_time if before and before.status == status else now,
        observed_generation=seen.generation,
    )


def _workload_verdict(workload: Workload, instances: Sequence[Instance]) -> _Verdict:
    ready, wanted = _count_ready(instances), workload.replicas
    if wanted == 0:
        return _Verdict(False, "ScaledToZero", "spec.replicas is 0: set it to 1 or more to have requests answered")
    count = f"{ready} of {wanted} {_plural(workload)} ready"
    if ready >= wanted:
        return _Verdict(True, "AllReady", count)
    waiting = [one for one in instances if one.state not in (State.READY, State.DRAINING)]
    # What is broken says more than what is merely slow.
    waiting.sort(key=lambda one: (not one.failing, one.state is not State.NOT_READY))
    if not waiting:
        return _Verdict(False, "Starting", count)
    worst = waiting[0]
    name = f"{workload.name}-{worst.number}"
    if worst.failing:
        times = "" if worst.restarts <= 1 else f" ({worst.restarts} times)"
        return _Verdict(False, "Crashing", f"{count}; {name} stopped{times}: {worst.detail}")
    if worst.state is State.NOT_READY:
        return _Verdict(False, "NotReady", f"{count}; {name} runs but takes no traffic: {worst.detail}")
    return _Verdict(False, "Starting", f"{count}; {name}: {worst.detail}" if worst.detail else count)


def _progress(plan: Plan, seen: Observation) -> _Verdict:
    """Say what is still on its way to the wanted state; engines first, they take longer."""
    return (
        _workload_progress(plan.engine, seen.engines)
        or _workload_progress(plan.router, seen.routers)
        or _Verdict(False, "Settled", "everything runs as the spec says")
    )


def _workload_progress(workload: Workload, instances: Sequence[Instance]) -> _Verdict | None:
    current = [one for one in instances if one.revision == workload.revision and one.state is not State.DRAINING]
    old = [one for one in instances if one.revision != workload.revision and one.state is not State.DRAINING]
    failing = next((one for one in current if one.failing), None)
    if old and failing:
        return _Verdict(
            False,
            "RolloutStopped",
            f"{workload.name}-{failing.number} of the new revision stopped: {failing.detail}. "
            f"The old revision keeps serving: correct the spec, or undo the edit",
        )
    updated = f"{len(current)} of {workload.replicas} {_plural(workload)} run the new settings"
    if old:
        return _Verdict(True, "RollingOut", updated)
    if len(instances) != workload.replicas:
        return _Verdict(True, "Scaling", f"{len(instances)} {_plural(workload)} exist, {workload.replicas} are wanted")
    if any(one.state is State.STARTING and not one.failing for one in current):
        return _Verdict(True, "Starting", f"{_count_ready(current)} of {workload.replicas} {_plural(workload)} ready")
    if _count_ready(current) < workload.replicas:
        return _Verdict(
            False, "Waiting", f"waits for {_plural(workload)} to recover; {workload.role.title()}Ready says why"
        )
    return None


def _role_status(workload: Workload, instances: Sequence[Instance]) -> RoleStatus:
    return RoleStatus(
        name=workload.role,
        replicas=workload.replicas,
        ready=_count_ready(instances),
        updated=sum(one.revision == workload.revision and one.state is not State.DRAINING for one in instances),
        revision=workload.revision,
    )


def _count_ready(instances: Sequence[Instance]) -> int:
    return sum(one.state is State.READY for one in instances)


def _plural(workload: Workload) -> str:
    return f"{workload.role}s"
