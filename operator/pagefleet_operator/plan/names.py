"""What the children of an InferenceService are called.

Names of models have dots, those of Services have none. Where the name has one, children are called after its first
characters, with `-` for each dot, and a digest of the whole: an end that no InferenceService's own name may have. So no
two services share a child's name, and no stem is longer than the longest name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import PairRole

_BEGINNING = 28
"""Characters of a name with a dot that its children keep: with the digest as many as a name may have."""


@dataclass(frozen=True, slots=True)
class ChildNames:
    """Names of the children of one InferenceService. They stay for ever: under another name a child is another one."""

    service: str
    """Of the Service, Ingress, HTTPRoute, InferencePool and ServiceMonitor too: it is what people see."""
    fleet_key: int = 1
    """Number of the fleet key."""

    @property
    def engine(self) -> str:
        """Of all that belongs to the engines, the headless Service included."""
        return f"{self.service}-engine"

    @property
    def follower(self) -> str:
        """Of what belongs to pods of engines on several nodes that serve nobody."""
        return f"{self.engine}-follower"

    def trial(self, revision: str) -> str:
        """Of the Deployment, or LeaderWorkerSet, of engines of a revision that is tried out."""
        return f"{self.engine}-{revision}"

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
    return ChildNames(child_stem(service.name), service.spec.fleet_key)


def child_stem(name: str) -> str:
    """Return what names of a service's children begin with: a DNS label of at most 40 characters."""
    if "." not in name:
        return name
    return f"{name.replace('.', '-')[:_BEGINNING]}-x{hashlib.sha256(name.encode()).hexdigest()[:10]}"
