"""All children of one InferenceService that are wanted now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet_protocol.inference_service import InferenceService

from pagefleet_operator.plan.objects.access import access
from pagefleet_operator.plan.objects.disruption import disruption_budgets
from pagefleet_operator.plan.objects.drift import differences
from pagefleet_operator.plan.objects.engine_deployment import engine_deployment
from pagefleet_operator.plan.objects.exposure import http_route, ingress
from pagefleet_operator.plan.objects.model_claim import model_claim
from pagefleet_operator.plan.objects.model_job import model_job, needs_job
from pagefleet_operator.plan.objects.monitoring import service_monitor
from pagefleet_operator.plan.objects.names_and_labels import Object, names_of
from pagefleet_operator.plan.objects.network_policies import network_policies
from pagefleet_operator.plan.objects.revision import with_applied
from pagefleet_operator.plan.objects.router_deployment import router_deployment
from pagefleet_operator.plan.objects.services import client_service, engine_service, openai_config
from pagefleet_operator.plan.observed import Child, ChildKey
from pagefleet_operator.plan.resolved import Resolved
from pagefleet_operator.plan.settings import ClusterSettings

_SET_BY_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildContext:
    """What was seen, and decided, that children depend on beside the spec."""

    children: Mapping[ChildKey, Child]
    optional_kinds: frozenset[str]
    """Of ServiceMonitor, HTTPRoute and Ingress, those that the cluster knows."""
    model_ready: bool
    """Whether engines would find the model. Until then there are none of this revision, and older ones stay."""
    engines: int
    """How many are wanted."""
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
    fresh = [
        *access(service),
        openai_config(service),
        *network_policies(service, resolved, settings, with_job=with_job),
        client_service(service),
        engine_service(service),
        *disruption_budgets(service),
        *([model_claim(service, resolved)] if resolved.makes_claim else []),
        router_deployment(service, resolved, settings),
        *_exposure(service, context),
    ]
    engines = _engines(service, resolved, settings, context)
    job = _job(service, resolved, settings, context) if with_job else None
    return (*map(with_applied, fresh), *(one for one in (job, engines) if one))


def _engines(
    service: InferenceService, resolved: Resolved, settings: ClusterSettings, context: ChildContext
) -> Object | None:
    seen = context.children.get(("Deployment", names_of(service).engine))
    if context.model_ready and context.engine_allowed:
        scaled = seen is not None and seen.ours and bool(seen.scaled_by)
        return with_applied(engine_deployment(service, resolved, settings, None if scaled else context.engines))
    return _as_seen(seen.body, "apps/v1", "Deployment") if seen and seen.ours else None


def _job(service: InferenceService, resolved: Resolved, settings: ClusterSettings, context: ChildContext) -> Object:
    """Return the job. One that another version of the operator made stays as it is: what it found out still holds."""
    wanted = model_job(service, resolved, settings)
    seen = context.children.get(("Job", wanted["metadata"]["name"]))
    fixed = {"spec": {name: wanted["spec"][name] for name in ("template", "podFailurePolicy")}}
    if seen and seen.ours and differences(fixed, seen.body):
        return _as_seen(seen.body, "batch/v1", "Job")
    return with_applied(wanted)


def _exposure(service: InferenceService, context: ChildContext) -> Iterator[Object]:
    """Yield what others' controllers act upon, as far as the cluster has them."""
    if service.spec.expose.type == "Ingress" and "Ingress" in context.optional_kinds:
        yield ingress(service)
    if service.spec.expose.type == "Gateway" and "HTTPRoute" in context.optional_kinds:
        yield http_route(service)
    if service.spec.monitoring.service_monitor and "ServiceMonitor" in context.optional_kinds:
        yield service_monitor(service)


def _as_seen(body: Mapping[str, Any], api_version: str, kind: str) -> Object:
    """Return an object as the API server has it, without what only the API server may say.

    Items of lists come from it without the two fields that say what they are.
    """
    metadata = {name: value for name, value in body["metadata"].items() if name not in _SET_BY_SERVER}
    kept = {name: value for name, value in body.items() if name != "status"}
    return {**kept, "apiVersion": api_version, "kind": kind, "metadata": metadata}
