"""PodDisruptionBudgets: nodes are drained one engine and one router at a time."""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService

from pagefleet_operator.plan.objects.names_and_labels import Object, metadata, names_of, selector
from pagefleet_operator.plan.observed import Component


def disruption_budgets(service: InferenceService) -> tuple[Object, ...]:
    """Return one budget for the engines and one for the routers."""
    names = names_of(service)
    return _budget(service, names.engine, "engine"), _budget(service, names.router, "router")


def _budget(service: InferenceService, name: str, component: Component) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, name, component),
        "spec": {
            # With one pod it allows one: a budget that allows none keeps nodes from ever being drained.
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(service.name, component)},
            # Pods that do not work may always go; they would hold a drain up for ever.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
