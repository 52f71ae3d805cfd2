"""The engines while a new revision is tried out: all of the old one as they are, and some of the new one besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pagefleet_protocol.canary import Canary
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import CanaryStatus, EngineRole, InferenceServiceStatus
from pagefleet_protocol.kube_names import LABEL_CANARY, LABEL_REVISION

from pagefleet_operator.plan.canary import TrialSeen, engines_on_trial, next_status
from pagefleet_operator.plan.engine_sets import is_grouped, revision_in
from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import Child, Observed
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.role_health import see_role
from pagefleet_operator.plan.role_seen import see_trial
from pagefleet_operator.render.engine_pairs import (
    Part,
    deployed_pairs,
    kept_engines,
    pair_revision,
    part_deployment,
    whole_revision,
)
from pagefleet_operator.render.labels import Object, selector
from pagefleet_operator.render.leader_worker_set import engine_set
from pagefleet_operator.render.revision import as_found, as_scaled, with_applied
from pagefleet_operator.render.settings import ClusterSettings


@dataclass(frozen=True, slots=True)
class Trial:
    """A new revision that is tried out, has replaced the old one, or went back."""

    status: CanaryStatus
    engines: tuple[Object, ...]
    """Deployments as they are to be; empty: those of a service of which nothing is tried out, and `beside`."""
    beside: tuple[Object, ...] = ()
    """What is left of the trial while its revision replaces the old one, in place of engines that may be missing."""

    @property
    def share(self) -> Mapping[str, str]:
        """Labels of the engines' Service that tell routers what share the new revision gets."""
        return {LABEL_CANARY: f"{self.status.revision}.{self.status.percent}"} if self.engines else {}


def plan_trial(
    service: InferenceService,
    resolved: Resolved,
    settings: ClusterSettings,
    observed: Observed,
    seen: tuple[InferenceServiceStatus | None, int],
) -> Trial | None:
    """Return the trial of the wanted engines; None: there is nothing to be tried out, or to be compared with.

    Args:
        seen: the last status, and how many engines are wanted.
    """
    previous, replicas = seen
    wanted = engine_set(service, resolved, settings, replicas)
    stable = observed.children.get((wanted["kind"], names_of(service).engine))
    canary = service.spec.rollout.canary
    if canary is None or stable is None or not stable.ours:
        return None
    before = previous.canary if previous else None
    revision, serving = revision_in(wanted), revision_in(stable.body)
    # Where no old engine may be missing, the rollout may need the devices of those that were tried out.
    left = _left(service, wanted["kind"], revision, observed) if resolved.max_unavailable else ()
    if revision == serving:
        return _replacing(before, stable, left, revision)
    stays = as_found(stable.body) if stable.scaled_by else as_scaled(stable.body, replicas)
    kept = (stays, *kept_engines(resolved, observed.children, replicas, whole_revision(resolved))[1])
    known = before if before and before.revision == revision else None
    if not replicas:
        return Trial(known, kept) if known and known.phase != "Promoted" else None
    if not known and not any(
        one.ready and one.component == "engine" and one.revision == serving for one in observed.pods
    ):
        return None  # what does not serve is no measure
    status = _next(service, canary, before, observed, (revision, {"engine": replicas}))
    if status.phase == "Promoted":
        return Trial(status, (), left)
    count = engines_on_trial(canary, status, replicas)
    return Trial(status, (*kept, *([_deployment(service, wanted, revision, count)] if count else [])))


def plan_pair_trial(
    service: InferenceService,
    resolved: Resolved,
    observed: Observed,
    previous: InferenceServiceStatus | None,
    parts: tuple[Part, ...],
) -> Trial | None:
    """Return the trial of wanted prefill and decode engines; None: as of engines for whole requests.

    A revision is tried out with both parts, each as large as its share. What is being rolled out already is not; an
    older rollout goes on beside the trial, as that of a Deployment of engines for whole requests does.
    """
    canary, before = service.spec.rollout.canary, previous.canary if previous else None
    revision, deployed = pair_revision(parts), deployed_pairs(observed.children)
    known = before if before and before.revision == revision else None
    if canary is None or (known is None and revision in deployed):
        return None
    if known and known.phase == "Promoted":
        return Trial(known, ())
    tried = {revision, *([before.revision] if before and before.phase != "Promoted" else [])}
    old = {name: pair for name, pair in deployed.items() if name not in tried}
    serving = max(old, key=lambda name: (_serves(name, observed), name), default="")
    if not serving or not (known or _serves(serving, observed)):
        return None  # what does not serve is no measure
    kept = tuple(chain(*kept_engines(resolved, observed.children, parts, serving, tried)))
    if not any(one.engines for one in parts):
        return Trial(known, kept) if known else None
    wanted: dict[EngineRole, int] = {one.role: one.engines for one in parts}
    status = _next(service, canary, before, observed, (revision, wanted))
    if status.phase == "Promoted":
        return Trial(status, ())
    counts = {one.role: engines_on_trial(canary, status, one.engines) for one in parts}
    made = tuple(part_deployment(one, revision, counts[one.role]) for one in parts if counts[one.role])
    return Trial(status, (*kept, *made))


def _serves(revision: str, observed: Observed) -> int:
    """Return how many decode engines of a revision answer."""
    return sum(one.ready and one.role == "decode" and one.revision == revision for one in observed.pods)


def _next(
    service: InferenceService,
    canary: Canary,
    before: CanaryStatus | None,
    observed: Observed,
    wanted: tuple[str, Mapping[EngineRole, int]],
) -> CanaryStatus:
    """Return what becomes of a trial; `wanted`: the new revision, and the engines of each role."""
    key, (revision, counts) = (service.metadata.namespace, service.name), wanted
    trial = see_trial([see_role(role, key, count, revision, observed) for role, count in counts.items()])
    now = TrialSeen(revision, observed.now, trial.engines, observed.trial, trial.trouble, trial.hopeless)
    return next_status(canary, service.spec.rollout.progress_seconds, before, now)


def _replacing(before: CanaryStatus | None, stable: Child, left: tuple[Object, ...], revision: str) -> Trial | None:
    """Keep what is left of the trial until the engines that replace the old ones serve."""
    if before is None or before.revision != revision or before.phase != "Promoted":
        return None
    return Trial(before, (), () if is_rolled_out(stable.body) else left)


def _left(service: InferenceService, kind: str, revision: str, observed: Observed) -> tuple[Object, ...]:
    child = observed.children.get((kind, names_of(service).trial(revision)))
    return (as_found(child.body),) if child and child.ours else ()


def _deployment(service: InferenceService, wanted: Object, revision: str, count: int) -> Object:
    """Return what makes the engines that are tried out: as wanted, under another name, and so many."""
    mark = {LABEL_REVISION: revision}
    metadata = {
        **wanted["metadata"],
        "name": names_of(service).trial(revision),
        "labels": wanted["metadata"]["labels"] | mark,
    }
    # A LeaderWorkerSet needs no selector: its pods have its name.
    match = {"selector": {"matchLabels": selector(service.name, "engine") | mark}} if not is_grouped(wanted) else {}
    return with_applied({**wanted, "metadata": metadata, "spec": {**wanted["spec"], **match, "replicas": count}})


def is_rolled_out(engines: Mapping[str, Any]) -> bool:
    """Whether all engines are of the template that is wanted, and take requests."""
    status, wanted = engines.get("status") or {}, engines["spec"].get("replicas", 1)
    seen = status.get("observedGeneration", 0) >= engines["metadata"].get("generation", 0)
    ready = "readyReplicas" if is_grouped(engines) else "availableReplicas"
    counts = [status.get(name, 0) for name in ("updatedReplicas", ready, "replicas")]
    return seen and counts == [wanted] * 3
