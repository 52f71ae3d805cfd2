"""The plan of one InferenceService in a cluster: which objects are wanted, which have to go, and what the status says.

A refusal takes nothing down: what serves keeps serving, and the status says what has to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import CanaryStatus, InferenceServiceStatus
from pagefleet_protocol.kube_names import GROUP
from pagefleet_protocol.model_facts import DownloadResultError, ModelFacts, decode_result

from pagefleet_operator.plan.engine_sets import groups_seen
from pagefleet_operator.plan.gpu_fit import Fit
from pagefleet_operator.plan.model_health import JobSeen, facts_from_pods, model_verdict, see_job
from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import ChildKey, Observed
from pagefleet_operator.plan.obstacles import apply_refused, key_of, kind_missing, name_taken, taken_names
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.resolve import Resolved, resolve
from pagefleet_operator.plan.role_health import see_role
from pagefleet_operator.plan.role_seen import RoleSeen, revision_fails
from pagefleet_operator.plan.status import Situation, engine_selector, refused, service_status
from pagefleet_operator.plan.verdict import Refusal, Verdict, find_condition
from pagefleet_operator.render.canary import Trial, plan_pair_trial, plan_trial
from pagefleet_operator.render.children import ChildContext, wanted_children
from pagefleet_operator.render.engine_groups import EngineGroups, check_groups, count_engines, plan_groups
from pagefleet_operator.render.engine_pairs import pair_revision
from pagefleet_operator.render.fleet_key import needs_fleet_key
from pagefleet_operator.render.model_job import model_job, needs_job
from pagefleet_operator.render.pod_policy import check_allowed
from pagefleet_operator.render.revision import revision_of
from pagefleet_operator.render.settings import ClusterSettings

ANNOTATION_FACTS = f"{GROUP}/facts"
"""On the model job: what its pod said when it had ended. Pods go, the job stays."""
RETRY_JOB = timedelta(minutes=10)
"""A failed job is made anew after this: its Secret, its store or its quota may be right by now."""
LOST_FACTS = timedelta(minutes=2)
"""A job that succeeded and of which nothing is known after this is made anew."""
_SOON_S, _PROGRESS_S, _TRIAL_S = 30.0, 10.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """What is to be so."""

    objects: tuple[dict[str, Any], ...]
    """Children as they are wanted, in the order in which they are needed; none where nothing may be touched."""
    delete: tuple[ChildKey, ...]
    """Children that are ours and not wanted."""
    status: InferenceServiceStatus
    needs_fleet_key: bool = False
    """Whether the Secret with the fleet key may be missing; it comes before all objects."""
    look_again_s: float | None
    """When something will be different though nothing is seen to happen; None: never."""


@dataclass(frozen=True, slots=True)
class _Model:
    """What is known of the wanted model."""

    job: JobSeen | None
    resolved: Resolved
    """With the model's facts, where they are known."""
    groups: EngineGroups

    @property
    def ready(self) -> bool:
        """Whether engines would find it."""
        return self.job is None or self.resolved.facts is not None


def plan_service(
    service: InferenceService,
    previous: InferenceServiceStatus | None,
    observed: Observed,
    settings: ClusterSettings,
) -> ServicePlan:
    """Return the plan. The same arguments give the same plan.

    Args:
        previous: its last status; transition times and live numbers are kept from it.
    """
    model = _resolve(service, previous, observed, settings)
    if isinstance(model, Refusal):
        return _untouched(service, previous, observed, settings, model)
    if service.spec.paused:
        return _untouched(service, previous, observed, settings, model)
    return _carried_out(service, previous, observed, settings, model)


def _resolve(
    service: InferenceService, previous: InferenceServiceStatus | None, observed: Observed, settings: ClusterSettings
) -> _Model | Refusal:
    if refusal := _unusable_profile(service, observed):
        return refusal
    resolved = resolve(service, observed.profiles, None, settings.engine_image)
    if isinstance(resolved, Refusal):
        return resolved
    job = see_job(model_job(service, resolved, settings), resolved, observed) if needs_job(resolved) else None
    facts = _facts(job) if job else None
    known = resolve(service, observed.profiles, facts, settings.engine_image) if facts else resolved
    assert not isinstance(known, Refusal), "facts of a model refuse nothing"
    if refusal := check_allowed(service, known, settings):
        return refusal
    if refusal := check_groups(service, known):
        return refusal
    groups = plan_groups(service, previous, observed, known, settings)
    return groups if isinstance(groups, Refusal) else _Model(job, known, groups)


def _unusable_profile(service: InferenceService, observed: Observed) -> Refusal | None:
    """Refuse what a profile that cannot be read may be meant for: without its defaults engines would go elsewhere."""
    ref, wanted = service.spec.profile_ref, service.spec.resources.gpu_type
    if ref is not None:
        path, suspects = "spec.profileRef.name", [ref.name] if ref.name in observed.invalid_profiles else []
    elif wanted and all(profile.spec.gpu_type != wanted for profile in observed.profiles.values()):
        path, suspects = "spec.resources.gpuType", sorted(observed.invalid_profiles)
    else:
        return None
    if not suspects:
        return None
    message = f"InferenceProfile {suspects[0]} cannot be used: {observed.invalid_profiles[suspects[0]]}"
    return Refusal(path, Reason.PROFILE_INVALID, message)


def _facts(job: JobSeen) -> ModelFacts | None:
    """Return what the job of the wanted model found out; jobs of the model before may be about as well."""
    kept = (job.body or {}).get("metadata", {}).get("annotations") or {}
    try:
        facts = decode_result(str(kept[ANNOTATION_FACTS])).facts if ANNOTATION_FACTS in kept else None
    except DownloadResultError:
        facts = None
    return facts or facts_from_pods(job)


def _untouched(
    service: InferenceService,
    previous: InferenceServiceStatus | None,
    observed: Observed,
    settings: ClusterSettings,
    outcome: _Model | Refusal,
) -> ServicePlan:
    """Plan nothing, and tell what is: the spec is refused, or paused."""
    key = (service.metadata.namespace, service.name)
    if isinstance(outcome, Refusal):
        groups = EngineGroups(counts=count_engines(service, previous, observed), fit=Fit())
    else:
        groups = outcome.groups
    engines, parts = groups.see(service, observed, "")
    resolved = None if isinstance(outcome, Refusal) else outcome.resolved
    model = (
        None
        if isinstance(outcome, Refusal)
        else model_verdict(outcome.resolved, outcome.job, engines, observed, service.metadata.namespace)
    )
    status = service_status(
        Situation(
            service=service,
            previous=previous,
            observed=observed,
            url=_url(service, settings),
            selector=engine_selector(service.name),
            model=model,
            engines=engines,
            routers=see_role("router", key, service.spec.router.replicas, "", observed),
            parts=parts,
            resolved=resolved,
            fit=groups.fit,
            canary=previous.canary if previous else None,
            nothing=_nothing(outcome),
            degraded=refused(outcome) if isinstance(outcome, Refusal) else None,
        )
    )
    return ServicePlan(objects=(), delete=(), status=status, look_again_s=None)


def _carried_out(
    service: InferenceService,
    previous: InferenceServiceStatus | None,
    observed: Observed,
    settings: ClusterSettings,
    model: _Model,
) -> ServicePlan:
    groups, fit = model.groups, model.groups.fit
    both = _both_parts(service, observed, model)
    trial, canary = _tried_out(service, previous, observed, settings, model)
    context = ChildContext(
        trial=trial,
        children=observed.children,
        optional_kinds=observed.optional_kinds,
        model_ready=model.ready,
        engines=groups.whole,
        parts=groups.parts,
        fails=both is not None and any(map(revision_fails, both[1])),
        groups=groups_seen(observed.pods),
        engine_allowed=fit.refusal is None,
    )
    children = wanted_children(service, model.resolved, settings, context)
    taken = taken_names(children, observed)
    revisions = revision_of(children)
    revision = trial.status.revision if trial else revisions.get("engine", "")
    engines, parts = both or groups.see(service, observed, revision)
    key, namespace = (service.metadata.namespace, service.name), service.metadata.namespace
    routers = see_role("router", key, service.spec.router.replicas, revisions.get("router", ""), observed)
    cached = model_verdict(model.resolved, model.job, engines, observed, namespace)
    situation = Situation(
        service=service,
        previous=previous,
        observed=observed,
        url=_url(service, settings),
        selector=engine_selector(service.name),
        model=cached,
        engines=engines,
        routers=routers,
        parts=parts,
        resolved=model.resolved,
        fit=fit,
        gate=_gate(model, fit),
        canary=canary,
        degraded=(refused(fit.refusal) if fit.refusal else None)
        or name_taken(taken, service, observed)
        or apply_refused(observed.failures, namespace)
        or kind_missing(service, observed),
    )
    status = service_status(situation)
    again = _job_to_make_anew(model, observed.now)
    settled = _has_reason(status, Reason.SETTLED)
    left = {*taken, *((again,) if again else ())}
    unwanted = _unwanted(children, observed, settled)
    return ServicePlan(
        objects=tuple(one for one in children if key_of(one) not in left),
        delete=(*((again,) if again else ()), *unwanted),
        status=status,
        needs_fleet_key=needs_fleet_key(service, children, observed),
        look_again_s=_look_again(model, status, observed.now, settled and not situation.degraded),
    )


def _tried_out(
    service: InferenceService,
    previous: InferenceServiceStatus | None,
    observed: Observed,
    settings: ClusterSettings,
    model: _Model,
) -> tuple[Trial | None, CanaryStatus | None]:
    """Return the trial of a new revision, and how it is; what is blocked stays as it was."""
    groups = model.groups
    if not model.ready or groups.fit.refusal:
        return None, previous.canary if previous else None
    trial = (
        plan_pair_trial(service, model.resolved, observed, previous, groups.parts)
        if groups.parts
        else plan_trial(service, model.resolved, settings, observed, (previous, groups.whole))
    )
    return trial, trial.status if trial else None


def _both_parts(
    service: InferenceService, observed: Observed, model: _Model
) -> tuple[RoleSeen, tuple[RoleSeen, ...]] | None:
    """Return the engines of a disaggregated service as they were seen, together and by part; None: it is none."""
    groups = model.groups
    if not groups.parts:
        return None
    blocked = not model.ready or groups.fit.refusal is not None  # those that exist stay as they are
    return groups.see(service, observed, "" if blocked else pair_revision(groups.parts))


def _url(service: InferenceService, settings: ClusterSettings) -> str:
    return f"http://{names_of(service).service}.{service.metadata.namespace}.svc.{settings.cluster_domain}"


def _nothing(outcome: _Model | Refusal) -> Verdict:
    """Say why nothing is made."""
    if isinstance(outcome, Refusal):
        return Verdict(False, outcome.reason, "none are made while the spec is refused; Degraded says why")
    return Verdict(False, Reason.PAUSED, "none are made while spec.paused is true")


def _gate(model: _Model, fit: Fit) -> Verdict | None:
    """Say why the wanted engines are not made."""
    if fit.refusal:
        return Verdict(False, fit.refusal.reason, str(fit.refusal))
    if model.ready:
        return None
    return Verdict(False, Reason.WAITING_FOR_MODEL, "engines wait for the model; ModelCached says more")


def _unwanted(children: Sequence[Mapping[str, Any]], observed: Observed, settled: bool) -> tuple[ChildKey, ...]:
    """Return what is ours and has no place in the plan. A claim goes last: engines of the old revision may use it."""
    wanted = {key_of(one) for one in children}
    return tuple(
        key
        for key, child in observed.children.items()
        if child.ours
        and key not in wanted
        and not child.body.get("metadata", {}).get("deletionTimestamp")
        and (settled or key[0] != "PersistentVolumeClaim")
    )


def _job_to_make_anew(model: _Model, now: datetime) -> ChildKey | None:
    left = _until_made_anew(model, now)
    return ("Job", model.job.name) if model.job and left is not None and left <= 0 else None


def _until_made_anew(model: _Model, now: datetime) -> float | None:
    """Return the seconds until the job is deleted, to be made again; None where it is well, or is at work."""
    job = model.job
    if job is None or job.body is None or model.resolved.facts is not None:
        return None
    ended = job.failed or job.complete
    if not ended:
        return None
    at = _moment(ended.get("lastTransitionTime"))
    if at is None:
        return None
    pause = RETRY_JOB if job.failed else LOST_FACTS
    return (at + pause - now.astimezone(UTC)).total_seconds()


def _moment(text: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _look_again(model: _Model, status: InferenceServiceStatus, now: datetime, settled: bool) -> float | None:
    left = _until_made_anew(model, now)
    if left is not None:
        return max(1.0, min(left, _SOON_S))
    if model.job is not None and model.resolved.facts is None:
        return _PROGRESS_S
    if status.canary and status.canary.phase in ("Starting", "Analysing"):
        return _TRIAL_S
    return None if settled and not model.groups.parts else _SOON_S


def _has_reason(status: InferenceServiceStatus, reason: Reason) -> bool:
    progressing = find_condition(status, "Progressing")
    return progressing is not None and progressing.reason == reason
