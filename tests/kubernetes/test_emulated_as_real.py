"""The emulated API server does as the real one: the same writes, side by side, end in the same objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import pytest

from tests.fakes.kube_api import KubeApi
from tests.fakes.kube_control_plane import APPLY_PATCH

CONFIG_MAP = "/api/v1/namespaces/{namespace}/configmaps/a"
DEPLOYMENT = "/apis/apps/v1/namespaces/{namespace}/deployments/a"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/a"


@dataclass(frozen=True)
class Step:
    """One write, by whom, and how."""

    method: str
    path: str
    body: Mapping[str, Any]
    manager: str = "ours"
    content_type: str = APPLY_PATCH
    force: bool = True

    @property
    def params(self) -> dict[str, str]:
        force = {"force": str(self.force).lower()} if self.content_type == APPLY_PATCH else {}
        return {"fieldManager": self.manager, **force}


def config_map(data: Mapping[str, str], **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", **metadata}, "data": data}


def deployment(containers: Sequence[Mapping[str, Any]], **spec: Any) -> dict[str, Any]:
    labels = {"app": "a"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": containers}}
    body = {"selector": {"matchLabels": labels}, "template": template, **spec}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}, "spec": body}


def container(name: str, **env: str) -> dict[str, Any]:
    return {"name": name, "image": "x:1", "env": [{"name": key, "value": value} for key, value in env.items()]}


LEASE_OF_A = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {"name": "a"},
    "spec": {"holderIdentity": "a"},
}
MERGE = "application/merge-patch+json"
ENGINE, SIDECAR = container("engine", A="1", B="2"), container("sidecar", C="3")
SEQUENCES: Mapping[str, Sequence[Step]] = {
    "a key that is no longer applied goes": [
        Step("PATCH", CONFIG_MAP, config_map({"a": "1", "b": "2"})),
        Step("PATCH", CONFIG_MAP, config_map({"a": "3"})),
    ],
    "a key of another manager stays": [
        Step("PATCH", CONFIG_MAP, config_map({"a": "1"})),
        Step("PATCH", CONFIG_MAP, config_map({"b": "2"}), manager="other"),
        Step("PATCH", CONFIG_MAP, config_map({}, labels={"x": "y"})),
    ],
    "a conflict is refused without force": [
        Step("PATCH", CONFIG_MAP, config_map({"a": "1"})),
        Step("PATCH", CONFIG_MAP, config_map({"a": "2"}), manager="other", force=False),
        Step("PATCH", CONFIG_MAP, config_map({"a": "1"}), manager="other", force=False),
    ],
    "a manual edit is put right": [
        Step("PATCH", CONFIG_MAP, config_map({"a": "1"})),
        Step("PATCH", CONFIG_MAP, {"data": {"a": "2", "c": "3"}}, manager="kubectl", content_type=MERGE),
        Step("PATCH", CONFIG_MAP, config_map({"a": "1"})),
    ],
    "a merge patch removes with null": [
        Step("PATCH", CONFIG_MAP, config_map({"a": "1", "b": "2"})),
        Step("PATCH", CONFIG_MAP, {"data": {"a": None}}, content_type=MERGE),
    ],
    "a json patch adds and tests": [
        Step("PATCH", CONFIG_MAP, config_map({"a": "1"})),
        Step(
            "PATCH",
            CONFIG_MAP,
            [{"op": "test", "path": "/data/a", "value": "1"}, {"op": "add", "path": "/data/b", "value": "2"}],  # type: ignore[arg-type]
            content_type="application/json-patch+json",
        ),
    ],
    "a second container of another manager stays": [
        Step("PATCH", DEPLOYMENT, deployment([ENGINE])),
        Step("PATCH", DEPLOYMENT, deployment([SIDECAR]), manager="other"),
        Step("PATCH", DEPLOYMENT, deployment([container("engine", B="4")])),
    ],
    "replicas that nobody applies are kept": [
        Step("PATCH", DEPLOYMENT, deployment([ENGINE])),
        Step("PATCH", DEPLOYMENT, {"spec": {"replicas": 4}}, manager="hpa", content_type=MERGE),
        Step("PATCH", DEPLOYMENT, deployment([ENGINE])),
    ],
    "ports are told apart by number": [
        Step("PATCH", DEPLOYMENT, deployment([{**ENGINE, "ports": [{"containerPort": 1}, {"containerPort": 2}]}])),
        Step("PATCH", DEPLOYMENT, deployment([{**ENGINE, "ports": [{"containerPort": 2, "name": "http"}]}])),
    ],
    "an object that is in the way of a stale one": [
        Step("PATCH", LEASE, LEASE_OF_A),
        Step(
            "PUT",
            LEASE,
            {"metadata": {"name": "a", "resourceVersion": "1"}, "spec": {"holderIdentity": "b"}},
            content_type="application/json",
        ),
    ],
    "a status is not written with the rest": [
        Step("PATCH", DEPLOYMENT, {**deployment([ENGINE]), "status": {"replicas": 9}}),
        Step("PATCH", f"{DEPLOYMENT}/status", {"status": {"replicas": 7}}, content_type=MERGE),
    ],
    "a name that is not the path's is refused": [Step("PATCH", CONFIG_MAP, config_map({}, name="b"))],
    "what is absent is not found": [Step("PATCH", CONFIG_MAP, {"data": {"a": "1"}}, content_type=MERGE)],
}


def outcome(status: int, text: str) -> dict[str, Any]:
    """Return what both servers must agree on."""
    document = json.loads(text)
    if status >= 400:
        return {"status": status, "reason": document["reason"]}
    containers = document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    metadata = document["metadata"]
    owners = {(entry["manager"], entry["operation"]) for entry in metadata.get("managedFields", [])}
    return {
        "status": status,
        "labels": metadata.get("labels"),
        "generation": metadata.get("generation"),
        "data": document.get("data") or {},
        "replicas": document.get("spec", {}).get("replicas", 1),
        "env": {one["name"]: one.get("env") for one in containers},
        "ports": {one["name"]: [port["containerPort"] for port in one.get("ports", [])] for one in containers},
        "holder": document.get("spec", {}).get("holderIdentity"),
        "told": document.get("status", {}).get("replicas"),
        "owners": owners - {("kube-controller-manager", "Update")},
    }


def on_real(admin: httpx.Client, namespace: str, steps: Sequence[Step]) -> list[dict[str, Any]]:
    answers = []
    for step in steps:
        headers = {"Content-Type": step.content_type}
        path, body = step.path.format(namespace=namespace), json.dumps(step.body)
        answer = admin.request(step.method, path, params=step.params, headers=headers, content=body)
        answers.append(outcome(answer.status_code, answer.text))
    return answers


async def on_emulated(namespace: str, steps: Sequence[Step]) -> list[dict[str, Any]]:
    answers = []
    async with KubeApi() as api, aiohttp.ClientSession(api.address) as http:
        api.add_namespace(namespace)
        for step in steps:
            headers = {"Content-Type": step.content_type}
            path, body = step.path.format(namespace=namespace), json.dumps(step.body)
            async with http.request(step.method, path, params=step.params, headers=headers, data=body) as answer:
                answers.append(outcome(answer.status, await answer.text()))
    return answers


@pytest.mark.parametrize("name", SEQUENCES)
def test_same_writes_same_objects(admin: httpx.Client, namespace: str, name: str) -> None:
    emulated = asyncio.run(on_emulated(namespace, SEQUENCES[name]))
    assert emulated == on_real(admin, namespace, SEQUENCES[name])
