"""A child as it is kept between two looks: compact, and with what only its managedFields tell already read out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pagefleet_protocol.kube_names import FIELD_MANAGER

from pagefleet_operator.plan.observed import Child

_NOISE = frozenset({"managedFields", "resourceVersion"})
"""Of the metadata: changes whenever anything changes, so that two equal objects would not look equal."""


@dataclass(frozen=True, slots=True)
class StoredChild:
    """One object, as JSON: a dict of it takes ten times the memory."""

    uid: str
    owner: str
    """Uid of its controller; empty for none."""
    scaled_by: str
    data: bytes

    def open(self, service_uid: str) -> Child:
        """Return it as the plan wants it."""
        return Child(body=msgspec.json.decode(self.data), ours=self.owner == service_uid, scaled_by=self.scaled_by)


def stored_child(body: Mapping[str, Any], kind: str, api_version: str) -> StoredChild:
    """Make the compact form. Lists of objects leave out kind and version, so they are told."""
    metadata: Mapping[str, Any] = body["metadata"]
    kept = {
        **body,
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {name: value for name, value in metadata.items() if name not in _NOISE},
    }
    return StoredChild(
        uid=metadata.get("uid", ""),
        owner=controller_of(metadata),
        scaled_by=_scaled_by(metadata) if kind == "Deployment" else "",
        data=msgspec.json.encode(kept),
    )


def controller_of(metadata: Mapping[str, Any]) -> str:
    """Return the uid of the object's controller; empty for none."""
    owners = metadata.get("ownerReferences") or ()
    return next((str(one["uid"]) for one in owners if one.get("controller")), "")


def _scaled_by(metadata: Mapping[str, Any]) -> str:
    for entry in metadata.get("managedFields") or ():
        fields = (entry.get("fieldsV1") or {}).get("f:spec") or {}
        manager = str(entry.get("manager", ""))
        if entry.get("subresource") == "scale" and "f:replicas" in fields and is_autoscaler(manager):
            return manager
    return ""


_BY_HAND = ("kubectl", "k9s", "lens")
"""How programs call themselves that do what a person tells them; they are to scale the InferenceService."""


def is_autoscaler(manager: str) -> bool:
    """Whether a manager of a Deployment's scale subresource decides by itself, as a HorizontalPodAutoscaler's does."""
    return manager != FIELD_MANAGER and not manager.lower().startswith(_BY_HAND)
