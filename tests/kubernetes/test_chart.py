"""The chart on a real API server: installed, upgraded, uninstalled, installed again; and the rights that it grants."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import helm_python
import httpx
import pytest
import yaml
from helm_python import Config

from tests.fakes.helm_chart import CHART, NAMESPACE, RELEASE, render
from tests.fakes.kube_control_plane import ControlPlane, binaries_folder, missing, wait_until

CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SERVICES_CRD = f"{CRD_PATH}/inferenceservices.pagefleet.dev"
SERVICES = f"/apis/pagefleet.dev/v1alpha1/namespaces/{NAMESPACE}/inferenceservices"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:pagefleet-operator"
TINY = {
    "apiVersion": "pagefleet.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "tiny"},
    "spec": {"model": {"uri": "builtin://tiny"}},
}
PROFILE = {"gpuType": "h100", "gpuMemory": "80Gi", "resources": {"gpus": 1}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server that has never heard of pagefleet."""
    binaries = binaries_folder()
    if reason := missing(binaries):
        pytest.skip(reason)
    with ControlPlane(tmp_path_factory.mktemp("chart"), binaries, controllers=()) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: ControlPlane) -> Iterator[httpx.Client]:
    with cluster.client() as http:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        for name in (NAMESPACE, "elsewhere"):
            http.post("/api/v1/namespaces", json={"metadata": {"name": name, "labels": labels}}).raise_for_status()
        yield http


@pytest.fixture(scope="module")
def helm(cluster: ControlPlane, client: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    folder = tmp_path_factory.mktemp("helm")
    with Config(kubeconfig_path=cluster.write_kubeconfig(folder / "kubeconfig"), namespace=NAMESPACE) as config:
        yield config


@pytest.fixture(scope="module")
def installed(helm: Config, client: httpx.Client) -> Config:
    """The release, as every test leaves it."""
    helm.install(CHART, RELEASE, namespace=NAMESPACE)
    wait_until(partial(is_served, client))
    return helm


def is_served(client: httpx.Client) -> bool:
    return client.get(SERVICES).status_code == 200


@pytest.fixture
def newer_chart(tmp_path: Path) -> Path:
    """The chart of a later version, whose InferenceService has one column more."""
    copy = Path(shutil.copytree(CHART, tmp_path / "pagefleet"))
    path = copy / "files" / "crds" / "inferenceservices.pagefleet.dev.yaml"
    definition = yaml.safe_load(path.read_text())
    column = {"name": "Paused", "type": "boolean", "jsonPath": ".spec.paused"}
    definition["spec"]["versions"][0]["additionalPrinterColumns"].append(column)
    path.write_text(yaml.safe_dump(definition, sort_keys=False))
    return copy


def columns(client: httpx.Client) -> list[str]:
    (version,) = client.get(SERVICES_CRD).raise_for_status().json()["spec"]["versions"]
    return [column["name"] for column in version["additionalPrinterColumns"]]


def test_services_survive_upgrade_uninstall_and_reinstall(
    installed: Config, client: httpx.Client, newer_chart: Path
) -> None:
    created = client.post(SERVICES, json=TINY).raise_for_status().json()
    assert "Paused" not in columns(client)
    installed.upgrade(newer_chart, RELEASE, namespace=NAMESPACE)
    wait_until(lambda: "Paused" in columns(client))
    installed.uninstall(RELEASE)
    for collection in ("apps/v1/namespaces/models/deployments", "coordination.k8s.io/v1/namespaces/models/leases"):
        assert client.get(f"/apis/{collection}").raise_for_status().json()["items"] == []
    assert client.get(f"{SERVICES}/tiny").json()["metadata"]["uid"] == created["metadata"]["uid"]
    installed.install(CHART, RELEASE, namespace=NAMESPACE)
    wait_until(lambda: "Paused" not in columns(client))
    assert client.get(f"{SERVICES}/tiny").json()["metadata"]["uid"] == created["metadata"]["uid"]


def test_another_release_is_told_who_owns_the_kinds(installed: Config) -> None:
    with pytest.raises(helm_python.HelmReleaseError, match='must equal "second": current value is "pagefleet"'):
        installed.install(CHART, "second", namespace=NAMESPACE)
    assert [release["name"] for release in installed.list(all_states=True)] == [RELEASE]
    installed.install(CHART, "second", {"crds": {"install": False}}, namespace=NAMESPACE)
    installed.uninstall("second")


def test_an_upgrade_that_changes_nothing_writes_nothing(installed: Config, client: httpx.Client) -> None:
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/pagefleet-operator"
    before = client.get(path).json()["metadata"]
    installed.upgrade(CHART, RELEASE, namespace=NAMESPACE)
    after = client.get(path).json()["metadata"]
    assert after["generation"] == before["generation"]
    assert after["uid"] == before["uid"]


def test_an_upgrade_leaves_the_active_operator_its_lease(installed: Config, client: httpx.Client) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/pagefleet-operator"
    lease = client.get(path).raise_for_status().json()
    assert not lease.get("spec")
    held = {**lease, "spec": {"holderIdentity": "first", "leaseDurationSeconds": 12}}
    client.put(path, json=held).raise_for_status()
    installed.upgrade(CHART, RELEASE, {"operator": {"workers": 2}}, namespace=NAMESPACE)
    assert client.get(path).json()["spec"]["holderIdentity"] == "first"


def test_a_rollback_brings_the_values_back(installed: Config, client: httpx.Client) -> None:
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/pagefleet-operator"
    installed.upgrade(CHART, RELEASE, {"operator": {"replicas": 3}}, namespace=NAMESPACE)
    assert client.get(path).json()["spec"]["replicas"] == 3
    installed.rollback(RELEASE)
    assert client.get(path).json()["spec"]["replicas"] == 2


def test_profiles_come_and_go_with_the_values(installed: Config, client: httpx.Client) -> None:
    path = "/apis/pagefleet.dev/v1alpha1/inferenceprofiles"
    installed.upgrade(CHART, RELEASE, {"profiles": {"h100": PROFILE}}, namespace=NAMESPACE)
    seen = client.get(f"{path}/h100").raise_for_status().json()["spec"]
    assert seen.items() >= {"gpuType": "h100", "gpuMemory": "80Gi"}.items()
    installed.upgrade(CHART, RELEASE, {"profiles": {}}, namespace=NAMESPACE, reset_values=True)
    assert client.get(f"{path}/h100").status_code == 404


def test_a_profile_with_a_misspelled_field_is_refused(installed: Config) -> None:
    wrong = {"h100": {**PROFILE, "resources": {"gpu": 1}}}
    with pytest.raises(helm_python.HelmReleaseError, match=r"\.spec\.resources\.gpu: field not declared in schema"):
        installed.upgrade(CHART, RELEASE, {"profiles": wrong}, namespace=NAMESPACE)


@pytest.mark.parametrize("values", [{}, {"watch": {"all": True}}], ids=["namespaced", "everywhere"])
def test_a_restricted_namespace_takes_every_object(installed: Config, client: httpx.Client, values: Any) -> None:
    """The chart's pods themselves, too, and not only what makes them."""
    account = {"metadata": {"name": "default"}}
    client.post(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", json=account)
    for one in render(values):
        if one["kind"] in ("Deployment", "Pod"):
            template = one if one["kind"] == "Pod" else one["spec"]["template"]
            pod = {"metadata": {**template["metadata"], "name": "try"}, "spec": template["spec"]}
            answer = client.post(f"/api/v1/namespaces/{NAMESPACE}/pods", json=pod, params={"dryRun": "All"})
            assert answer.status_code == 201, answer.text
    dry = installed.upgrade(CHART, RELEASE, values, namespace=NAMESPACE, dry_run="server")
    assert "kind: Deployment" in dry["manifest"]


ALLOWED = [
    ("list", "pagefleet.dev", "inferenceservices", ""),
    ("patch", "pagefleet.dev", "inferenceservices", "status"),
    ("patch", "apps", "deployments", ""),
    ("delete", "batch", "jobs", ""),
    ("create", "rbac.authorization.k8s.io", "roles", ""),
    ("patch", "monitoring.coreos.com", "servicemonitors", ""),
    ("create", "", "events", ""),
    ("watch", "", "pods", ""),
    ("watch", "discovery.k8s.io", "endpointslices", ""),
    ("create", "coordination.k8s.io", "leases", ""),
]
REFUSED = [
    ("get", "", "secrets", ""),
    ("list", "", "secrets", ""),
    ("create", "", "pods", ""),
    ("create", "", "pods", "exec"),
    ("delete", "", "pods", ""),
    ("create", "", "serviceaccounts", "token"),
    ("patch", "pagefleet.dev", "inferenceservices", ""),
    ("delete", "pagefleet.dev", "inferenceservices", ""),
    ("escalate", "rbac.authorization.k8s.io", "roles", ""),
    ("bind", "rbac.authorization.k8s.io", "roles", ""),
    ("update", "pagefleet.dev", "inferenceservices", "status"),
    ("delete", "", "events", ""),
    ("create", "apps", "daemonsets", ""),
    ("update", "apps", "deployments", ""),
    ("patch", "coordination.k8s.io", "leases", ""),
]


def may(client: httpx.Client, right: tuple[str, str, str, str], namespace: str = NAMESPACE) -> bool:
    verb, group, resource, subresource = right
    wanted = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "namespace": namespace}
    answer = client.post(REVIEWS, json={"spec": {"user": ACCOUNT, "resourceAttributes": wanted}})
    return bool(answer.raise_for_status().json()["status"]["allowed"])


def test_the_operator_may_do_its_work_in_its_namespace_alone(installed: Config, client: httpx.Client) -> None:
    assert [right for right in ALLOWED if not may(client, right)] == []
    assert [right for right in ALLOWED if may(client, right, "elsewhere")] == []
    assert may(client, ("list", "pagefleet.dev", "inferenceprofiles", ""), "")


def test_the_operator_may_do_nothing_else(installed: Config, client: httpx.Client) -> None:
    assert [right for right in REFUSED if may(client, right)] == []


def test_the_operator_can_make_the_role_of_a_router_and_no_stronger_one(
    installed: Config, cluster: ControlPlane
) -> None:
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles"
    discovery = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    own = {
        "apiGroups": ["pagefleet.dev"],
        "resources": ["inferenceservices"],
        "resourceNames": ["tiny"],
        "verbs": ["get"],
    }
    stronger = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    with cluster.client(cluster.token_of(NAMESPACE, "pagefleet-operator")) as operator:
        made = operator.post(roles, json={"metadata": {"name": "tiny-router"}, "rules": [discovery, own]})
        refused = operator.post(roles, json={"metadata": {"name": "strong"}, "rules": [stronger]})
        operator.delete(f"{roles}/tiny-router").raise_for_status()
    assert made.status_code == 201, made.text
    assert refused.status_code == 403
    assert "attempting to grant RBAC permissions not currently held" in refused.json()["message"]
