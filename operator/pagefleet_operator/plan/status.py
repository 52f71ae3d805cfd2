"""The status of an InferenceService, in a cluster and on one machine, from what was wanted and what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import (
    CanaryStatus,
    ConditionType,
    InferenceServiceStatus,
    LiveStatus,
    PairRole,
    RatioAdvice,
    ResolvedStatus,
    RoleScalingStatus,
)
from pagefleet_protocol.kube_names import LABEL_COMPONENT, LABEL_SERVICE

from pagefleet_operator.plan.autoscaling import (
    active_verdict,
    asleep_verdict,
    held_verdict,
    role_scaling,
    scaling_status,
)
from pagefleet_operator.plan.gpu_fit import Fit, computed_dtype
from pagefleet_operator.plan.kv_link import kv_link_verdict
from pagefleet_operator.plan.observed import LiveSample, Observed
from pagefleet_operator.plan.pair_ratio import ratio_advice
from pagefleet_operator.plan.pair_rollout import Pair
from pagefleet_operator.plan.pod_reasons import worst
from pagefleet_operator.plan.ranks import Ranks, find_ranks
from pagefleet_operator.plan.reasons import NORMAL, Reason
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.role_health import see_role
from pagefleet_operator.plan.role_seen import RoleSeen, both_parts, role_progress, role_verdict
from pagefleet_operator.plan.roles import PAIR_ROLES, refuses_without_kv, role_view
from pagefleet_operator.plan.verdict import SETTLED, Refusal, Verdict, find_condition, make_conditions

LIVE_PERIOD = timedelta(seconds=30)
"""Live numbers are renewed no more often: every change is written to the cluster's store."""
LIVE_UNCHANGED_PERIOD = timedelta(minutes=5)
"""Nor more often than this where they say what they said before."""
LIVE_FORGOTTEN = timedelta(minutes=10)
"""Numbers that no router has renewed for so long say nothing of now, and go."""

ROUTERS_ASKED = timedelta(seconds=10)
"""Within which the autoscaler has asked a router that became ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything that a status tells of."""

    service: InferenceService
    previous: InferenceServiceStatus | None
    observed: Observed
    url: str
    """Where clients send requests."""
    model: Verdict | None
    """None where the spec was refused before the model's turn came."""
    engines: RoleSeen
    """Of a disaggregated service: those of both parts."""
    routers: RoleSeen
    parts: tuple[RoleSeen, ...] = ()
    """Prefill and decode engines of a disaggregated service."""
    resolved: Resolved | None = None
    fit: Fit = field(default_factory=Fit)
    canary: CanaryStatus | None = None
    """Of a new revision that is tried out, or was last."""
    gate: Verdict | None = None
    """Why the engines that are wanted are not made yet."""
    nothing: Verdict | None = None
    """Why neither engines nor routers are made or changed."""
    degraded: Verdict | None = None
    """What keeps the operator from carrying out the spec."""
    selector: str = ""
    """Selects the engines' pods; empty: they are none."""


def service_status(now: Situation) -> InferenceServiceStatus:
    """Return the status of a service whose spec could be read."""
    service, seen = now.service, now.observed
    gate, asleep = now.nothing or now.gate, _asleep(now)
    parts = tuple(role_verdict(one, gate) for one in now.parts)
    whole = both_verdict(parts, [one.count for one in now.parts]) if parts else role_verdict(now.engines, gate)
    engine = asleep or whole
    link = _link_verdict(now)
    router = role_verdict(now.routers, now.nothing)
    model = now.model or _kept(now.previous, "ModelCached", now.degraded)
    progress = _progress(now)
    verdicts: dict[ConditionType, Verdict] = {
        "Ready": _ready(now, (model, engine, router)),
        "ModelCached": model,
        "EngineReady": engine,
        **part_verdicts(parts, link, asleep),
        "RouterReady": router,
        "Progressing": progress,
        "Degraded": _degraded(now, model, progress, link),
    }
    if (active := active_verdict(service, seen.scaling, seen.role_scaling, _routers_to_hear(now))) is not None:
        verdicts["ScalingActive"] = active
    return InferenceServiceStatus(
        observed_generation=seen.generation,
        model_name=service.model_name,
        mode="Paused" if service.spec.paused else "Disaggregated" if now.parts else "Aggregated",
        url=now.url,
        ready=f"{now.engines.ready}/{now.engines.wanted}",
        replicas=len(now.engines.members),
        selector=now.selector,
        conditions=make_conditions(verdicts, now.previous, seen.generation, rfc3339(seen.now)),
        roles=tuple(one.status() for one in (*(now.parts or (now.engines,)), now.routers)),
        resolved=_resolved(now),
        live=live_status(now.previous.live if now.previous else None, seen.live, seen.now),
        scaling=scaling_status(service, now.previous, seen.scaling, len(now.engines.members), rfc3339(seen.now)),
        role_scaling=_role_scaling(now),
        canary=now.canary,
        ratio=_ratio(now),
    )


def invalid_service_status(
    service: tuple[str, str], problems: InvalidDocument, previous: InferenceServiceStatus | None, observed: Observed
) -> InferenceServiceStatus:
    """Return the status of an InferenceService that cannot be read. What runs keeps running, and is told.

    Args:
        service: its namespace and name.
        problems: every mistake, with its path.
    """
    _, name = service
    roles = {role.name: role for role in previous.roles} if previous else {}
    wanted = {name: role.replicas for name, role in roles.items()}
    pair = [roles[one] for one in PAIR_ROLES if one in roles]
    parts = tuple(see_role(one.name, service, one.replicas, one.revision, observed) for one in pair)
    engines = (
        both_parts(*parts) if len(parts) == 2 else see_role("engine", service, wanted.get("engine", 0), "", observed)
    )
    routers = see_role("router", service, wanted.get("router", 0), "", observed)
    count = len(problems.errors)
    mistakes = "; ".join(str(error) for error in problems.errors)
    refused = Verdict(True, Reason.INVALID_SPEC, f"{count} mistake{'' if count == 1 else 's'}: {mistakes}")
    serves = bool(engines.ready and routers.ready)
    verdicts: dict[ConditionType, Verdict] = {
        "Ready": Verdict(True, Reason.SERVING, f"what ran before the edit keeps serving: {engines.count}")
        if serves
        else Verdict(False, Reason.INVALID_SPEC, refused.message),
        "ModelCached": _kept(previous, "ModelCached", refused),
        "EngineReady": _seen_or_kept(engines, previous, "EngineReady", refused),
        **_parts_kept(parts, previous, refused),
        "RouterReady": _seen_or_kept(routers, previous, "RouterReady", refused),
        "Progressing": Verdict(False, Reason.WAITING, "waits for the spec to be corrected; Degraded says where"),
        "Degraded": refused,
    }
    before = previous or InferenceServiceStatus(observed_generation=observed.generation, model_name=name)
    return before.model_copy(
        update={
            "observed_generation": observed.generation,
            "ready": f"{engines.ready}/{engines.wanted}",
            "replicas": len(engines.members),
            "selector": engine_selector(name),
            "conditions": make_conditions(verdicts, previous, observed.generation, rfc3339(observed.now)),
            "roles": tuple(one.status() for one in (*(parts or (engines,)), routers)),
            "live": live_status(before.live, observed.live, observed.now),
        }
    )


def engine_selector(name: str) -> str:
    return f"{LABEL_SERVICE}={name},{LABEL_COMPONENT}=engine"


def refused(refusal: Refusal) -> Verdict:
    return Verdict(True, refusal.reason, str(refusal))


def live_status(previous: LiveStatus | None, sample: LiveSample | None, now: datetime) -> LiveStatus | None:
    """Return the newer numbers, or the ones before as long as they are young enough; none that nobody renews."""
    before = _instant(previous.at) if previous else None
    if sample is None:
        return previous if before and _utc(now) - before < LIVE_FORGOTTEN else None
    renewed = LiveStatus(
        requests_running=sample.requests_running,
        requests_waiting=sample.requests_waiting,
        tokens_per_second=round(sample.tokens_per_second, 1),
        kv_usage=round(sample.kv_usage, 3),
        at=rfc3339(sample.at),
    )
    if previous is None or before is None:
        return renewed
    age = _utc(sample.at) - before
    same = renewed.model_copy(update={"at": previous.at}) == previous
    return previous if age < (LIVE_UNCHANGED_PERIOD if same else LIVE_PERIOD) else renewed


def rfc3339(moment: datetime) -> str:
    """Return the time as Kubernetes writes it, in whole seconds of UTC; a time without a zone is taken for UTC."""
    return _utc(moment).strftime("%Y-%m-%dT%H:%M:%SZ")


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _instant(text: str) -> datetime | None:
    try:
        return _utc(datetime.fromisoformat(text))
    except ValueError:
        return None


def _ready(now: Situation, parts: tuple[Verdict, ...]) -> Verdict:
    engines, routers = now.engines, now.routers
    if engines.ready and routers.ready:
        few = "" if engines.ready >= engines.wanted else f"; {engines.count}"
        still = "; spec.paused is true, so nothing is changed" if now.service.spec.paused else ""
        return Verdict(True, Reason.SERVING, f"requests are answered at {now.url}{few}{still}")
    if now.service.spec.paused and engines.missing:
        return Verdict(False, Reason.PAUSED, "spec.paused is true and nothing was made yet: set it to false")
    if woken := _held(now):
        return woken
    if engines.wanted == 0:
        return parts[1]
    if now.degraded and now.degraded.reason != Reason.KIND_MISSING and engines.missing:
        return Verdict(False, now.degraded.reason, now.degraded.message)
    first = next((part for part in parts if not part.holds), parts[1])
    return Verdict(False, first.reason, first.message)


def _held(now: Situation) -> Verdict | None:
    if not now.routers.ready or now.degraded:
        return None
    fails = any(trouble.reason not in NORMAL for trouble in now.engines.troubles)
    asleep = _asleep(now)
    return held_verdict(now.previous, now.url, "" if fails else now.engines.count, asleep)


def _routers_to_hear(now: Situation) -> int:
    """Return how many routers have been ready for long enough to have been asked."""
    at = _utc(now.observed.now)
    ready = [one for one in now.routers.members if one.ready]
    return sum(one.turned is None or at - _utc(one.turned) >= ROUTERS_ASKED for one in ready)


def _progress(now: Situation) -> Verdict:
    """Return Progressing; engines first, they take longer."""
    if now.service.spec.paused:
        return Verdict(False, Reason.PAUSED, "spec.paused is true: set it to false to have the spec carried out")
    if now.degraded and now.resolved is None:
        return Verdict(False, Reason.WAITING, "waits for the spec to be corrected; Degraded says where")
    if now.canary and now.canary.phase != "Promoted":
        back = now.canary.phase == "RolledBack"
        return Verdict(not back, Reason.CANARY_FAILED if back else Reason.CANARY, now.canary.message)
    engine = _engine_progress(now)
    if engine and engine.reason is Reason.ROLLOUT_STOPPED:
        return engine
    if now.gate:
        coming = now.model is not None and now.model.reason in (Reason.DOWNLOADING, Reason.INSPECTING)
        keeps = ", the engines before serve on" if now.engines.ready else ""
        return Verdict(coming, Reason.WAITING, f"{now.gate.message}{keeps}")
    return engine or _router_progress(now) or SETTLED


def _engine_progress(now: Situation) -> Verdict | None:
    found = [told for one in now.parts or (now.engines,) if (told := role_progress(one))]
    return next((one for one in found if one.reason is Reason.ROLLOUT_STOPPED), found[0] if found else None)


def _router_progress(now: Situation) -> Verdict | None:
    """Return what routers are on the way to. Where no engine is wanted they wait for nothing, and need not be ready."""
    idle = now.engines.wanted == 0 and all(trouble.reason in NORMAL for trouble in now.routers.troubles)
    return None if idle else role_progress(now.routers)


def _degraded(now: Situation, model: Verdict, progress: Verdict, link: Verdict | None) -> Verdict:
    if now.degraded:
        return now.degraded
    if progress.reason in (Reason.ROLLOUT_STOPPED, Reason.CANARY_FAILED):
        return Verdict(True, progress.reason, progress.message)
    if model.holds is False and model.reason not in NORMAL:
        return Verdict(True, model.reason, model.message)
    for seen in (*(now.parts or (now.engines,)), now.routers):
        trouble = worst(seen.troubles)
        if seen.wanted and not seen.ready and trouble is not None and trouble.reason not in NORMAL:
            return Verdict(True, trouble.reason, f"{seen.count}; {trouble.message}")
    for seen in (*(now.parts or (now.engines,)), now.routers):
        if 0 < seen.ready < seen.wanted or (seen.wanted and not seen.ready and now.engines.ready and seen in now.parts):
            return Verdict(True, Reason.PARTLY_READY, f"{seen.count}; {seen.role.title()}Ready says why")
    return link_trouble(link) or Verdict(False, Reason.AS_WANTED, "everything is as the spec wants it")


def _role_scaling(now: Situation) -> tuple[RoleScalingStatus, ...]:
    if not now.parts:
        return ()
    counts: dict[PairRole, int] = {"prefill": len(now.parts[0].members), "decode": len(now.parts[1].members)}
    return role_scaling(now.service, now.previous, now.observed.role_scaling, counts, rfc3339(now.observed.now))


def _ratio(now: Situation) -> RatioAdvice | None:
    if not now.parts:
        return None
    have = Pair(now.parts[0].wanted, now.parts[1].wanted)
    before = now.previous.ratio if now.previous else None
    prefill, decode = (_data_ranks(role_view(now.service, role), now.resolved) for role in PAIR_ROLES)
    return ratio_advice(now.observed.pair_load, have, before, rfc3339(now.observed.now), (prefill, decode))


def _data_ranks(view: InferenceService, whole: Resolved | None) -> int:
    ranks = find_ranks(view, whole.profile if whole else None, lambda *_: None)
    return ranks.data if isinstance(ranks, Ranks) else 1


def _link_verdict(now: Situation) -> Verdict | None:
    """Return KVLinkReady; None: there is only one kind of engine."""
    if not now.parts:
        return None
    ready = (now.parts[0].ready, now.parts[1].ready)
    return kv_link_verdict(now.observed.kv_engines, ready, refuses=refuses_without_kv(now.service))


def _asleep(now: Situation) -> Verdict | None:
    """Return EngineReady where an autoscaler wants no engine; of two parts either tells, as they rest together."""
    return asleep_verdict(role_view(now.service, "decode") if now.parts else now.service, now.engines.wanted)


def _kept(previous: InferenceServiceStatus | None, kind: ConditionType, cause: Verdict | None) -> Verdict:
    """Return what was known before; where nothing was, why nothing is."""
    before = find_condition(previous, kind)
    if before is not None:
        holds: Mapping[str, bool] = {"True": True, "False": False}
        return Verdict(holds.get(before.status), before.reason, before.message)
    reason = cause.reason if cause else Reason.WAITING
    return Verdict(None, reason, "is not known while the spec is not carried out")


def _seen_or_kept(
    seen: RoleSeen, previous: InferenceServiceStatus | None, kind: ConditionType, cause: Verdict
) -> Verdict:
    return role_verdict(seen) if seen.wanted else _kept(previous, kind, cause)


def _parts_kept(
    parts: Sequence[RoleSeen], previous: InferenceServiceStatus | None, cause: Verdict
) -> dict[ConditionType, Verdict]:
    """Return the conditions of both parts; nobody asks engines about their link while the spec cannot be read."""
    kinds: tuple[ConditionType, ConditionType] = ("PrefillReady", "DecodeReady")
    seen = [_seen_or_kept(one, previous, kind, cause) for one, kind in zip(parts, kinds, strict=False)]
    return part_verdicts(seen, _kept(previous, "KVLinkReady", cause) if seen else None, None)


def _resolved(now: Situation) -> ResolvedStatus | None:
    resolved = now.resolved
    if resolved is None:
        return now.previous.resolved if now.previous else None
    facts = resolved.facts
    return ResolvedStatus(
        revision=resolved.revision or (facts.revision if facts else ""),
        profile=resolved.profile.name if resolved.profile else "",
        image=resolved.image,
        dtype=computed_dtype(resolved),
        quantization=resolved.quantization or (facts.quantization if facts else ""),
        cache=resolved.cache,
        gpus=resolved.gpus,
        nodes=resolved.nodes,
        tensor=resolved.ranks.tensor,
        pipeline=resolved.ranks.pipeline,
        data=resolved.ranks.data,
        expert=resolved.ranks.expert,
        max_model_len=now.fit.max_model_len or resolved.max_model_len,
        memory=now.fit.memory,
        why=(*resolved.why, *now.fit.why),
    )


def both_verdict(parts: Sequence[Verdict], counts: Sequence[str]) -> Verdict:
    """Return EngineReady: the part that is worse off has the word.

    Args:
        parts: PrefillReady and DecodeReady.
        counts: words for how many of each are ready.
    """
    first = next((one for one in parts if not one.holds), None)
    return first or Verdict(True, Reason.ALL_READY, ", ".join(counts))


def part_verdicts(
    parts: Sequence[Verdict], link: Verdict | None, asleep: Verdict | None
) -> dict[ConditionType, Verdict]:
    """Return the conditions that only a disaggregated service has.

    Args:
        parts: how prefill and decode engines are; empty: it has none.
        link: KVLinkReady; None: it has none.
        asleep: why none are wanted, where an autoscaler wants none.
    """
    if link is None:
        return {}
    prefill, decode = (asleep or one for one in parts)
    return {"PrefillReady": prefill, "DecodeReady": decode, "KVLinkReady": asleep or link}


def link_trouble(link: Verdict | None) -> Verdict | None:
    """Return Degraded for engines that are there and pass no K/V; None: they do, or are still on their way."""
    if link is None or link.reason not in (Reason.KV_INCOMPATIBLE, Reason.KV_LINK_DOWN):
        return None
    return Verdict(True, link.reason, link.message)
