"""Models that come from somewhere: a claim that holds one, and a hub that has to be asked."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.kubernetes.cluster import Cluster, Images, restricted_pod, wait_until
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.node import copy_to_node, remove_from_node
from e2e.kubernetes.service import Service
from e2e.kubernetes.test_troubles import LIGHT
from e2e.kubernetes.tunnel import ServiceTunnel
from tiny.dataset import Exchange

ROOT = Path(__file__).parents[2]
HUB_PROGRAM = "e2e/kubernetes/hub_pod.py"
HUB_FILES = (HUB_PROGRAM, "e2e/kubernetes/relay.py", "tests/fakes/hub_server.py", "tests/fakes/http_faults.py")
REPOSITORY = "pagefleet/tiny"
CLAIM = "models"
MODEL_IN_TIME_S = 240


@pytest.fixture(scope="module")
def claim(cluster: Cluster, images: Images, privileged: str, installation: Installation) -> Iterator[str]:
    """A claim whose volume is a folder of the node, with the embedded model in `tiny`, and room to download."""
    name = f"pagefleet-e2e-{secrets.token_hex(3)}"
    folder = f"/var/tmp/{name}"
    copy_to_node(cluster, images.engine, privileged, ("pagefleet_engine", "builtin/tiny"), folder)
    access = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        **access,
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": folder},
        "claimRef": {"namespace": installation.namespace, "name": CLAIM},
    }
    cluster.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume})
    wanted = {**access, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": wanted}
    cluster.apply(claim, installation.namespace)
    yield CLAIM
    cluster.delete("v1", "PersistentVolumeClaim", CLAIM, installation.namespace)
    cluster.delete("v1", "PersistentVolume", name)
    remove_from_node(cluster, images.operator, privileged, folder)


@pytest.fixture(scope="module")
def hub(cluster: Cluster, images: Images, installation: Installation) -> Iterator[str]:
    """A hub in the cluster, `http://hub:8000`; yields the commit of its one repository."""
    namespace = installation.namespace
    keys = {path: path.replace("/", ".") for path in HUB_FILES}
    data = {keys[path]: (ROOT / path).read_text() for path in HUB_FILES}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hub"}, "data": data}, namespace)
    container = {
        "image": images.engine,
        "command": ["python", f"/srv/{HUB_PROGRAM}", REPOSITORY],
        "env": [{"name": "PYTHONPATH", "value": "/srv"}],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
    }
    pod = restricted_pod("hub", container, {"app": "hub"})
    items = [{"key": key, "path": path} for path, key in keys.items()]
    pod["spec"]["volumes"].append({"name": "program", "configMap": {"name": "hub", "items": items}})
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "program", "mountPath": "/srv"})
    cluster.apply(pod, namespace)
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "hub"}}
    cluster.apply({**service, "spec": {"selector": {"app": "hub"}, "ports": [{"port": 8000}]}}, namespace)
    wait_until(partial(cluster.pod_is_ready, "hub", namespace), "the hub is ready")
    yield cluster.logs("hub", namespace).strip()
    for kind in ("Pod", "Service", "ConfigMap"):
        cluster.delete("v1", kind, "hub", namespace)


@pytest.fixture
def service(cluster: Cluster, installation: Installation, request: pytest.FixtureRequest) -> Iterator[Service]:
    made = Service(cluster, installation.namespace, request.param)
    yield made
    made.delete()
    wait_until(lambda: not made.what_is_left(), "nothing of it is left", 60)


@pytest.mark.parametrize("service", ["claimed"], indirect=True)
def test_a_claim_that_holds_the_model(
    cluster: Cluster, images: Images, service: Service, claim: str, exchanges: Sequence[Exchange]
) -> None:
    service.apply(router=LIGHT, model={"uri": f"pvc://{claim}/tiny"})
    service.wait_for("Ready", "Serving", MODEL_IN_TIME_S)
    resolved = service.status["resolved"]
    assert 0 < resolved["memory"]["weights"] < 0.1, "GiB of seven MB"
    assert resolved["memory"]["kv"] >= 0
    assert resolved["maxModelLen"] > 0, "found in the model's own files"
    answers(cluster, images, service, exchanges[0])


@pytest.mark.parametrize("service", ["cached"], indirect=True)
def test_a_hub_and_a_claim_to_download_into(
    cluster: Cluster, images: Images, service: Service, claim: str, hub: str, exchanges: Sequence[Exchange]
) -> None:
    model = {"uri": f"hf://{REPOSITORY}", "endpoint": f"http://hub.{service.namespace}.svc:8000"}
    service.apply(router=LIGHT, model=model, cache={"type": "pvc", "claim": claim})
    told = set()

    def cached() -> bool:
        told.add(service.condition("ModelCached").get("reason"))
        return "Cached" in told

    wait_until(cached, "the model is in the claim", MODEL_IN_TIME_S)
    assert told & {"Inspecting", "Downloading"}
    service.wait_for("Ready", "Serving", MODEL_IN_TIME_S)
    assert service.status["resolved"]["revision"] == hub
    answers(cluster, images, service, exchanges[0])


@pytest.mark.parametrize("service", ["fetched"], indirect=True)
def test_a_hub_and_no_cache(
    cluster: Cluster, images: Images, service: Service, hub: str, exchanges: Sequence[Exchange]
) -> None:
    model = {"uri": f"hf://{REPOSITORY}", "revision": hub, "endpoint": f"http://hub.{service.namespace}.svc:8000"}
    service.apply(router=LIGHT, model=model)
    service.wait_for("Ready", "Serving", MODEL_IN_TIME_S)
    assert service.condition("ModelCached")["reason"] == "NotNeeded"
    answers(cluster, images, service, exchanges[0])


@pytest.mark.parametrize("service", ["missing"], indirect=True)
def test_a_hub_that_has_no_such_model(service: Service, hub: str) -> None:
    service.apply(
        router=LIGHT, model={"uri": "hf://pagefleet/none", "endpoint": f"http://hub.{service.namespace}.svc:8000"}
    )
    message = service.wait_for("ModelCached", "ModelNotFound", 90)
    assert "pagefleet/none" in message


def answers(cluster: Cluster, images: Images, service: Service, exchange: Exchange) -> None:
    """Ask what the model knows by heart."""
    body: dict[str, Any] = {"model": service.name, "messages": exchange.messages, "temperature": 0}
    with ServiceTunnel(cluster, images.operator, service.namespace, service.name) as tunnel:
        answer = httpx.post(f"{tunnel.url}/v1/chat/completions", json=body, trust_env=False, timeout=30)
    assert answer.json()["choices"][0]["message"]["content"] == exchange.answer
