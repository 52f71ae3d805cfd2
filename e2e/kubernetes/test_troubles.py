"""What stands in the way is told by its reason within half a minute, in words that say what to do."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from e2e.kubernetes.cluster import Cluster, wait_until
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.service import Service

TOLD_WITHIN_S = 30
LIGHT = {"resources": {"cpu": "50m", "memory": "256Mi"}}
"""A router that leaves room for others."""
HAS_TO_START_S = 120
"""Where a process has to run and fail before there is anything to tell."""
PRIVILEGED = {"spec": {"containers": [{"name": "engine", "securityContext": {"allowPrivilegeEscalation": True}}]}}

TROUBLES: Mapping[str, tuple[dict[str, Any], str, str, str]] = {
    "no-secret": (
        {"engine": {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "key"}}}]}},
        "EngineReady", "SecretMissing", r"Secret absent, which is not there\. Make it, or correct the name",
    ),
    "no-claim": (
        {"model": {"uri": "pvc://absent/tiny"}},
        "ModelCached", "ClaimMissing", r"absent.*kubectl -n \S+ get pvc",
    ),
    "no-gpu": (
        {"resources": {"gpus": 1}},
        "EngineReady", "InsufficientGPU", r"no node has enough free nvidia\.com/gpu.*lower spec\.replicas",
    ),
    "no-node": (
        {"resources": {"memory": "900Ti"}},
        "EngineReady", "Unschedulable", r"Insufficient memory.*Ask for less",
    ),
    "no-image": (
        {"engine": {"image": "pagefleet.invalid/engine:none"}},
        "EngineReady", "ImagePullFailed", r"pagefleet\.invalid/engine:none.*Check the image's name",
    ),
    "privileged": (
        {"podTemplate": PRIVILEGED},
        "Degraded", "NotAllowed", r"podTemplate.*allowPrivilegeEscalation",
    ),
    "no-profile": (
        {"profileRef": {"name": "absent"}},
        "Degraded", "ProfileNotFound", r"there is no InferenceProfile absent; .*name (none|one of)",
    ),
    "no-ingress": (
        {"expose": {"type": "Gateway", "host": "llm.example.org", "gatewayRef": {"name": "public"}}},
        "Degraded", "KindMissing", r"HTTPRoute",
    ),
}  # fmt: skip


@pytest.fixture
def trouble(cluster: Cluster, installation: Installation, request: pytest.FixtureRequest) -> Iterator[Service]:
    service = Service(cluster, installation.namespace, request.param)
    yield service
    service.delete()


@pytest.mark.parametrize("trouble", TROUBLES, indirect=True)
def test_a_reason_and_a_remedy(trouble: Service) -> None:
    spec, kind, reason, remedy = TROUBLES[trouble.name]
    trouble.apply(**{"router": LIGHT, **spec})
    message = trouble.wait_for(kind, reason, TOLD_WITHIN_S)
    assert re.search(remedy, message), message
    assert trouble.condition("Degraded")["status"] == "True"
    wait_until(lambda: any(event["type"] == "Warning" for event in trouble.events()), "an event tells of it", 10)


def test_a_secret_that_comes_later_is_enough(cluster: Cluster, installation: Installation) -> None:
    service = Service(cluster, installation.namespace, "keyed")
    service.apply(router={**LIGHT, "auth": {"secretRef": {"name": "late", "key": "keys"}}}, replicas=0)
    assert "needs Secret late, which is not there" in service.wait_for("RouterReady", "SecretMissing", TOLD_WITHIN_S)
    (waiting,) = service.pods("router")
    data = {"keys": base64.b64encode(b"one-key\n").decode()}
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "late"}, "data": data}, service.namespace)
    wait_until(lambda: service.pods("router")[0]["status"]["phase"] == "Running", "the pod goes on", 150)
    wait_until(lambda: service.condition("RouterReady").get("reason", "SecretMissing") != "SecretMissing", "so it says")
    assert service.pod_names("router") == {waiting["metadata"]["name"]}, "nobody had to make it anew"
    service.delete()


def test_engines_that_start_and_fail(cluster: Cluster, installation: Installation) -> None:
    small = Service(cluster, installation.namespace, "small")
    lost = Service(cluster, installation.namespace, "lost")
    small.apply(router=LIGHT, resources={"memory": "96Mi"})
    lost.apply(router=LIGHT, model={"uri": "file:///models/absent"})
    message = small.wait_for("EngineReady", "OutOfMemory", HAS_TO_START_S)
    assert "Raise spec.resources.memory" in message
    message = lost.wait_for("EngineReady", "ModelLoadFailed", HAS_TO_START_S)
    assert "/models/absent" in message
    assert "no such folder" in message
    small.delete()
    lost.delete()


def test_a_quota_is_told(cluster: Cluster, installation: Installation, namespaces: tuple[str, str, str]) -> None:
    _, second, _ = namespaces
    hard = {"spec": {"hard": {"pods": "1"}}}
    cluster.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, **hard}, second)
    crowded = Service(cluster, second, "crowded")
    crowded.apply(router=LIGHT, replicas=2)

    def told() -> str:
        found = (crowded.condition(kind) for kind in ("EngineReady", "RouterReady"))
        return next((one["message"] for one in found if one.get("reason") == "QuotaExceeded"), "")

    assert "ResourceQuota raised" in wait_until(told, "the quota is told", TOLD_WITHIN_S)
    crowded.delete()
    cluster.delete("v1", "ResourceQuota", "small", second)


def test_one_name_in_two_namespaces(cluster: Cluster, served: Service, namespaces: tuple[str, str, str]) -> None:
    _, second, _ = namespaces
    served.wait_for("Ready", "Serving", 180)
    pods = served.pod_names("engine") | served.pod_names("router")
    twin = Service(cluster, second, served.name)
    twin.apply(router=LIGHT, replicas=0)
    twin.wait_for("Ready", "ScaledToZero")
    assert twin.status["url"] == f"http://tiny.{second}.svc.cluster.local"
    twin.delete()
    wait_until(lambda: not twin.what_is_left(), "nothing of it is left", 60)
    assert served.is_settled
    assert served.pod_names("engine") | served.pod_names("router") == pods, "the other of that name is untouched"


def test_a_namespace_that_is_deleted_disturbs_nobody(
    cluster: Cluster, installation: Installation, served: Service, namespaces: tuple[str, str, str]
) -> None:
    *_, third = namespaces
    doomed = Service(cluster, third, "doomed")
    doomed.apply(router=LIGHT)
    wait_until(lambda: len(doomed.pods("engine")) == 1, "it has an engine")
    cluster.delete("v1", "Namespace", third)
    wait_until(lambda: not cluster.get("v1", "Namespace", third), "the namespace is gone", 90)

    served.apply(rollout={"progressSeconds": 1400})
    served.wait_until_settled(60)
    deployment = cluster.get("apps/v1", "Deployment", f"{served.name}-engine", served.namespace) or {}
    assert deployment["spec"]["progressDeadlineSeconds"] == 1400, "the operator works on"
    served.apply()
    assert all(cluster.pod_is_ready(name, installation.namespace) for name in installation.operator_names())
