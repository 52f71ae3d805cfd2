"""An object that stays as it is: as the API server has it, so that nothing differs and nothing is applied."""

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
