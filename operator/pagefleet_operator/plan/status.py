"""The status of an InferenceService that runs as processes of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import ConditionType, InferenceServiceStatus, RoleStatus
from pagefleet_protocol.model_facts import Progress

from pagefleet_operator.plan.autoscaling import asleep_verdict, held_verdict, scaling_status, scaling_verdict
from pagefleet_operator.plan.model_health import progress_text
from pagefleet_operator.plan.observed import ScalingSeen
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.verdict import SCALED_TO_ZERO, SETTLED, Verdict, make_conditions
from pagefleet_operator.plan.workloads import Plan, Workload


@dataclass(frozen=True, slots=True)
class ModelSeen:
    """How far a model is on its way to this machine."""

    folder: str = ""
    """Where it is downloaded to; empty: it is here anyway."""
    complete: bool = True
    progress: Progress | None = None
    """Of the download that runs."""
    failure: Verdict | None = None
    """Why there is no download now, where one is needed."""

    @property
    def told(self) -> str:
        """How far the download is, as a sentence."""
        return f"this machine {progress_text(self.progress)}"


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of one InferenceService."""

    engines: tuple[Instance, ...]
    routers: tuple[Instance, ...]
    generation: int
    """Of the spec that the plan was made from."""
    model: ModelSeen = ModelSeen()
    url: str | None = None
    """Where its first router listens."""
    scaling: ScalingSeen | None = None
    """The autoscaler's decision, where there is one."""


def service_status(service: InferenceService, plan: Plan, seen: Observation, now: str) -> InferenceServiceStatus:
    """Return the new status; `service.status` is the previous one, whose transition times are kept.

    Args:
        service: what is wanted, and its last status.
        plan: what `service` needs.
        seen: what exists.
        now: RFC 3339, for conditions that change.
    """
    paused = service.spec.paused
    model = _model_verdict(seen.model)
    engine = _workload_verdict(plan.engine, seen.engines, _gate(model, paused))
    router = _workload_verdict(plan.router, seen.routers, _gate(None, paused))
    asleep = asleep_verdict(service, plan.engine.replicas)
    engine = asleep or engine
    progress = _progress(plan, seen, model, paused)
    verdicts: dict[ConditionType, Verdict] = {
        "Ready": _held(service, seen, asleep) or _ready(seen, model, engine, router),
        "ModelCached": model,
        "EngineReady": engine,
        "RouterReady": router,
        "Progressing": progress,
        "Degraded": _degraded(plan, seen, engine, router, progress),
    }
    if service.spec.autoscaling is not None:
        verdicts["ScalingActive"] = scaling_verdict(service, seen.scaling, _count_ready(seen.routers))
    exist = sum(one.state is not State.DRAINING for one in seen.engines)
    return InferenceServiceStatus(
        observed_generation=seen.generation,
        model_name=service.model_name,
        mode="Paused" if paused else "Aggregated",
        url=seen.url,
        ready=f"{_count_ready(seen.engines)}/{plan.engine.replicas}",
        replicas=exist,
        conditions=make_conditions(verdicts, service.status, seen.generation, now),
        roles=(_role_status(plan.engine, seen.engines), _role_status(plan.router, seen.routers)),
        scaling=scaling_status(service, service.status, seen.scaling, exist, now),
    )


def _held(service: InferenceService, seen: Observation, asleep: Verdict | None) -> Verdict | None:
    """Return Ready where routers hold requests until an engine comes, as after a scale to zero; None: they do not."""
    if not _count_ready(seen.routers) or _count_ready(seen.engines):
        return None
    fails = any(one.failing for one in seen.engines)
    return held_verdict(service.status, seen.url or "the routers", "" if fails else "an engine is starting", asleep)


def _ready(seen: Observation, model: Verdict, engine: Verdict, router: Verdict) -> Verdict:
    if _count_ready(seen.engines) and _count_ready(seen.routers):
        where = f" at {seen.url}" if seen.url else ""
        few = "" if engine.holds else f"; {engine.message.partition(';')[0]}"
        return Verdict(True, Reason.SERVING, f"requests are answered{where}{few}")
    if _count_ready(seen.engines):
        return router
    return model if not model.holds and engine.reason == Reason.WAITING_FOR_MODEL else engine


def _gate(model: Verdict | None, paused: bool) -> Verdict | None:
    """Return why nothing of a role was started on purpose, if so."""
    if paused:
        return Verdict(False, Reason.PAUSED, "spec.paused is true: set it to false to have it started")
    if model is not None and not model.holds:
        return Verdict(False, Reason.WAITING_FOR_MODEL, "engines start once the model is here; ModelCached says more")
    return None


def _model_verdict(seen: ModelSeen) -> Verdict:
    if seen.failure is not None:
        return seen.failure
    if not seen.complete:
        return Verdict(False, Reason.DOWNLOADING, seen.told)
    if seen.folder:
        return Verdict(True, Reason.CACHED, f"the model is in {seen.folder}")
    return Verdict(True, Reason.NOT_NEEDED, "the model is on this machine")


def _workload_verdict(workload: Workload, instances: Sequence[Instance], gate: Verdict | None) -> Verdict:
    ready, wanted = _count_ready(instances), workload.replicas
    if wanted == 0:
        return SCALED_TO_ZERO
    count = f"{ready} of {wanted} {_plural(workload)} ready"
    if ready >= wanted:
        return Verdict(True, Reason.ALL_READY, count)
    if gate is not None and not instances:
        return gate
    return _waiting_verdict(workload, instances, count)


def _waiting_verdict(workload: Workload, instances: Sequence[Instance], count: str) -> Verdict:
    waiting = [one for one in instances if one.state not in (State.READY, State.DRAINING)]
    # What is broken says more than what is merely slow.
    waiting.sort(key=lambda one: (not one.failing, one.state is not State.NOT_READY))
    if not waiting:
        return Verdict(False, Reason.STARTING, count)
    worst = waiting[0]
    name = f"{workload.name}-{worst.number}"
    if worst.failing:
        times = "" if worst.restarts <= 1 else f" ({worst.restarts} times)"
        return Verdict(False, Reason.CRASH_LOOP, f"{count}; {name} stopped{times}: {worst.detail}")
    if worst.state is State.NOT_READY:
        return Verdict(False, Reason.NOT_READY, f"{count}; {name} runs but takes no traffic: {worst.detail}")
    return Verdict(False, Reason.STARTING, f"{count}; {name}: {worst.detail}" if worst.detail else count)


def _progress(plan: Plan, seen: Observation, model: Verdict, paused: bool) -> Verdict:
    """Say what is still on its way to the wanted state; engines first, they take longer."""
    if paused:
        return Verdict(False, Reason.PAUSED, "spec.paused is true: nothing is changed until it is false")
    if not model.holds and plan.engine.replicas:
        return Verdict(seen.model.failure is None, Reason.WAITING, "waits for the model; ModelCached says more")
    return _workload_progress(plan.engine, seen.engines) or _workload_progress(plan.router, seen.routers) or SETTLED


def _workload_progress(workload: Workload, instances: Sequence[Instance]) -> Verdict | None:
    current = [one for one in instances if one.revision == workload.revision and one.state is not State.DRAINING]
    old = [one for one in instances if one.revision != workload.revision and one.state is not State.DRAINING]
    failing = next((one for one in current if one.failing), None)
    if old and failing:
        return Verdict(
            False,
            Reason.ROLLOUT_STOPPED,
            f"{workload.name}-{failing.number} of the new revision stopped: {failing.detail}. "
            f"The old revision keeps serving: correct the spec, or undo the edit",
        )
    updated = f"{len(current)} of {workload.replicas} {_plural(workload)} run the new settings"
    if old:
        return Verdict(True, Reason.ROLLING_OUT, updated)
    if len(instances) != workload.replicas:
        return Verdict(
            True, Reason.SCALING, f"{len(instances)} {_plural(workload)} exist, {workload.replicas} are wanted"
        )
    if any(one.state is State.STARTING and not one.failing for one in current):
        return Verdict(
            True, Reason.STARTING, f"{_count_ready(current)} of {workload.replicas} {_plural(workload)} ready"
        )
    if _count_ready(current) < workload.replicas:
        return Verdict(
            False, Reason.WAITING, f"waits for {_plural(workload)} to recover; {workload.role.title()}Ready says why"
        )
    return None


def _degraded(plan: Plan, seen: Observation, engine: Verdict, router: Verdict, progress: Verdict) -> Verdict:
    """Say whether something is wrong although requests are answered, or were."""
    if progress.reason == Reason.ROLLOUT_STOPPED:
        return Verdict(True, Reason.ROLLOUT_STOPPED, progress.message)
    for workload, instances, verdict in ((plan.engine, seen.engines, engine), (plan.router, seen.routers, router)):
        if 0 < _count_ready(instances) < workload.replicas:
            return Verdict(True, Reason.PARTLY_READY, verdict.message)
    return Verdict(False, Reason.AS_WANTED, "nothing is wrong with what runs")


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
