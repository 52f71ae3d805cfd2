"""The test bed itself: what later tests take for granted of the API server is really so."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
import yaml

from tests.fakes.kube_control_plane import ControlPlane, apply, missing, wait_until

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "answer"}, "data": {"value": "42"}}


def config_map_path(namespace: str, name: str = "answer") -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps/{name}"


def service_account(admin: httpx.Client, namespace: str, name: str) -> str:
    admin.post(f"/api/v1/namespaces/{namespace}/serviceaccounts", json={"metadata": {"name": name}}).raise_for_status()
    return name


def test_our_definitions_are_established(established: tuple[str, ...], admin: httpx.Client) -> None:
    assert "inferenceservices.pagefleet.dev" in established
    served = admin.get("/apis/pagefleet.dev/v1alpha1").raise_for_status().json()["resources"]
    assert {"inferenceservices", "inferenceservices/status"} <= {resource["name"] for resource in served}


def test_an_object_is_applied_once_and_kept(admin: httpx.Client, namespace: str) -> None:
    created = apply(admin, config_map_path(namespace), CONFIG_MAP)
    repeated = apply(admin, config_map_path(namespace), CONFIG_MAP)
    assert (created.status_code, repeated.status_code) == (201, 200)
    assert repeated.json()["metadata"]["resourceVersion"] == created.json()["metadata"]["resourceVersion"]
    assert [entry["manager"] for entry in repeated.json()["metadata"]["managedFields"]] == ["test"]


def test_an_account_without_rights_is_refused(control_plane: ControlPlane, admin: httpx.Client, namespace: str) -> None:
    token = control_plane.token_of(namespace, service_account(admin, namespace, "nobody"))
    with control_plane.client(token) as client:
        refused = client.get(config_map_path(namespace))
    assert refused.status_code == 403
    assert f"system:serviceaccount:{namespace}:nobody" in refused.json()["message"]


def test_an_account_may_do_what_its_role_says(control_plane: ControlPlane, admin: httpx.Client, namespace: str) -> None:
    reader = service_account(admin, namespace, "reader")
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    admin.post(f"{rbac}/roles", json={"metadata": {"name": "reader"}, "rules": rules}).raise_for_status()
    binding = {
        "metadata": {"name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": reader, "namespace": namespace}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
    }
    admin.post(f"{rbac}/rolebindings", json=binding).raise_for_status()
    apply(admin, config_map_path(namespace), CONFIG_MAP).raise_for_status()
    with control_plane.client(control_plane.token_of(namespace, reader)) as client:
        assert client.get(config_map_path(namespace)).json()["data"] == {"value": "42"}
        assert client.delete(config_map_path(namespace)).status_code == 403


def test_what_an_object_owns_goes_with_it(control_plane: ControlPlane, admin: httpx.Client, namespace: str) -> None:
    if not control_plane.has_controllers:
        pytest.skip("kube-controller-manager is absent: garbage is not collected")
    owner = apply(admin, config_map_path(namespace, "owner"), {**CONFIG_MAP, "metadata": {"name": "owner"}}).json()
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    owned = {**CONFIG_MAP, "metadata": {"name": "owned", "ownerReferences": [reference]}}
    apply(admin, config_map_path(namespace, "owned"), owned).raise_for_status()
    admin.delete(config_map_path(namespace, "owner"), params={"propagationPolicy": "Background"}).raise_for_status()
    wait_until(lambda: admin.get(config_map_path(namespace, "owned")).status_code == 404)


def test_a_deployment_gets_its_pods(control_plane: ControlPlane, admin: httpx.Client, namespace: str) -> None:
    if not control_plane.has_controllers:
        pytest.skip("kube-controller-manager is absent: a Deployment makes no Pods")
    labels = {"app": "idle"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "idle", "image": "idle:1"}]}}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": pod}
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    admin.post(path, json={"metadata": {"name": "idle"}, "spec": spec}).raise_for_status()
    pods = wait_until(lambda: pods_of(admin, namespace, 2))
    assert {one["status"]["phase"] for one in pods} == {"Pending"}


def pods_of(admin: httpx.Client, namespace: str, number: int) -> list[dict[str, dict[str, str]]]:
    found = admin.get(f"/api/v1/namespaces/{namespace}/pods").json()["items"]
    return list(found) if len(found) == number else []


def test_the_api_server_comes_back_with_its_objects(
    control_plane: ControlPlane, admin: httpx.Client, namespace: str
) -> None:
    apply(admin, config_map_path(namespace), CONFIG_MAP).raise_for_status()
    control_plane.stop_api_server(signal.SIGKILL)
    try:
        with pytest.raises(httpx.ConnectError), control_plane.client() as client:
            client.get("/readyz")
    finally:
        control_plane.start_api_server()
    with control_plane.client() as client:
        assert client.get(config_map_path(namespace)).json()["data"] == {"value": "42"}


def test_a_frozen_api_server_is_silent(control_plane: ControlPlane) -> None:
    control_plane.freeze_api_server()
    try:
        with pytest.raises(httpx.TimeoutException), control_plane.client(timeout_s=0.2) as client:
            client.get("/readyz")
    finally:
        control_plane.thaw_api_server()
    assert control_plane.is_ready()


def test_a_kubeconfig_names_server_authority_and_account(control_plane: ControlPlane, tmp_path: Path) -> None:
    path = control_plane.write_kubeconfig(tmp_path / "kubeconfig", token="secret", namespace="apps")
    document = yaml.safe_load(path.read_text())
    assert document["clusters"][0]["cluster"]["server"] == control_plane.url
    assert Path(document["clusters"][0]["cluster"]["certificate-authority"]).read_text().startswith("-----BEGIN")
    assert document["users"][0]["user"] == {"token": "secret"}
    assert document["contexts"][0]["context"]["namespace"] == "apps"
    assert path.stat().st_mode & 0o077 == 0


def test_absent_binaries_are_named(tmp_path: Path) -> None:
    assert missing(tmp_path).startswith(f"etcd and kube-apiserver not in {tmp_path}: set KUBEBUILDER_ASSETS")
