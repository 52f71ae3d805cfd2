"""The kinds that the operator reads and writes, and where the API server has them. No discovery is needed for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagefleet_protocol.kube_names import GROUP, KIND, PLURAL, PROFILE_KIND, PROFILE_PLURAL, VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of one API version."""

    kind: str
    plural: str
    version: str
    group: str = ""
    namespaced: bool = True
    optional: bool = False
    """Whether a cluster may do without it."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path under which the API server lists what the version has."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


INFERENCE_SERVICE = Kind(KIND, PLURAL, VERSION, GROUP)
INFERENCE_PROFILE = Kind(PROFILE_KIND, PROFILE_PLURAL, VERSION, GROUP, namespaced=False)
POD = Kind("Pod", "pods", "v1")
EVENT = Kind("Event", "events", "v1")
SECRET = Kind("Secret", "secrets", "v1")
"""Created for the fleet key, never read."""
LEASE = Kind("Lease", "leases", "v1", "coordination.k8s.io")

CHILDREN = (
    Kind("ServiceAccount", "serviceaccounts", "v1"),
    Kind("Role", "roles", "v1", "rbac.authorization.k8s.io"),
    Kind("RoleBinding", "rolebindings", "v1", "rbac.authorization.k8s.io"),
    Kind("NetworkPolicy", "networkpolicies", "v1", "networking.k8s.io"),
    Kind("ConfigMap", "configmaps", "v1"),
    Kind("PersistentVolumeClaim", "persistentvolumeclaims", "v1"),
    Kind("Service", "services", "v1"),
    Kind("Job", "jobs", "v1", "batch"),
    Kind("Deployment", "deployments", "v1", "apps"),
    Kind("LeaderWorkerSet", "leaderworkersets", "v1", "leaderworkerset.x-k8s.io", optional=True),
    Kind("PodDisruptionBudget", "poddisruptionbudgets", "v1", "policy"),
    Kind("Ingress", "ingresses", "v1", "networking.k8s.io", optional=True),
    Kind("HTTPRoute", "httproutes", "v1", "gateway.networking.k8s.io", optional=True),
    Kind("InferencePool", "inferencepools", "v1", "inference.networking.k8s.io", optional=True),
    Kind("ServiceMonitor", "servicemonitors", "v1", "monitoring.coreos.com", optional=True),
)
"""In the order in which they are applied: what pods need comes before the pods."""

BY_NAME: Mapping[str, Kind] = {
    kind.kind: kind for kind in (*CHILDREN, INFERENCE_SERVICE, INFERENCE_PROFILE, POD, EVENT, LEASE, SECRET)
}
"""Every kind by the name that objects state."""


def children_present(optional: frozenset[str]) -> tuple[Kind, ...]:
    """Return the kinds of children of a cluster that has these of the optional ones."""
    return tuple(kind for kind in CHILDREN if not kind.optional or kind.kind in optional)
