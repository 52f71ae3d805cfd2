"""An InferenceService in the cluster, as its user sees it: spec, conditions, pods, events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from e2e.kubernetes.cluster import Cluster, wait_until

API_VERSION, KIND = "pagefleet.dev/v1alpha1", "InferenceService"
CHILD_KINDS = (
    ("apps/v1", "Deployment"),
    ("apps/v1", "ReplicaSet"),
    ("v1", "Pod"),
    ("v1", "Service"),
    ("v1", "ConfigMap"),
    ("v1", "ServiceAccount"),
    ("v1", "PersistentVolumeClaim"),
    ("batch/v1", "Job"),
    ("policy/v1", "PodDisruptionBudget"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("discovery.k8s.io/v1", "EndpointSlice"),
)
BUILTIN: Mapping[str, Any] = {"uri": "builtin://tiny"}


class Service:
    """One InferenceService by its name; it need not exist yet."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.spec: Mapping[str, Any] = {}
        """As last applied."""

    def apply(self, **spec: Any) -> None:
        """Make the spec this, and no more: what an earlier call said and this one does not is taken away."""
        self.spec = {"model": BUILTIN, **spec}
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": self.name}}
        self.cluster.apply({**document, "spec": self.spec}, self.namespace)

    def edit(self, **spec: Any) -> None:
        """Change these fields of the spec, and leave the others."""
        self.apply(**{**self.spec, **spec})

    def delete(self) -> None:
        self.cluster.delete(API_VERSION, KIND, self.name, self.namespace)

    def get(self) -> dict[str, Any] | None:
        return self.cluster.get(API_VERSION, KIND, self.name, self.namespace)

    @property
    def status(self) -> dict[str, Any]:
        """What the operator says; empty as long as it has said nothing."""
        return dict((self.get() or {}).get("status") or {})

    def condition(self, kind: str) -> dict[str, Any]:
        """Return one condition of the present generation; empty where there is none yet."""
        found = self.get() or {}
        for one in (found.get("status") or {}).get("conditions") or ():
            if one["type"] == kind and one["observedGeneration"] == found["metadata"]["generation"]:
                return dict(one)
        return {}

    def wait_for(self, kind: str, reason: str, timeout_s: float = 90) -> str:
        """Wait until a condition has a reason; returns its message."""
        last: dict[str, Any] = {}

        def so() -> bool:
            last.clear()
            last.update(self.condition(kind))
            return last.get("reason") == reason

        try:
            wait_until(so, f"{self.name}: {kind} is {reason}", timeout_s)
        except AssertionError as error:
            seen = "\n".join(f"{one['type']}: {one['reason']}: {one['message']}" for one in self._conditions())
            raise AssertionError(f"{error}\n{seen}\n{self.cluster.describe_pods(self.namespace)}") from None
        return str(last["message"])

    def wait_until_settled(self, timeout_s: float = 120) -> None:
        """Wait until everything runs as the spec says, and all of it is ready."""
        self.wait_for("Progressing", "Settled", timeout_s)
        self.wait_for("EngineReady", "AllReady", timeout_s)
        self.wait_for("Ready", "Serving", timeout_s)

    @property
    def is_settled(self) -> bool:
        """Whether everything runs as the spec says, and all of it is ready."""
        reasons = [self.condition(kind).get("reason") for kind in ("Progressing", "EngineReady", "Ready")]
        return reasons == ["Settled", "AllReady", "Serving"]

    def role(self, name: str) -> dict[str, Any]:
        """Return counts and revision of `engine`, `prefill`, `decode` or `router`."""
        (found,) = (one for one in self.status["roles"] if one["name"] == name)
        return dict(found)

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Return the pods of a role that are not on their way out; `engine`: engines of both parts, too."""
        kind = "pagefleet.dev/role" if role in ("prefill", "decode") else "app.kubernetes.io/component"
        labels = f"pagefleet.dev/service={self.name},{kind}={role}"
        found = self.cluster.list("v1", "Pod", self.namespace, labels)
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def pod_names(self, role: str) -> set[str]:
        return {str(pod["metadata"]["name"]) for pod in self.pods(role)}

    def what_is_left(self) -> list[str]:
        """Return kind and name of everything with this service's label, whoever made it."""
        label = f"pagefleet.dev/service={self.name}"
        return [
            f"{kind} {one['metadata']['name']}"
            for version, kind in CHILD_KINDS
            for one in self.cluster.list(version, kind, self.namespace, label)
        ]

    def events(self) -> list[dict[str, Any]]:
        """Return the events about the InferenceService itself."""
        return [
            event
            for event in self.cluster.list("v1", "Event", self.namespace)
            if (event["involvedObject"].get("kind"), event["involvedObject"].get("name")) == (KIND, self.name)
        ]

    def _conditions(self) -> list[dict[str, Any]]:
        return list(self.status.get("conditions") or ())
