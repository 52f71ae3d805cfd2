"""The chart in a cluster: installed, upgraded, tested and removed by Helm itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import helm_python
import yaml

from e2e.kubernetes.cluster import Cluster, Images, patience, wait_until

CHART = Path(__file__).parents[2] / "charts" / "pagefleet"
RELEASE = "pagefleet"
OPERATOR = "pagefleet-operator"
DEFINITIONS = ("inferenceservices.pagefleet.dev", "inferenceprofiles.pagefleet.dev")
DEPLOY_TIMEOUT_S = 180
REMOVE_TIMEOUT_S = 60
DEFINITION = ("apiextensions.k8s.io/v1", "CustomResourceDefinition")


class Installation:
    """One release in one namespace, which serves that and more namespaces."""

    def __init__(self, cluster: Cluster, images: Images, namespaces: Sequence[str]) -> None:
        """The release goes into the first of `namespaces`."""
        self.namespace = namespaces[0]
        self._cluster = cluster
        self._config = helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=self.namespace)
        named = {part: _image(getattr(images, part)) for part in Images.__slots__}
        self._values: dict[str, Any] = {
            "images": named,
            "watch": {"namespaces": list(namespaces)},
            # The whole suite has to find room on a small node.
            "operator": {"resources": {"requests": {"cpu": "20m"}}},
        }

    def close(self) -> None:
        self._config.close()

    def install(self) -> str:
        """Install, and wait until the operators are ready; returns the notes."""
        self._take_definitions()
        release = self._config.install(
            CHART, RELEASE, self._values, namespace=self.namespace, wait="watcher", timeout=seconds(DEPLOY_TIMEOUT_S)
        )
        return str(release["notes"])

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """Upgrade with further values, and wait until the new operators are ready."""
        self._config.upgrade(
            CHART,
            RELEASE,
            merged(self._values, values),
            namespace=self.namespace,
            wait="watcher",
            timeout=seconds(DEPLOY_TIMEOUT_S),
        )

    def uninstall(self) -> None:
        self._config.uninstall(RELEASE, wait="watcher", timeout=seconds(REMOVE_TIMEOUT_S), ignore_not_found=True)

    def test(self) -> str:
        """Run what `helm test` runs; returns what it printed."""
        with helm_python.Chart.load(CHART) as chart:
            texts = chart.render(self._values, name=RELEASE, namespace=self.namespace)
        (pod,) = (yaml.safe_load(text) for path, text in texts.items() if "/templates/tests/" in path)
        name = pod["metadata"]["name"]
        self._cluster.apply(pod, self.namespace)
        try:
            ended = wait_until(lambda: self._ended(name), "the test's pod ends")
            said = self._cluster.logs(name, self.namespace)
            assert ended == "Succeeded", said
            return said
        finally:
            self._cluster.delete("v1", "Pod", name, self.namespace)

    def operators(self) -> list[dict[str, Any]]:
        """Return the operator's pods."""
        return self._cluster.list("v1", "Pod", self.namespace, f"app.kubernetes.io/name={OPERATOR}")

    def operator_names(self) -> set[str]:
        return {str(pod["metadata"]["name"]) for pod in self.operators()}

    def restarts(self) -> int:
        """Return how often the operator's containers were started again."""
        states = [state for pod in self.operators() for state in pod["status"]["containerStatuses"]]
        return sum(int(state["restartCount"]) for state in states)

    def leader(self) -> str:
        """Return the name of the pod that holds the Lease; empty where nobody does."""
        lease = self._cluster.get("coordination.k8s.io/v1", "Lease", OPERATOR, self.namespace) or {}
        return str(lease.get("spec", {}).get("holderIdentity") or "").partition("_")[0]

    def scale(self, replicas: int) -> None:
        """Have so many operators, and wait until it is so."""
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": OPERATOR}}
        self._cluster.apply({**deployment, "spec": {"replicas": replicas}}, self.namespace)

        def so() -> bool:
            names = self.operator_names()
            return len(names) == replicas and all(self._cluster.pod_is_ready(one, self.namespace) for one in names)

        wait_until(so, f"{replicas} operators are ready")

    def _ended(self, pod: str) -> str:
        phase = (self._cluster.get("v1", "Pod", pod, self.namespace) or {}).get("status", {}).get("phase")
        return str(phase) if phase in ("Succeeded", "Failed") else ""

    def _take_definitions(self) -> None:
        """Make definitions that an earlier release left behind ours: what `helm install --take-ownership` does."""
        owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": self.namespace}
        version, kind = DEFINITION
        for name in DEFINITIONS:
            if self._cluster.get(version, kind, name):
                metadata = {"name": name, "annotations": owner, "labels": {"app.kubernetes.io/managed-by": "Helm"}}
                self._cluster.apply({"apiVersion": version, "kind": kind, "metadata": metadata})


def seconds(usual: int) -> int:
    return round(usual * patience())


def merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with others laid over them, maps by their entries."""
    both = dict(values)
    for key, value in more.items():
        below = both.get(key)
        both[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return both


def _image(reference: str) -> dict[str, str]:
    if "@" in reference:
        repository, _, digest = reference.partition("@")
        return {"repository": repository, "digest": digest}
    repository, _, tag = reference.rpartition(":")
    return {"repository": repository, "tag": tag}
