"""What engines are made from: those for whole requests, or both parts of them, and what they replace.

Parts have Deployments of their own for each revision, whose templates never change: so their numbers can be led step by
step, and a revision has both parts or none. Kubernetes rolls over engines for whole requests by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import PairRole
from pagefleet_protocol.kube_names import LABEL_COMPONENT, LABEL_REVISION, LABEL_ROLE

from pagefleet_operator.plan.engine_sets import ENGINE_SETS, LEADER_WORKER_SET, is_grouped
from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import Child, ChildKey
from pagefleet_operator.plan.pair_rollout import (
    GROUPS,
    WHOLE,
    Count,
    Pair,
    RevisionSeen,
    Rollout,
    by_revision,
    next_counts,
)
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_operator.render.labels import Object, child_object, labels, selector
from pagefleet_operator.render.leader_worker_set import engine_set, group_set
from pagefleet_operator.render.pod import deployment_spec, rolling_update
from pagefleet_operator.render.revision import as_scaled, digest, with_applied
from pagefleet_operator.render.settings import ClusterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is wanted of one part of a disaggregated service."""

    role: PairRole
    view: InferenceService
    resolved: Resolved
    templates: Sequence[Mapping[str, Any]]
    """Of its pods, without their revision: of those that serve and, on several nodes, of those that follow them."""
    engines: int


def most_endpoints(resolved: Resolved, parts: Collection[Part]) -> int:
    """Return how many data ranks on ports of their own any of the engines has."""
    return max(one.ranks.endpoints for one in (resolved, *(part.resolved for part in parts)))


@dataclass(frozen=True, slots=True)
class _Deployed:
    """A Deployment or LeaderWorkerSet of engines that exists, and is ours."""

    revision: str
    role: PairRole | None
    body: Mapping[str, Any]

    @property
    def asked(self) -> int:
        count = (self.body.get("spec") or {}).get("replicas")
        return count if isinstance(count, int) else 1

    @property
    def ready(self) -> int:
        """Engines that have been ready for a while; of groups those that are."""
        count = (self.body.get("status") or {}).get("readyReplicas" if is_grouped(self.body) else "availableReplicas")
        return min(count, self.asked) if isinstance(count, int) else 0


def whole_revision(resolved: Resolved) -> str:
    """Return what stands for the revision of engines for whole requests: of one pod each, or of several."""
    return WHOLE if resolved.nodes == 1 else GROUPS


def pair_revision(parts: tuple[Part, ...]) -> str:
    """Return what tells the wanted engines of both parts from all others: a change of one part changes both."""
    return digest([template for one in parts for template in one.templates])


def deployed_pairs(children: Mapping[ChildKey, Child]) -> Mapping[str, Mapping[PairRole, Mapping[str, Any]]]:
    """Return the Deployments of parts that are ours, by revision."""
    found: dict[str, dict[PairRole, Mapping[str, Any]]] = {}
    for one in _deployed(children):
        if one.role:
            found.setdefault(one.revision, {})[one.role] = one.body
    return found


def engine_deployments(
    service: InferenceService,
    resolved: Resolved,
    settings: ClusterSettings,
    children: Mapping[ChildKey, Child],
    wanted: int | tuple[Part, ...],
    *,
    fails: bool = False,
) -> tuple[Object, ...]:
    """Return the Deployments and LeaderWorkerSets to be applied now: the wanted ones, and what is left of others.

    Args:
        resolved: the settings in force for whole requests, and for what parts have in common.
        wanted: engines for whole requests, or both parts.
        fails: whether the wanted revision has to prove itself before there may be more of it.
    """
    deployed = _deployed(children)
    revision = whole_revision(resolved) if isinstance(wanted, int) else pair_revision(wanted)
    seen = by_revision(Count(one.revision, one.role, one.asked, one.ready) for one in deployed)
    found = seen.pop(revision, None)
    now = replace(found, fails=fails) if found else RevisionSeen(revision, Pair(), Pair())
    counts = next_counts(_target(wanted), now, tuple(seen.values()), _bounds(resolved, wanted))
    kept = [one for one in deployed if one.revision != revision and not counts[one.revision].empty]
    return (
        *_wanted(service, resolved, settings, wanted, (revision, counts[revision])),
        *(_scaled(one, counts[one.revision]) for one in kept),
    )


def kept_engines(
    resolved: Resolved,
    children: Mapping[ChildKey, Child],
    wanted: int | tuple[Part, ...],
    serving: str,
    tried: Collection[str] = (),
) -> tuple[tuple[Object, ...], tuple[Object, ...]]:
    """Return what stays while a revision is tried out: Deployments of the one that serves, and of those before it.

    A rollout that has not ended goes on to the revision that serves.

    Args:
        wanted: how many engines there are to be, as in `engine_deployments`.
        tried: revisions of trials, which replace nothing.
    """
    deployed = [one for one in _deployed(children) if one.revision not in tried]
    seen = by_revision(Count(one.revision, one.role, one.asked, one.ready) for one in deployed)
    now = seen.pop(serving, RevisionSeen(serving, Pair(), Pair()))
    counts = next_counts(_target(wanted), now, tuple(seen.values()), _bounds(resolved, wanted))
    older = [one for one in deployed if one.revision != serving and not counts[one.revision].empty]
    return (
        tuple(_scaled(one, counts[serving]) for one in deployed if one.revision == serving),
        tuple(_scaled(one, counts[one.revision]) for one in older),
    )


def _target(wanted: int | tuple[Part, ...]) -> Pair:
    """Return the engines that there are to be in the end."""
    return Pair(0, wanted) if isinstance(wanted, int) else Pair(*(one.engines for one in wanted))


def _wanted(
    service: InferenceService,
    resolved: Resolved,
    settings: ClusterSettings,
    wanted: int | tuple[Part, ...],
    now: tuple[str, Pair],
) -> tuple[Object, ...]:
    revision, counts = now
    if isinstance(wanted, int):
        return (with_applied(engine_set(service, resolved, settings, counts.decode)),)
    numbers = {"prefill": counts.prefill, "decode": counts.decode}
    return tuple(part_deployment(one, revision, numbers[one.role]) for one in wanted)


def part_deployment(part: Part, revision: str, replicas: int) -> Object:
    """Return the Deployment, or LeaderWorkerSet, of one part of a revision."""
    service, mark = part.view, {LABEL_REVISION: revision}
    templates = [
        {**one, "metadata": {**one["metadata"], "labels": one["metadata"]["labels"] | mark}} for one in part.templates
    ]
    name = names_of(service).part(part.role, revision)
    # Of one revision there is nothing to roll over; what somebody else changed is put right one by one.
    if part.resolved.nodes > 1:
        one_by_one = {"maxSurge": 0, "maxUnavailable": 1}
        made = group_set(service, part.resolved, name, templates, one_by_one, replicas)
    else:
        made = _deployment(part, name, templates[0], replicas)
    made["metadata"]["labels"] = labels(service.name, "engine", part.role) | mark
    return with_applied(made)


def _deployment(part: Part, name: str, template: Object, replicas: int) -> Object:
    service = part.view
    rollout = {
        "replicas": replicas,
        "strategy": rolling_update(max_surge=0, max_unavailable=1),
        "progressDeadlineSeconds": service.spec.rollout.progress_seconds,
    }
    mark = {LABEL_REVISION: template["metadata"]["labels"][LABEL_REVISION]}
    spec = deployment_spec(template, selector(service.name, "engine", part.role) | mark, rollout)
    spec["template"] = template  # whose revision is that of both parts
    return child_object("apps/v1 Deployment", service, name, "engine", spec=spec)


def _scaled(seen: _Deployed, counts: Pair) -> Object:
    """Return a Deployment of an older revision with another number of engines, else as it is."""
    return as_scaled(seen.body, counts.prefill if seen.role == "prefill" else counts.decode)


def _bounds(resolved: Resolved, wanted: int | tuple[Part, ...]) -> Rollout:
    """Return how many may be too many or missing; where a part has no spare GPU, the other waits for it."""
    each = [resolved] if isinstance(wanted, int) else [one.resolved for one in wanted]
    surge, missing = min(one.max_surge for one in each), max(one.max_unavailable for one in each)
    return Rollout(surge, missing)


def _deployed(children: Mapping[ChildKey, Child]) -> tuple[_Deployed, ...]:
    found = []
    for (kind, _), child in sorted(children.items()):
        marks = child.body.get("metadata", {}).get("labels") or {}
        if kind not in ENGINE_SETS or not child.ours or marks.get(LABEL_COMPONENT) != "engine":
            continue
        role = next((one for one in PAIR_ROLES if one == marks.get(LABEL_ROLE)), None)
        if not role and LABEL_REVISION in marks:
            continue  # a revision that is tried out
        whole = GROUPS if kind == LEADER_WORKER_SET else WHOLE
        found.append(_Deployed(str(marks.get(LABEL_REVISION, WHOLE)) if role else whole, role, child.body))
    return tuple(found)
