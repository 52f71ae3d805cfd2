"""Who else writes: kubectl scale, autoscalers, and hands that meant well."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from e2e.kubernetes.cluster import Cluster, wait_until
from e2e.kubernetes.load import Load
from e2e.kubernetes.service import API_VERSION, KIND, Service

GROUP, VERSION = API_VERSION.split("/")


def scale(cluster: Cluster, service: Service, replicas: int) -> None:
    """What `kubectl scale pfis` does."""
    client.CustomObjectsApi(cluster.connection).patch_namespaced_custom_object_scale(
        GROUP, VERSION, service.namespace, "inferenceservices", service.name, {"spec": {"replicas": replicas}}
    )


def test_scaling_takes_engines_away_in_good_order(cluster: Cluster, fleet: Service, load: Load) -> None:
    scale(cluster, fleet, 1)
    wait_until(lambda: len(fleet.pods("engine")) == 1, "one engine is left")
    fleet.wait_until_settled()
    assert fleet.status["ready"] == "1/1"
    assert load.go_on().failures == ()
    scale(cluster, fleet, 2)
    fleet.wait_until_settled()
    assert fleet.status["ready"] == "2/2"
    assert load.go_on().failures == ()


def test_no_engines_and_back(cluster: Cluster, served: Service) -> None:
    scale(cluster, served, 0)
    message = served.wait_for("Ready", "ScaledToZero")
    assert "set it to 1 or more" in message
    wait_until(lambda: not served.pods("engine"), "no engine is left")
    scale(cluster, served, 1)
    served.wait_for("Ready", "Serving", 120)


def test_an_autoscaler_accepts_the_resource(cluster: Cluster, served: Service) -> None:
    target = {"apiVersion": API_VERSION, "kind": KIND, "name": served.name}
    metric = {
        "type": "Resource",
        "resource": {"name": "memory", "target": {"type": "AverageValue", "averageValue": "64Gi"}},
    }
    spec = {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 2, "metrics": [metric]}
    autoscaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": served.name}}
    cluster.apply({**autoscaler, "spec": spec}, served.namespace)

    def able() -> dict[str, Any] | None:
        found = cluster.get("autoscaling/v2", "HorizontalPodAutoscaler", served.name, served.namespace) or {}
        conditions = {one["type"]: one for one in found.get("status", {}).get("conditions") or ()}
        return found["status"] if conditions.get("AbleToScale", {}).get("status") == "True" else None

    status = wait_until(able, "the autoscaler reads the scale")
    assert status is not None
    assert status["currentReplicas"] == 1
    cluster.delete("autoscaling/v2", "HorizontalPodAutoscaler", served.name, served.namespace)


@pytest.mark.parametrize(
    ("version", "kind", "name", "edit"),
    [
        ("v1", "Service", "tiny", {"spec": {"selector": {"app": "mine"}}}),
        ("apps/v1", "Deployment", "tiny-router", {"spec": {"replicas": 3}}),
        ("v1", "ConfigMap", "tiny-openai", {"data": {"OPENAI_MODEL": "other"}}),
        ("policy/v1", "PodDisruptionBudget", "tiny-engine", {"spec": {"maxUnavailable": 7}}),
    ],
)
def test_edits_by_hand_are_put_right(
    cluster: Cluster, served: Service, version: str, kind: str, name: str, edit: dict[str, Any]
) -> None:
    served.wait_until_settled()
    before = cluster.get(version, kind, name, served.namespace)
    assert before is not None
    (field, wrong), *_ = edit.items()
    metadata = {"name": name, "labels": {"team": "search"}}
    cluster.apply({"apiVersion": version, "kind": kind, "metadata": metadata, **edit}, served.namespace)

    def right() -> dict[str, Any] | None:
        now = cluster.get(version, kind, name, served.namespace) or {}
        return now if all(now.get(field, {}).get(key) == before[field][key] for key in wrong) else None

    now = wait_until(right, f"{kind} {name} is put right", 30)
    assert now is not None
    assert now["metadata"]["labels"]["team"] == "search", "what we do not own we do not touch"
    assert now["metadata"]["uid"] == before["metadata"]["uid"]


@pytest.mark.parametrize(
    ("version", "kind", "name"), [("v1", "Service", "tiny"), ("apps/v1", "Deployment", "tiny-router")]
)
def test_what_was_deleted_comes_back(cluster: Cluster, served: Service, version: str, kind: str, name: str) -> None:
    served.wait_until_settled()
    before = cluster.get(version, kind, name, served.namespace)
    assert before is not None
    cluster.delete(version, kind, name, served.namespace)

    def back() -> bool:
        now = cluster.get(version, kind, name, served.namespace)
        return now is not None and now["metadata"]["uid"] != before["metadata"]["uid"]

    wait_until(back, f"{kind} {name} is there again", 30)
    served.wait_until_settled()


def test_a_paused_service_is_left_alone(cluster: Cluster, fleet: Service) -> None:
    fleet.edit(paused=True)
    fleet.wait_for("Progressing", "Paused")
    name = f"{fleet.name}-openai"
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"OPENAI_MODEL": "mine"}}
    cluster.apply(document, fleet.namespace)
    assert fleet.status["mode"] == "Paused"
    fleet.edit(rollout={"drainSeconds": 20, "progressSeconds": 1500})
    wait_until(lambda: fleet.condition("Progressing").get("reason") == "Paused", "it is looked at, and left alone")
    found = cluster.get("v1", "ConfigMap", name, fleet.namespace) or {}
    assert found["data"]["OPENAI_MODEL"] == "mine"
    fleet.edit(paused=False)
    fleet.wait_until_settled()
    wait_until(
        lambda: (cluster.get("v1", "ConfigMap", name, fleet.namespace) or {})["data"]["OPENAI_MODEL"] == fleet.name,
        "the pause is over",
    )
