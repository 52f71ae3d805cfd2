"""One look at one InferenceService: see, plan, apply, tell. The same steps whatever the reason to look."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus
from pagefleet_protocol.kube_names import LABEL_COMPONENT, LABEL_ROLE
from pagefleet_protocol.model_facts import DownloadResult, DownloadResultError, decode_result, encode_result
from pagefleet_protocol.resource_documents import parse_inference_service

from pagefleet_operator.apply.applier import Applied, Applier
from pagefleet_operator.apply.cluster import Cluster
from pagefleet_operator.apply.kinds import BY_NAME, SECRET
from pagefleet_operator.errors import Conflict, Refused
from pagefleet_operator.handlers.announcer import Announcer
from pagefleet_operator.handlers.cluster_view import ClusterView, Key, StoredService
from pagefleet_operator.handlers.observer import Observer
from pagefleet_operator.handlers.status_writer import StatusWriter
from pagefleet_operator.plan.announcements import announcements
from pagefleet_operator.plan.engine_sets import ENGINE_SETS, replicas_in
from pagefleet_operator.plan.observed import ApplyFailure, Child, ChildKey, Observed, PodSeen
from pagefleet_operator.plan.obstacles import key_of
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_operator.plan.status import invalid_service_status
from pagefleet_operator.render.fleet_key import fleet_key_secret
from pagefleet_operator.render.revision import as_scaled
from pagefleet_operator.render.service_plan import ANNOTATION_FACTS, ServicePlan, plan_service
from pagefleet_operator.render.settings import ClusterSettings

_LOG = logging.getLogger(__name__)
NEVER_S = float("inf")
"""Nothing will change by itself: the next resync is soon enough."""
NOT_READY_LOOK_S = 10.0
"""Events of pods are not watched: while some are not ready, they are read so often."""
GOING_LOOK_S = 30.0
_GOING = "being terminated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a reconcile works with."""

    view: ClusterView
    cluster: Cluster
    observer: Observer
    settings: ClusterSettings
    applier: Applier
    statuses: StatusWriter
    announcer: Announcer


class Reconciler:
    """Makes InferenceServices as they are wanted, one at each call."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.optional_kinds: frozenset[str] = frozenset()
        """Of ServiceMonitor, InferencePool, HTTPRoute, Ingress, LeaderWorkerSet: those that the cluster knows."""

    async def reconcile(self, key: Key) -> float | None:
        """Make one InferenceService so; returns the seconds to the next look, None: it is no more.

        Raises:
            ClusterError: something was not done; the look has to be repeated.
        """
        stored = self._tools.view.service(key)
        if stored is None:
            self._tools.applier.forget(key)
            self._tools.statuses.forget(key)
            return None
        if stored.deleting:
            return GOING_LOOK_S  # garbage collection takes the children
        glance = self._tools.observer.glance(key, stored, self.optional_kinds)
        try:
            service = parse_inference_service(msgspec.json.decode(stored.document))
        except InvalidDocument as error:
            previous = self._tools.statuses.previous(key, stored)
            await self._tell(key, stored, invalid_service_status(key, error, previous, glance))
            await wake_asleep(self._tools.cluster, key, previous, glance)
            return NEVER_S
        return await self._carry_out(key, stored, service, glance)

    async def _carry_out(
        self, key: Key, stored: StoredService, service: InferenceService, glance: Observed
    ) -> float | None:
        tools = self._tools
        previous = tools.statuses.previous(key, stored)
        observed = await tools.observer.look(key, service, glance)
        await self._keep_facts(key, observed)
        plan = plan_service(service, previous, observed, tools.settings)
        unseen = [name for name in map(key_of, plan.objects) if name not in observed.children]
        if found := await tools.observer.find(key, stored.uid, unseen):
            # Somebody else's may have the name, and ours may be newer than the watch.
            observed = replace(observed, children={**observed.children, **found})
            plan = plan_service(service, previous, observed, tools.settings)
        failures = await make_fleet_key(tools.cluster, service) if plan.needs_fleet_key else ()
        # Pods would wait for a key that cannot be made, while those that serve go.
        objects = [one for one in plan.objects if not failures or one["kind"] not in ENGINE_SETS]
        applied = await tools.applier.make_so(key, objects, observed.children, plan.delete)
        failures += applied.failures
        if any(one.status == 403 and _GOING in one.message for one in failures):
            return GOING_LOOK_S  # the namespace is being deleted, and all of this with it
        if failures:
            plan = plan_service(service, previous, replace(observed, failures=failures), tools.settings)
        await self._tell(key, stored, plan.status)
        if not plan.objects and not service.spec.paused:
            await wake_asleep(tools.cluster, key, previous, observed)
        if failures:
            raise Refused(_sentence(failures), status=failures[0].status)
        return _next_look(plan, applied, observed)

    async def _keep_facts(self, key: Key, observed: Observed) -> None:
        for job, result in to_keep(observed.children, observed.pods).items():
            try:
                await self._tools.cluster.annotate(BY_NAME["Job"], key[0], job, {ANNOTATION_FACTS: result})
            except Refused as error:
                _LOG.warning("%s/%s: what job %s found out was not kept: %s", *key, job, error)

    async def _tell(self, key: Key, stored: StoredService, status: InferenceServiceStatus) -> None:
        tools = self._tools
        before = tools.statuses.previous(key, stored)
        try:
            written = await tools.statuses.write(key, stored, status)
        except Refused as error:
            if error.status == 404 or _GOING in error.message:
                return  # deleted a moment ago; the watch will say so
            raise
        if written:
            await tools.announcer.announce(key, stored.uid, announcements(before, status))


def _next_look(plan: ServicePlan, applied: Applied, observed: Observed) -> float:
    waits = [NEVER_S if plan.look_again_s is None else plan.look_again_s]
    if applied.held_back_s is not None:
        waits.append(applied.held_back_s)
    if any(not pod.ready and not pod.deleting and pod.phase in ("Pending", "Running") for pod in observed.pods):
        waits.append(NOT_READY_LOOK_S)
    return max(1.0, min(waits))


def _sentence(failures: Iterable[ApplyFailure]) -> str:
    return "; ".join(f"{one.kind} {one.name}: {one.message}" for one in failures)


_NUM_BYTES = 32


async def make_fleet_key(cluster: Cluster, service: InferenceService) -> tuple[ApplyFailure, ...]:
    """Create the Secret; one that exists stays as it is. Returns the failure, if the API server refused.

    Raises:
        Throttled, Unavailable, NotLeading: it has to wait.
    """
    body = fleet_key_secret(service, secrets.token_hex(_NUM_BYTES).encode())
    try:
        await cluster.create(SECRET, service.metadata.namespace, body)
    except Conflict:
        return ()
    except Refused as error:
        return (ApplyFailure("Secret", body["metadata"]["name"], error.status, error.reason, error.message),)
    return ()


def to_keep(children: Mapping[ChildKey, Child], pods: Sequence[PodSeen]) -> Mapping[str, str]:
    """Return what is to be written on Jobs that do not hold it yet, by Job."""
    found = {}
    for (kind, name), child in children.items():
        if kind == "Job" and child.ours and ANNOTATION_FACTS not in (child.body["metadata"].get("annotations") or {}):
            result = _said_by(pods, name)
            if result is not None:
                found[name] = encode_result(result).decode().strip()
    return found


def _said_by(pods: Sequence[PodSeen], job: str) -> DownloadResult | None:
    """Return what a pod of a Job said when it succeeded; None: no pod of it is there, or none succeeded."""
    for pod in pods:
        if pod.component != "model" or not pod.name.startswith(f"{job}-"):
            continue
        for container in pod.containers:
            if container.state == "terminated" and container.exit_code == 0:
                result = _parsed(container.message)
                if result is not None and result.facts is not None:
                    return result
    return None


def _parsed(text: str) -> DownloadResult | None:
    try:
        return decode_result(text) if text else None
    except DownloadResultError:
        return None


# A plan that is refused touches nothing. But a service that sleeps at zero engines answers nobody, so its engines'
# Deployment or LeaderWorkerSet, which is the last accepted spec as it was carried out, gets them back, and nothing else
# changes.
async def wake_asleep(cluster: Cluster, key: Key, previous: InferenceServiceStatus | None, observed: Observed) -> None:
    """Give engines to a refused service that has none, if its autoscaler wants some.

    Args:
        previous: its last status, which says whether pagefleet scales it.
        observed: its children, and what the autoscaler decided.

    Raises:
        ClusterError: it was not done; the look has to be repeated.
    """
    counts = _wanted(previous, observed)
    for (kind, name), child in observed.children.items():
        wanted = counts.get(_role(child.body), 0) if kind in ENGINE_SETS and child.ours else 0
        if wanted and replicas_in(child.body) == 0:
            body = await cluster.get(BY_NAME[kind], key[0], name)
            if body is None or replicas_in(body) != 0:
                continue
            await cluster.apply(as_scaled(body, wanted))
            _LOG.info("%s/%s: %s wakes up with %d engines, though the spec is refused", *key, name, wanted)


def _wanted(previous: InferenceServiceStatus | None, observed: Observed) -> Mapping[str, int]:
    """Return the engines that autoscalers want, for whole requests and of both parts, where pagefleet scales them."""
    if previous is None:
        return {}
    rules = {"engine": previous.scaling} | {one.name: one.scaling for one in previous.role_scaling}
    scaled = {role for role, rule in rules.items() if rule is not None and rule.mode == "Internal"}
    seen = {"engine": observed.scaling} | dict(observed.role_scaling)
    counts = {role: one.desired for role, one in seen.items() if one is not None and role in scaled}
    # Parts wake together: neither answers alone.
    awake = any(counts.get(role) for role in PAIR_ROLES)
    return counts | {role: max(1, counts[role]) for role in PAIR_ROLES if awake and role in counts}


def _role(body: Mapping[str, Any]) -> str:
    """Return what the pods are that are made from it: engine, prefill, decode; empty: no engines."""
    labels = (body.get("metadata") or {}).get("labels") or {}
    return str(labels.get(LABEL_ROLE, "engine")) if labels.get(LABEL_COMPONENT) == "engine" else ""
