"""What the operator renders, applied to a real API server: all of it is accepted, and comes back as it was wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagefleet_operator.plan.observed import Child
from pagefleet_operator.render.drift import differences
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_router.discovery.kubernetes import KubernetesSource, ServiceRef
from pagefleet_router.discovery.slice_api import ApiAccess

from tests.fakes import leader_worker_set_definition
from tests.fakes.kube_control_plane import ControlPlane, apply, wait_until
from tests.kubernetes.conftest import CRD_PATH, is_established
from tests.operator.render.service_table import TABLE, by_key

ABSENT_KINDS = frozenset({"HTTPRoute", "InferencePool", "ServiceMonitor"})
"""They belong to others; no test here installs them."""
PATHS: Mapping[str, str] = {
    "ServiceAccount": "/api/v1/{}/serviceaccounts",
    "ConfigMap": "/api/v1/{}/configmaps",
    "Service": "/api/v1/{}/services",
    "PersistentVolumeClaim": "/api/v1/{}/persistentvolumeclaims",
    "Deployment": "/apis/apps/v1/{}/deployments",
    "LeaderWorkerSet": "/apis/leaderworkerset.x-k8s.io/v1/{}/leaderworkersets",
    "Job": "/apis/batch/v1/{}/jobs",
    "Role": "/apis/rbac.authorization.k8s.io/v1/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/{}/rolebindings",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/{}/networkpolicies",
    "Ingress": "/apis/networking.k8s.io/v1/{}/ingresses",
    "PodDisruptionBudget": "/apis/policy/v1/{}/poddisruptionbudgets",
}


def path_of(child: Mapping[str, Any]) -> str:
    metadata = child["metadata"]
    return PATHS[child["kind"]].format(f"namespaces/{metadata['namespace']}") + f"/{metadata['name']}"


@pytest.fixture
def restricted(admin: httpx.Client, namespace: str) -> str:
    """A namespace that takes no pod with more rights than it needs."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    patch = {"metadata": {"labels": labels}}
    headers = {"Content-Type": "application/merge-patch+json"}
    admin.patch(f"/api/v1/namespaces/{namespace}", json=patch, headers=headers).raise_for_status()
    return namespace


@pytest.fixture(scope="module")
def groups(admin: httpx.Client) -> Iterator[None]:
    """LeaderWorkerSets, which the API server knows meanwhile."""
    path = f"{CRD_PATH}/{leader_worker_set_definition.NAME}"
    apply(admin, path, leader_worker_set_definition.definition()).raise_for_status()
    wait_until(lambda: is_established(admin, leader_worker_set_definition.NAME))
    yield
    admin.delete(path)
    wait_until(lambda: admin.get(path).status_code == 404)


@pytest.fixture
def owner(admin: httpx.Client, established: tuple[str, ...], restricted: str, groups: None) -> str:
    """The uid of an InferenceService; without one, its children are collected as garbage."""
    assert established
    body = {
        "apiVersion": "pagefleet.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "qwen"},
        "spec": {"model": {"uri": "builtin://tiny"}},
    }
    path = f"/apis/pagefleet.dev/v1alpha1/namespaces/{restricted}/inferenceservices"
    return str(admin.post(path, json=body).raise_for_status().json()["metadata"]["uid"])


@pytest.mark.parametrize("name", TABLE)
def test_every_child_is_accepted_and_comes_back_as_it_was_wanted(
    name: str, admin: httpx.Client, restricted: str, owner: str
) -> None:
    case = replace(TABLE[name], namespace=restricted, uid=owner)
    wanted = by_key(replace(case, kinds=case.kinds - ABSENT_KINDS).wanted())
    seen = {}
    for key, child in wanted.items():
        answer = apply(admin, path_of(child), child, "pagefleet-operator")
        assert answer.status_code == 201, f"{key}: {answer.text}"
        seen[key] = answer.json()
        expected = "restricted volume types" if name == "gs-hostpath" and key == ("Deployment", "qwen-engine") else ""
        assert expected in answer.headers.get("Warning", "")
        assert expected or "Warning" not in answer.headers, answer.headers["Warning"]
    assert {key: differences(child, seen[key]) for key, child in wanted.items()} == dict.fromkeys(wanted, ())
    again = replace(case, kinds=case.kinds - ABSENT_KINDS, children=children_of(seen))
    assert by_key(again.wanted()) == wanted
    for key, child in wanted.items():
        answer = apply(admin, path_of(child), child, "pagefleet-operator")
        assert answer.status_code == 200, f"{key}: {answer.text}"
        before, after = seen[key]["metadata"], answer.json()["metadata"]
        assert after.get("generation") == before.get("generation"), key


def children_of(seen: Mapping[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], Child]:
    return {key: Child(body, ours=True) for key, body in seen.items()}


def pods(name: str, namespace: str, uid: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for child in replace(TABLE[name], namespace=namespace, uid=uid).wanted():
        if child["kind"] in ("Deployment", "Job"):
            yield child["metadata"]["name"], child["spec"]["template"]
        elif child["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                yield f"{child['metadata']['name']}-{part.lower()}", child["spec"]["leaderWorkerTemplate"][part]


@pytest.fixture(scope="module")
def classes(admin: httpx.Client) -> None:
    """What a case's podTemplate and its profile name: pods of a class that does not exist are refused."""
    for path, body in (
        ("scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "prompts"}, "value": 10}),
        ("scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "large"}, "value": 10}),
        ("node.k8s.io/v1/runtimeclasses", {"metadata": {"name": "nvidia"}, "handler": "nvidia"}),
    ):
        answer = admin.post(f"/apis/{path}", json=body)
        assert answer.status_code in (201, 409), answer.text


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("name", sorted(set(TABLE) - {"gs-hostpath", "gpu-hf-pvc", "pod-template"}))
def test_pod_security_restricted_lets_every_pod_in(name: str, admin: httpx.Client, restricted: str, owner: str) -> None:
    for account in ("qwen-engine", "qwen-router"):
        admin.post(f"/api/v1/namespaces/{restricted}/serviceaccounts", json={"metadata": {"name": account}})
    for pod_name, template in pods(name, restricted, owner):
        body = {"metadata": {**template["metadata"], "name": pod_name}, "spec": template["spec"]}
        answer = admin.post(f"/api/v1/namespaces/{restricted}/pods", params={"dryRun": "All"}, json=body)
        assert answer.status_code == 201, f"{pod_name}: {answer.text}"


def test_a_field_that_was_wanted_once_goes_with_the_next_apply(
    admin: httpx.Client, restricted: str, owner: str
) -> None:
    before = replace(TABLE["pod-template"], namespace=restricted, uid=owner)
    after = before.changed(engine=None, podTemplate=None)
    key = ("Deployment", "qwen-engine")
    old, new = by_key(before.wanted())[key], by_key(after.wanted())[key]
    seen = apply(admin, path_of(old), old, "pagefleet-operator").raise_for_status().json()
    assert "metadata.annotations.pagefleet.dev/applied" in differences(new, seen)
    seen = apply(admin, path_of(new), new, "pagefleet-operator").raise_for_status().json()
    assert [one["name"] for one in seen["spec"]["template"]["spec"]["containers"]] == ["engine"]
    assert "TOKEN" not in str(seen["spec"]["template"])
    assert differences(new, seen) == ()


def test_replicas_of_an_autoscaler_survive_an_apply(admin: httpx.Client, restricted: str, owner: str) -> None:
    case = replace(TABLE["five-lines"], namespace=restricted, uid=owner)
    key = ("Deployment", "qwen-engine")
    wanted = by_key(case.wanted())[key]
    apply(admin, path_of(wanted), wanted, "pagefleet-operator").raise_for_status()
    headers = {"Content-Type": "application/merge-patch+json"}
    scale = {"spec": {"replicas": 5}}
    answer = admin.patch(
        f"{path_of(wanted)}/scale", json=scale, headers=headers, params={"fieldManager": "autoscaler"}
    ).raise_for_status()
    assert answer.json()["spec"]["replicas"] == 5
    seen = admin.get(path_of(wanted)).json()
    kept = by_key(replace(case, children={key: Child(seen, ours=True, scaled_by="autoscaler")}).wanted())[key]
    result = apply(admin, path_of(kept), kept, "pagefleet-operator").raise_for_status().json()
    assert result["spec"]["replicas"] == 5
    assert differences(kept, result) == ()


def test_a_manual_edit_is_a_difference_until_it_is_put_right(admin: httpx.Client, restricted: str, owner: str) -> None:
    case = replace(TABLE["five-lines"], namespace=restricted, uid=owner)
    wanted = by_key(case.wanted())["NetworkPolicy", "qwen-engine"]
    apply(admin, path_of(wanted), wanted, "pagefleet-operator").raise_for_status()
    edit = {"spec": {"ingress": [{}]}, "metadata": {"labels": {"team": "search"}}}
    headers = {"Content-Type": "application/merge-patch+json"}
    edited = admin.patch(path_of(wanted), json=edit, headers=headers).raise_for_status().json()
    assert differences(wanted, edited) == ("spec.ingress",)
    mended = apply(admin, path_of(wanted), wanted, "pagefleet-operator").raise_for_status().json()
    assert differences(wanted, mended) == ()
    assert mended["metadata"]["labels"]["team"] == "search", "what others added is theirs"


class Found:
    """A sink that waits for a list of engines."""

    def __init__(self) -> None:
        self.engines: dict[str, str] = {}
        """Addresses of those that get requests, by id."""

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        self.engines = {one.id: one.url for one in endpoints if not one.coming and not one.draining}

    def explain(self, reason: str) -> None:
        raise AssertionError(reason)


def routed(access: ApiAccess, namespace: str, wanted: Mapping[str, str]) -> None:
    """Wait until a router with these rights would know these engines."""
    found = Found()

    async def follow() -> None:
        source = asyncio.create_task(KubernetesSource(access, ServiceRef(namespace, "qwen-engine", "m")).run(found))
        try:
            async with asyncio.timeout(60):
                while found.engines != wanted:
                    assert not source.done(), source.exception()
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"found {found.engines}, not {dict(wanted)}") from None
        finally:
            source.cancel()
            await asyncio.wait({source})
            await asyncio.sleep(0.25)  # TLS connections say goodbye after aiohttp calls them closed

    asyncio.run(follow())


@pytest.fixture
def node(admin: httpx.Client) -> Iterator[str]:
    """The name of a node without a kubelet: the controller leaves out pods that are on none."""
    admin.post("/api/v1/nodes", json={"metadata": {"name": "node-1"}}).raise_for_status()
    yield "node-1"
    admin.delete("/api/v1/nodes/node-1").raise_for_status()


def test_a_router_finds_each_data_rank_in_the_slices_of_a_real_controller(
    control_plane: ControlPlane, admin: httpx.Client, restricted: str, owner: str, node: str, tmp_path: Path
) -> None:
    """With the rights that the operator gave it; and one engine where they share experts."""
    if not control_plane.has_controllers:
        pytest.skip("kube-controller-manager is absent: a Deployment makes no Pods")

    def bring(name: str, **changes: Any) -> None:
        case = replace(TABLE[name].changed(**changes), namespace=restricted, uid=owner)
        for child in replace(case, kinds=case.kinds - ABSENT_KINDS).wanted():
            apply(admin, path_of(child), child, "pagefleet-operator").raise_for_status()

    def ready(ranks: int, address: str) -> str:
        """Do what a kubelet does once the containers of a pod are ready; returns the pod's name."""
        where = f"/api/v1/namespaces/{restricted}/pods"

        def pending() -> str:
            for pod in admin.get(where, params={"labelSelector": "app.kubernetes.io/component=engine"}).json()["items"]:
                ports = [one["name"] for one in pod["spec"]["containers"][0]["ports"]]
                if "podIP" not in pod["status"] and ports.count("state") == int(ranks > 1):
                    return str(pod["metadata"]["name"])
            return ""

        name = wait_until(pending)
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        admin.post(f"{where}/{name}/binding", json={"metadata": {"name": name}, "target": target}).raise_for_status()
        conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}
        headers = {"Content-Type": "application/merge-patch+json"}
        admin.patch(f"{where}/{name}/status", json={"status": status}, headers=headers).raise_for_status()
        return name

    bring("data-ranks", router=None)
    token = tmp_path / "token"
    token.write_text(control_plane.token_of(restricted, "qwen-router"))
    access = ApiAccess(control_plane.url, token, control_plane.ca_file)
    two = ready(2, "10.1.0.7")
    routed(access, restricted, {two: "http://10.1.0.7:8000", f"{two}.1": "http://10.1.0.7:8001"})

    bring("data-ranks", router=None, parallelism={"data": 2, "expert": True})
    one = ready(1, "10.1.0.8")
    routed(access, restricted, {one: "http://10.1.0.8:8000"})
