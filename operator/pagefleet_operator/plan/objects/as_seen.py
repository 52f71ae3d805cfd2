"""Objects that stay as they are, but for a number of pods: as the API server has them, so that nothing else differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagefleet_operator.plan.objects.names_and_labels import Object

_SET_BY_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")


def as_seen(body: Mapping[str, Any], api_version: str, kind: str) -> Object:
    """Return an object as the API server has it, without what only the API server may say.

    Items of lists come from it without the two fields that say what they are.
    """
    metadata = {name: value for name, value in body["metadata"].items() if name not in _SET_BY_SERVER}
    kept = {name: value for name, value in body.items() if name != "status"}
    return {**kept, "apiVersion": api_version, "kind": kind, "metadata": metadata}


def as_scaled(deployment: Mapping[str, Any], replicas: int) -> Object:
    """Return a Deployment as the API server has it, but for its number of pods."""
    body = as_seen(deployment, "apps/v1", "Deployment")
    return {**body, "spec": {**body["spec"], "replicas": replicas}}
