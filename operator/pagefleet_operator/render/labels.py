"""How the children of an InferenceService are labelled, and whose they are."""

from __future__ import annotations

from typing import Any

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import PairRole
from pagefleet_protocol.kube_names import (
    API_VERSION,
    FIELD_MANAGER,
    KIND,
    LABEL_COMPONENT,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_ROLE,
    LABEL_SERVICE,
)

from pagefleet_operator.plan.observed import Component

Object = dict[str, Any]
"""A Kubernetes object, or a part of one, as JSON has it."""

PROGRAM = "pagefleet"
PICKER_NAME = "picker"


def labels(service: str, component: Component, role: PairRole | None = None) -> dict[str, str]:
    """Return the labels of a child, and of its pods."""
    return {
        **({LABEL_ROLE: role} if role else {}),
        LABEL_NAME: PROGRAM,
        LABEL_MANAGED_BY: FIELD_MANAGER,
        LABEL_INSTANCE: service,
        LABEL_COMPONENT: component,
        LABEL_SERVICE: service,
    }


def selector(service: str, component: Component, role: PairRole | None = None) -> dict[str, str]:
    """Return what selects the pods. A Deployment's selector can never change, so it holds no more than this."""
    part = {LABEL_ROLE: str(role)} if role else {}
    return {LABEL_COMPONENT: component, LABEL_SERVICE: service, **part}


def child_object(address: str, service: InferenceService, name: str, component: Component, **body: Any) -> Object:
    """Return a child, which goes when its owner goes; `address` is API version and kind, as `apps/v1 Deployment`."""
    api_version, kind = address.split()
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata(service, name, component), **body}


def metadata(service: InferenceService, name: str, component: Component) -> Object:
    return {
        "name": name,
        "namespace": service.metadata.namespace,
        "labels": labels(service.name, component),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": service.name,
                "uid": service.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }
