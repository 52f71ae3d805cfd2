"""The status of an InferenceService that runs as processes of one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import (
    ConditionType,
    InferenceServiceStatus,
    PairRole,
    RatioAdvice,
    Role,
    RoleScalingStatus,
    RoleStatus,
)
from pagefleet_protocol.model_facts import Progress

from pagefleet_operator.plan.autoscaling import (
    active_verdict,
    asleep_verdict,
    held_verdict,
    role_scaling,
    scaling_status,
)
from pagefleet_operator.plan.kv_link import KvEngineSeen, kv_link_verdict
from pagefleet_operator.plan.model_health import progress_text
from pagefleet_operator.plan.observed import ScalingSeen
from pagefleet_operator.plan.pair_ratio import PairLoad, ratio_advice
from pagefleet_operator.plan.pair_rollout import Pair
from pagefleet_operator.plan.pair_status import both_verdict, link_trouble, part_verdicts
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.roles import PAIR_ROLES, refuses_without_kv, role_view
from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.verdict import NO_PAIR, SCALED_TO_ZERO, SETTLED, Verdict, make_conditions
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
    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    """Engines of a disaggregated service."""
    role_scaling: Mapping[PairRole, ScalingSeen] = field(default_factory=dict)
    kv_engines: tuple[KvEngineSeen, ...] = ()
    """What those said of their K/V transfer."""
    pair_load: PairLoad | None = None
    """What routers measured of a disaggregated service."""

    @property
    def all_engines(self) -> tuple[Instance, ...]:
        """Engines of every kind."""
        return (*self.engines, *self.prefill, *self.decode)

    def of(self, role: Role) -> tuple[Instance, ...]:
        """Return the instances of one role."""
        found = {"prefill": self.prefill, "decode": self.decode, "router": self.routers}
        return found.get(role, self.engines)


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
    parts = tuple(_workload_verdict(one, seen.of(one.role), _gate(model, paused)) for one in plan.parts)
    counts = [_count(one, seen.of(one.role)) for one in plan.parts]
    whole = both_verdict(parts, counts) if parts else _workload_verdict(plan.engine, seen.engines, _gate(model, paused))
    router = _workload_verdict(plan.router, seen.routers, _gate(None, paused))
    asleep = asleep_verdict(role_view(service, "decode") if parts else service, plan.num_engines)
    engine = asleep or whole
    link = _link_verdict(service, seen) if parts else None
    progress = _progress(plan, seen, model, paused)
    verdicts: dict[ConditionType, Verdict] = {
        "Ready": _held(service, seen, asleep) or _ready(seen, model, engine, router),
        "ModelCached": model,
        "EngineReady": engine,
        **part_verdicts(parts, link, asleep),
        "RouterReady": router,
        "Progressing": progress,
        "Degraded": _degraded(plan, seen, (engine, *parts), router, progress, link),
    }
    if (active := active_verdict(service, seen.scaling, seen.role_scaling, _count_ready(seen.routers))) is not None:
        verdicts["ScalingActive"] = active
    exist = sum(one.state is not State.DRAINING for one in seen.all_engines)
    return InferenceServiceStatus(
        observed_generation=seen.generation,
        model_name=service.model_name,
        mode="Paused" if paused else "Disaggregated" if parts else "Aggregated",
        url=seen.url,
        ready=f"{_count_ready(seen.all_engines)}/{plan.num_engines}",
        replicas=exist,
        conditions=make_conditions(verdicts, service.status, seen.generation, now),
        roles=tuple(_role_status(one, seen.of(one.role)) for one in (*(plan.parts or (plan.engine,)), plan.router)),
        role_scaling=_role_scaling(service, seen, now) if parts else (),
        ratio=_ratio(service, plan, seen, now) if parts else None,
        scaling=scaling_status(service, service.status, seen.scaling, exist, now),
    )


def _link_verdict(service: InferenceService, seen: Observation) -> Verdict:
    ready = (_count_ready(seen.prefill), _count_ready(seen.decode))
    return kv_link_verdict(seen.kv_engines, ready, refuses=refuses_without_kv(service))


def _ratio(service: InferenceService, plan: Plan, seen: Observation, now: str) -> RatioAdvice | None:
    have = Pair(*(one.replicas for one in plan.parts))
    return ratio_advice(seen.pair_load, have, service.status.ratio if service.status else None, now)


def _held(service: InferenceService, seen: Observation, asleep: Verdict | None) -> Verdict | None:
    """Return Ready where routers hold requests until an engine comes, as after a scale to zero; None: they do not."""
    if not _count_ready(seen.routers) or _count_ready(seen.all_engines):
        return None
    fails = any(one.failing for one in seen.all_engines)
    return held_verdict(service.status, seen.url or "the routers", "" if fails else "an engine is starting", asleep)


def _ready(seen: Observation, model: Verdict, engine: Verdict, router: Verdict) -> Verdict:
    if _count_ready(seen.all_engines) and _count_ready(seen.routers):
        where = f" at {seen.url}" if seen.url else ""
        few = "" if engine.holds else f"; {engine.message.partition(';')[0]}"
        return Verdict(True, Reason.SERVING, f"requests are answered{where}{few}")
    if _count_ready(seen.all_engines):
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
        return NO_PAIR if workload.role in PAIR_ROLES else SCALED_TO_ZERO
    count = _count(workload, instances)
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
    if not model.holds and plan.num_engines:
        return Verdict(seen.model.failure is None, Reason.WAITING, "waits for the model; ModelCached says more")
    # What is left of engines of the other kind is on its way out.
    kinds = (*plan.parts, plan.engine, plan.router)
    found = [told for one in kinds if (told := _workload_progress(one, seen.of(one.role)))]
    stopped = next((one for one in found if one.reason == Reason.ROLLOUT_STOPPED), None)
    return stopped or (found[0] if found else SETTLED)


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
        return Verdict(True, Reason.STARTING, _count(workload, current))
    if _count_ready(current) < workload.replicas:
        return Verdict(
            False, Reason.WAITING, f"waits for {_plural(workload)} to recover; {workload.role.title()}Ready says why"
        )
    return None


def _degraded(
    plan: Plan,
    seen: Observation,
    engines: tuple[Verdict, ...],
    router: Verdict,
    progress: Verdict,
    link: Verdict | None,
) -> Verdict:
    """Say whether something is wrong although requests are answered, or were."""
    if progress.reason == Reason.ROLLOUT_STOPPED:
        return Verdict(True, Reason.ROLLOUT_STOPPED, progress.message)
    told = engines[1:] if plan.parts else engines
    for workload, verdict in (*zip(plan.parts or (plan.engine,), told, strict=True), (plan.router, router)):
        ready = _count_ready(seen.of(workload.role))
        alone = bool(plan.parts) and workload.role != "router" and _count_ready(seen.all_engines) > 0
        if ready < workload.replicas and (ready or alone):
            return Verdict(True, Reason.PARTLY_READY, verdict.message)
    return link_trouble(link) or Verdict(False, Reason.AS_WANTED, "nothing is wrong with what runs")


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


def _count(workload: Workload, instances: Sequence[Instance]) -> str:
    return f"{_count_ready(instances)} of {workload.replicas} {_plural(workload)} ready"


def _plural(workload: Workload) -> str:
    return f"{workload.role} engines" if workload.role in PAIR_ROLES else f"{workload.role}s"


def _role_scaling(service: InferenceService, seen: Observation, now: str) -> tuple[RoleScalingStatus, ...]:
    counts = {role: sum(one.state is not State.DRAINING for one in seen.of(role)) for role in PAIR_ROLES}
    return role_scaling(service, service.status, seen.role_scaling, counts, now)
