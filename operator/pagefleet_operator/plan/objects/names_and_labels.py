"""What the children of an InferenceService are called, how they are labelled, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass
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
PORT_NAME = "http"


@dataclass(frozen=True, slots=True)
class ChildNames:
    """Names of the children of one InferenceService. They stay for ever: under another name a child is another one."""

    service: str
    """Of the Service, Ingress, HTTPRoute and ServiceMonitor too: it is what people see."""
    fleet_key: int = 1
    """Number of the fleet key."""

    @property
    def engine(self) -> str:
        """Of all that belongs to the engines, the headless Service included."""
        return f"{self.service}-engine"

    def part(self, role: PairRole, revision: str = "") -> str:
        """Of what belongs to one part of a disaggregated service, or of its Deployment of one revision."""
        return f"{self.service}-{role}-{revision}" if revision else f"{self.service}-{role}"

    @property
    def router(self) -> str:
        """Of all that belongs to the routers alone."""
        return f"{self.service}-router"

    @property
    def model(self) -> str:
        """Of the claim that is made, and of the model job's NetworkPolicy."""
        return f"{self.service}-model"

    @property
    def openai(self) -> str:
        """Of the ConfigMap for applications."""
        return f"{self.service}-openai"

    @property
    def fleet(self) -> str:
        """Of the Secret with the fleet key."""
        first = f"{self.service}-fleet"
        return first if self.fleet_key == 1 else f"{first}-{self.fleet_key}"

    def model_job(self, revision: str) -> str:
        """Of the job; a job cannot be changed, so another revision has another name."""
        return f"{self.model}-{revision[:8]}"


def names_of(service: InferenceService) -> ChildNames:
    """Return what the children of `service` are called."""
    return ChildNames(service.name, service.spec.fleet_key)


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


def metadata(service: InferenceService, name: str, component: Component) -> Object:
    """Return a child's metadata, by which it goes when its owner goes."""
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
