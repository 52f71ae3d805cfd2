"""All children of one InferenceService that are wanted now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.kube_names import GROUP, LABEL_COMPONENT, LABEL_SERVICE, PLURAL

from pagefleet_operator.plan.engine_sets import (
    DEPLOYMENT,
    LEADER_WORKER_SET,
    engine_sets,
    is_grouped,
    replicas_in,
    surge_in,
    whole_sets,
)
from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import Child, ChildKey, Component
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_operator.render.canary import Trial, is_rolled_out
from pagefleet_operator.render.drift import differences
from pagefleet_operator.render.engine_pairs import Part, deployed_pairs, engine_deployments, most_endpoints
from pagefleet_operator.render.labels import Object, child_object, selector
from pagefleet_operator.render.leader_worker_set import engine_set
from pagefleet_operator.render.model_job import model_claim, model_job, needs_job
from pagefleet_operator.render.network_policies import network_policies
from pagefleet_operator.render.ports import DataRanks, caches_let_in, caches_of, endpoints_of
from pagefleet_operator.render.revision import as_found, as_seen, with_applied
from pagefleet_operator.render.router_deployment import router_deployment
from pagefleet_operator.render.services import (
    client_service,
    engine_service,
    http_route,
    inference_pool,
    ingress,
    openai_config,
    prefill_service,
    service_monitor,
)
from pagefleet_operator.render.settings import ClusterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildContext:
    """What was seen, and decided, that children depend on beside the spec."""

    children: Mapping[ChildKey, Child]
    optional_kinds: frozenset[str]
    """Of ServiceMonitor, InferencePool, HTTPRoute, Ingress and LeaderWorkerSet, those that the cluster knows."""
    model_ready: bool
    """Whether engines would find the model. Until then there are none of this revision, and older ones stay."""
    engines: int
    """How many are wanted for whole requests."""
    parts: tuple[Part, ...] = ()
    """What is wanted instead where prompts and answers are computed by different engines."""
    fails: bool = False
    """Whether of one part none of the wanted revision gets ready."""
    trial: Trial | None = None
    """Of a new revision of engines for whole requests."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Groups of pods that are one engine each, as they were seen: by LeaderWorkerSet, the highest number plus one."""
    engine_allowed: bool = True
    """False: the engines that are wanted are refused; those that run stay as they are."""


def wanted_children(
    service: InferenceService, resolved: Resolved, settings: ClusterSettings, context: ChildContext
) -> tuple[Object, ...]:
    """Return the children in the order in which they are needed: what a pod refers to comes before the pod.

    Each has owner, labels and the annotation `pagefleet.dev/applied`. What has to stay as it is comes back as it was
    seen, so that nothing differs and nothing is applied.
    """
    with_job = needs_job(resolved)
    engines = _engines(service, resolved, settings, context)
    ranks = _data_ranks(service, resolved, context)
    followers: list[Component] = ["follower"] if any(map(is_grouped, engines)) else []
    fresh = [
        *access(service),
        openai_config(service),
        *network_policies(
            service,
            resolved,
            settings,
            ranks=ranks,
            parts=context.parts,
            groups=_groups(engines, context),
        ),
        client_service(service),
        engine_service(service, ranks.apart, context.trial.share if context.trial else {}),
        *([prefill_service(service, ranks.all)] if context.parts or deployed_pairs(context.children) else []),
        _budget(service, names_of(service).engine, "engine", *followers),
        _budget(service, names_of(service).router, "router"),
        *([model_claim(service, resolved)] if resolved.makes_claim else []),
        router_deployment(service, resolved, settings),
        *_exposure(service, ranks.apart, context),
    ]
    job = _job(service, resolved, settings, context) if with_job else None
    return (*map(with_applied, fresh), *_policies_left(service, context), *([job] if job else []), *engines)


def _data_ranks(service: InferenceService, resolved: Resolved, context: ChildContext) -> DataRanks:
    """Return what data ranks any of the pods has: those that stay as they are, or leave, serve until they end."""
    deployed = [child.body for _, child in engine_sets(context.children)]
    sets = [one for one in deployed if one["metadata"].get("labels", {}).get(LABEL_COMPONENT) == "engine"]
    wanted = [resolved.ranks.data, *(part.resolved.ranks.data for part in context.parts)]
    apart = [most_endpoints(resolved, context.parts), *map(endpoints_of, sets)]
    caches = [*wanted, *map(caches_of, sets)]
    if not all(map(is_rolled_out, sets)):  # the template tells nothing of pods that were made before it
        front, policy = (
            context.children.get((kind, names_of(service).engine)) for kind in ("Service", "NetworkPolicy")
        )
        apart.append(len(front.body["spec"].get("ports") or ()) if front else 1)
        caches.append(caches_let_in(policy.body) if policy else 1)
    return DataRanks(max(apart), max(*caches, *apart))


def _policies_left(service: InferenceService, context: ChildContext) -> Iterator[Object]:
    """Yield the policies of parts that are not wanted any more, for as long as engines of theirs pass K/V."""
    if context.parts or not deployed_pairs(context.children):
        return
    for role in PAIR_ROLES:
        seen = context.children.get(("NetworkPolicy", names_of(service).part(role)))
        if seen and seen.ours:
            yield as_seen(seen.body, "networking.k8s.io/v1", "NetworkPolicy")


def _engines(
    service: InferenceService, resolved: Resolved, settings: ClusterSettings, context: ChildContext
) -> tuple[Object, ...]:
    kind = LEADER_WORKER_SET if resolved.nodes > 1 else DEPLOYMENT
    seen = context.children.get((kind, names_of(service).engine))
    whole = whole_sets(context.children, names_of(service).engine)
    pairs = deployed_pairs(context.children)
    if not (context.model_ready and context.engine_allowed):
        bodies = [body for pair in pairs.values() for body in pair.values()]
        bodies += [one.body for one in sorted(whole, key=lambda one: one is not seen)]  # the wanted kind's comes first
        return tuple(map(as_found, bodies))
    if context.trial and context.trial.engines:
        return context.trial.engines
    beside = context.trial.beside if context.trial else ()
    # One that takes another's place gets its engines step by step, whoever scales it afterwards.
    if not context.parts and not pairs and seen is not None and whole == [seen] and seen.scaled_by:
        return (with_applied(engine_set(service, resolved, settings, None)), *beside)
    wanted = context.parts or context.engines
    made = engine_deployments(service, resolved, settings, context.children, wanted, fails=context.fails)
    return (*made, *beside)


def _job(service: InferenceService, resolved: Resolved, settings: ClusterSettings, context: ChildContext) -> Object:
    """Return the job. One that another version of the operator made stays as it is: what it found out still holds."""
    wanted = model_job(service, resolved, settings)
    seen = context.children.get(("Job", wanted["metadata"]["name"]))
    fixed = {"spec": {name: wanted["spec"][name] for name in ("template", "podFailurePolicy")}}
    if seen and seen.ours and differences(fixed, seen.body):
        return as_seen(seen.body, "batch/v1", "Job")
    return with_applied(wanted)


def _exposure(service: InferenceService, ranks: int, context: ChildContext) -> Iterator[Object]:
    """Yield what others' controllers act upon, as far as the cluster has them."""
    if service.spec.expose.type == "Ingress" and "Ingress" in context.optional_kinds:
        yield ingress(service)
    has_pool = service.spec.router.inference_pool is not None and "InferencePool" in context.optional_kinds
    if has_pool:
        yield inference_pool(service, ranks)
    if service.spec.expose.type == "Gateway" and "HTTPRoute" in context.optional_kinds:
        yield http_route(service, to_pool=has_pool)
    if service.spec.monitoring.service_monitor and "ServiceMonitor" in context.optional_kinds:
        yield service_monitor(service, ranks)


def _groups(engines: Sequence[Object], context: ChildContext) -> dict[str, int]:
    """Return how many groups each LeaderWorkerSet may have now: those that leave still talk among themselves."""
    found = {}
    for one in filter(is_grouped, engines):
        name = one["metadata"]["name"]
        seen = context.children.get((LEADER_WORKER_SET, name))
        asked = [count for body in (one, seen.body if seen else {}) if (count := replicas_in(body)) is not None]
        found[name] = max(max(asked, default=1) + surge_in(one), context.groups.get(name, 0))
    return found | {name: count for name, count in context.groups.items() if name not in found}


def _budget(service: InferenceService, name: str, component: Component, *more: Component) -> Object:
    """Return how many pods may be taken away at once: of a group one, which is all of it until it serves again."""
    match: Object = {"matchLabels": selector(service.name, component)}
    if more:
        among = {"key": LABEL_COMPONENT, "operator": "In", "values": [component, *more]}
        match = {"matchLabels": {LABEL_SERVICE: service.name}, "matchExpressions": [among]}
    spec = {
        # With one pod it allows one: a budget that allows none keeps nodes from ever being drained.
        "maxUnavailable": 1,
        "selector": match,
        # Pods that do not work may always go; they would hold a drain up for ever.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return child_object("policy/v1 PodDisruptionBudget", service, name, component, spec=spec)


_RBAC = "rbac.authorization.k8s.io"


def access(service: InferenceService) -> tuple[Object, ...]:
    names = names_of(service)
    # By name it cannot be: nobody knows what a slice will be called.
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    # The console shows its status: this one's, and nobody else's.
    own = {"apiGroups": [GROUP], "resources": [PLURAL], "resourceNames": [service.name], "verbs": ["get"]}
    rules = [slices, own] if service.spec.router.console else [slices]
    role = {"apiGroup": _RBAC, "kind": "Role", "name": names.router}
    router = {"kind": "ServiceAccount", "name": names.router, "namespace": service.metadata.namespace}
    return (
        _account(service, names.engine, "engine"),
        _account(service, names.router, "router"),
        child_object(f"{_RBAC}/v1 Role", service, names.router, "router", rules=rules),
        child_object(f"{_RBAC}/v1 RoleBinding", service, names.router, "router", roleRef=role, subjects=[router]),
    )


def _account(service: InferenceService, name: str, component: Component) -> Object:
    # Nobody gets a token by being in the pod; the router's template mounts one into one container.
    return child_object("v1 ServiceAccount", service, name, component, automountServiceAccountToken=False)
