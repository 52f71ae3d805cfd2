"""The kinds of objects that the emulated API server knows. No test in here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagefleet_protocol.kube_names import GROUP, VERSION

_COUNTING = frozenset(
    {
        GROUP,
        "apiextensions.k8s.io",
        "apps",
        "batch",
        "gateway.networking.k8s.io",
        "leaderworkerset.x-k8s.io",
        "monitoring.coreos.com",
        "networking.k8s.io",
        "policy",
    }
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What discovery says about one kind of object."""

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True
    has_status: bool = False

    @property
    def has_generation(self) -> bool:
        """Whether changes of the specification are counted: not those of configuration, accounts and Services."""
        return self.group in _COUNTING or self.name == "Pod"

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


def _kinds(api_version: str, names: str) -> Iterator[Kind]:
    """Read `Name` or `Name/status` or `Name/status=irregularplurals`, separated by spaces."""
    group, _, version = api_version.rpartition("/")
    for text in names.split():
        written, _, plural = text.partition("=")
        name, _, subresource = written.partition("/")
        regular = name.lower() + ("es" if name.endswith("s") else "s")
        yield Kind(group, version, plural or regular, name, has_status=subresource == "status")


NAMESPACE = Kind("", "v1", "namespaces", "Namespace", namespaced=False, has_status=True)
BUILT_IN: tuple[Kind, ...] = (
    NAMESPACE,
    Kind("", "v1", "nodes", "Node", namespaced=False, has_status=True),
    Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False),
    *_kinds("v1", "ConfigMap Event PersistentVolumeClaim/status Pod/status ResourceQuota/status Secret"),
    *_kinds("v1", "Service/status ServiceAccount"),
    *_kinds("apps/v1", "Deployment/status ReplicaSet/status StatefulSet/status"),
    *_kinds("batch/v1", "Job/status"),
    *_kinds("coordination.k8s.io/v1", "Lease"),
    *_kinds("discovery.k8s.io/v1", "EndpointSlice"),
    *_kinds("events.k8s.io/v1", "Event"),
    *_kinds("networking.k8s.io/v1", "Ingress/status NetworkPolicy=networkpolicies"),
    *_kinds("policy/v1", "PodDisruptionBudget/status"),
    *_kinds("rbac.authorization.k8s.io/v1", "Role RoleBinding"),
)
PAGEFLEET: tuple[Kind, ...] = (
    *_kinds(f"{GROUP}/{VERSION}", "InferenceService/status"),
    Kind(GROUP, VERSION, "inferenceprofiles", "InferenceProfile", namespaced=False),
)
SERVICE_MONITOR = Kind("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor")
HTTP_ROUTE = Kind("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute", has_status=True)

LEADER_WORKER_SET = Kind("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet", has_status=True)


@dataclass(frozen=True, slots=True)
class Target:
    """What the path of a request names: all objects of a kind, or one, or a part of one."""

    kind: Kind
    namespace: str | None
    name: str | None
    subresource: str


def find_target(path: str, kinds: Iterable[Kind]) -> Target | None:
    """Return what a path names; None when no kind is served there."""
    parts = path.strip("/").split("/")
    if parts[:1] == ["api"]:
        group, version, rest = "", parts[1:2], parts[2:]
    elif parts[:1] == ["apis"]:
        group, version, rest = "".join(parts[1:2]), parts[2:3], parts[3:]
    else:
        return None
    namespace = None
    if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in {"status", "finalize"}:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = (*rest[:3], *[""] * 3)[:3]
    for kind in kinds:
        if (kind.group, [kind.version], kind.plural) == (group, version, plural):
            return Target(kind, namespace, name or None, subresource)
    return None
