"""A real cluster as the end-to-end tests see it: objects, pods' logs, and a waiting that says what it waited for."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config, dynamic
from kubernetes.client.exceptions import ApiException

Document = Mapping[str, Any]
T = TypeVar("T")
POD_SECURITY = "pod-security.kubernetes.io/enforce"


@dataclass(frozen=True, slots=True)
class Images:
    """Names of our images that the cluster's nodes can get."""

    engine: str
    router: str
    operator: str


class Cluster:
    """The cluster that a kubeconfig names, with the rights of its user. Close it after use."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.connection: client.ApiClient = config.new_client_from_config(config_file=str(kubeconfig))
        self._dynamic = dynamic.DynamicClient(self.connection)
        self._core = client.CoreV1Api(self.connection)

    def close(self) -> None:
        self.connection.close()

    def apply(self, document: Document, namespace: str | None = None) -> dict[str, Any]:
        """Server-side apply; returns the object as it is stored now."""
        resource = self._resource(document["apiVersion"], document["kind"])
        found = resource.server_side_apply(
            body=dict(document), namespace=namespace, field_manager="e2e", force_conflicts=True
        )
        return dict(found.to_dict())

    def create(self, document: Document, namespace: str | None = None) -> None:
        """Make a new object; raises ApiException with status 409 where there is one of that name."""
        self._resource(document["apiVersion"], document["kind"]).create(body=dict(document), namespace=namespace)

    def get(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        """Return an object, or None."""
        try:
            return dict(self._resource(api_version, kind).get(name=name, namespace=namespace).to_dict())
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def list(
        self, api_version: str, kind: str, namespace: str | None = None, labels: str | None = None
    ) -> list[dict[str, Any]]:
        found = self._resource(api_version, kind).get(namespace=namespace, label_selector=labels)
        return [dict(item.to_dict()) for item in found.items]

    def delete(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> None:
        """Delete an object; what is gone already is fine."""
        try:
            self._resource(api_version, kind).delete(name=name, namespace=namespace)
        except ApiException as error:
            if error.status != 404:
                raise

    def logs(self, pod: str, namespace: str, container: str | None = None, previous: bool = False) -> str:
        return str(self._core.read_namespaced_pod_log(pod, namespace, container=container, previous=previous))

    @contextlib.contextmanager
    def new_namespace(self, pod_security: str = "restricted") -> Iterator[str]:
        """Make a namespace for one test, and let go of it."""
        name = f"pagefleet-e2e-{secrets.token_hex(3)}"
        metadata = {"name": name, "labels": {POD_SECURITY: pod_security}}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        try:
            yield name
        finally:
            self.delete("v1", "Namespace", name)

    def pod_is_ready(self, name: str, namespace: str) -> bool:
        pod = self.get("v1", "Pod", name, namespace) or {}
        conditions = pod.get("status", {}).get("conditions") or ()
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def describe_pods(self, namespace: str) -> str:
        """Return what is worth knowing when a test fails: pods, their states, the warnings of the namespace."""
        lines = []
        for pod in self.list("v1", "Pod", namespace):
            states = [status.get("state") for status in pod["status"].get("containerStatuses") or ()]
            lines.append(f"pod {pod['metadata']['name']}: {pod['status'].get('phase')} {states}")
        for event in self.list("v1", "Event", namespace):
            if event.get("type") != "Normal":
                lines.append(f"{event['involvedObject']['name']}: {event.get('reason')}: {event.get('message')}")
        return "\n".join(lines)

    def _resource(self, api_version: str, kind: str) -> Any:
        return self._dynamic.resources.get(api_version=api_version, kind=kind)


def patience() -> float:
    """Return how much longer than elsewhere things may take here: others may have the node's cores meanwhile."""
    return float(os.environ.get("PAGEFLEET_E2E_PATIENCE", "1"))


def wait_until(look: Callable[[], T], what: str, timeout_s: float = 60) -> T:
    """Poll until `look` gives something truthy, and return it; after `timeout_s` the test fails, naming `what`.

    That many seconds are meant for two busy cores: `patience` multiplies them.
    """
    timeout_s *= patience()
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not so after {timeout_s:g} s"
        time.sleep(0.2)
    return found


def restricted_pod(name: str, container: Document, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a pod that a `restricted` namespace admits: nobody, read-only root, an empty /tmp."""
    confined = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    **container,
                    "securityContext": confined,
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            "terminationGracePeriodSeconds": 1,
        },
    }
