"""The operator as a process, as the chart's own account, on a real API server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagefleet_operator.apply.connection import load_configuration
from pagefleet_operator.apply.kinds import BY_NAME
from pagefleet_operator.apply.kube_cluster import KubeCluster, TokenBucket, connect
from pagefleet_operator.handlers.reconciler import wake_asleep
from pagefleet_operator.handlers.seen import stored_child
from pagefleet_operator.plan.observed import Observed, ScalingSeen
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_protocol.inference_status import InferenceServiceStatus, RoleScalingStatus, ScalingStatus
from pagefleet_protocol.kube_names import PLURAL

from tests.fakes import inference_pool_definition
from tests.fakes.free_ports import free_ports
from tests.fakes.helm_chart import render
from tests.fakes.kube_control_plane import ControlPlane, apply, wait_until
from tests.kubernetes.conftest import CRD_PATH, is_established
from tests.operator.apply.test_kube_cluster import Fence, Requests

SERVICES = "/apis/pagefleet.dev/v1alpha1/namespaces/{}/inferenceservices"
ACCOUNT = "pagefleet-operator"
KINDS = {
    "ServiceAccount": "/api/v1",
    "ConfigMap": "/api/v1",
    "Service": "/api/v1",
    "Role": "/apis/rbac.authorization.k8s.io/v1",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1",
    "Lease": "/apis/coordination.k8s.io/v1",
    "NetworkPolicy": "/apis/networking.k8s.io/v1",
    "Deployment": "/apis/apps/v1",
    "PodDisruptionBudget": "/apis/policy/v1",
}
CHILDREN = {
    "deployments": {"qwen-engine", "qwen-router"},
    "services": {"qwen", "qwen-engine"},
    "serviceaccounts": {"qwen-engine", "qwen-router"},
    "configmaps": {"qwen-openai"},
    "roles": {"qwen-router"},
    "rolebindings": {"qwen-router"},
    "networkpolicies": {"qwen-engine", "qwen-router"},
    "poddisruptionbudgets": {"qwen-engine", "qwen-router"},
}
API = {
    "deployments": "/apis/apps/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "roles": "/apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "/apis/rbac.authorization.k8s.io/v1",
}
OURS = {"labelSelector": "app.kubernetes.io/managed-by=pagefleet-operator"}


class Operator:
    """One process."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path, *flags: str) -> None:
        self.port = free_ports()
        self.log = log
        command = [sys.executable, "-m", "pagefleet_operator.operate_cli", "--kubeconfig", str(kubeconfig)]
        command += ["--namespace", namespace, "--operator-namespace", namespace, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--engine-image", "engine:1", "--router-image", "router:1"]
        with log.open("ab") as output:
            self.process = subprocess.Popen([*command, "--operator-image", "operator:1", *flags], stderr=output)

    def get(self, path: str) -> str:
        """Return what it answers; empty: nothing."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", trust_env=False, timeout=30).text
        except httpx.HTTPError:
            assert self.process.poll() is None, self.log.read_text()
            return ""

    def role(self) -> str:
        return self.get("/readyz").strip()

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(f"pagefleet_operator_{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def account(control_plane: ControlPlane, admin: httpx.Client, established: Any, namespace: str) -> str:
    """The chart's account, with the chart's rights in the test's namespace; returns its token."""
    for document in render(namespace=namespace):
        kind, metadata = document["kind"], document["metadata"]
        if kind not in ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "Lease"):
            continue
        metadata.pop("annotations", None)
        where = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
        path = f"{KINDS[kind]}{where}/{kind.lower()}s/{metadata['name']}"
        answer = apply(admin, path, document)
        assert answer.status_code in (200, 201), answer.text
    return control_plane.token_of(namespace, ACCOUNT)


@pytest.fixture
def start(
    control_plane: ControlPlane, account: str, namespace: str, tmp_path: Path
) -> Iterator[Callable[..., Operator]]:
    """Return what starts an operator; all of them end with the test."""
    kubeconfig = control_plane.write_kubeconfig(tmp_path / "kubeconfig", token=account, namespace=namespace)
    with ExitStack() as stack:

        def one(*flags: str) -> Operator:
            operator = Operator(kubeconfig, namespace, tmp_path / "operator.log", *flags)
            stack.callback(lambda: operator.process.poll() is None and operator.end(signal.SIGKILL))
            return operator

        yield one


@pytest.fixture
def deploy(admin: httpx.Client, namespace: str) -> Callable[..., dict[str, Any]]:
    """Return what applies an InferenceService as a person would."""

    def one(name: str = "qwen", **spec: Any) -> dict[str, Any]:
        document = {
            "apiVersion": "pagefleet.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {"model": {"uri": "builtin://tiny"}, **spec},
        }
        answer = apply(admin, f"{SERVICES.format(namespace)}/{name}", document)
        assert answer.status_code in (200, 201), answer.text
        made: dict[str, Any] = answer.json()
        return made

    return one


def children(admin: httpx.Client, namespace: str) -> dict[str, set[str]]:
    found = {}
    for plural in CHILDREN:
        path = f"{API.get(plural, '/api/v1')}/namespaces/{namespace}/{plural}"
        items = admin.get(path, params=OURS).raise_for_status().json()["items"]
        found[plural] = {item["metadata"]["name"] for item in items}
    return found


def read(admin: httpx.Client, namespace: str, path: str = "inferenceservices/qwen") -> dict[str, Any]:
    plural = path.partition("/")[0]
    api = "/apis/pagefleet.dev/v1alpha1" if plural == PLURAL else API.get(plural, "/api/v1")
    body: dict[str, Any] = admin.get(f"{api}/namespaces/{namespace}/{path}").json()
    return body


def reason(admin: httpx.Client, namespace: str, kind: str = "Ready") -> str:
    conditions = read(admin, namespace).get("status", {}).get("conditions", ())
    return next((str(one["reason"]) for one in conditions if one["type"] == kind), "")


def test_five_lines_with_the_charts_rights_alone(
    admin: httpx.Client, namespace: str, start: Callable[..., Operator], deploy: Callable[..., Any]
) -> None:
    operator = start()
    deploy()
    wait_until(lambda: children(admin, namespace) == CHILDREN)
    wait_until(lambda: reason(admin, namespace) in ("Starting", "Unschedulable", "NotReady"))
    status = read(admin, namespace)["status"]
    assert status["observedGeneration"] == 1
    assert len(status["conditions"]) == 6
    wait_until(lambda: operator.metric("queue_depth") == 0)
    time.sleep(1.5)  # the last events of the Deployments' own controller
    applied = operator.metric("applies_total")
    assert applied == sum(map(len, CHILDREN.values()))  # each once: what came back is what was wanted
    assert "Forbidden" not in operator.log.read_text()

    # What somebody changes is put right, what somebody adds is kept.
    patch = {"metadata": {"labels": {"their/own": "1"}}, "spec": {"selector": {"nobody": "at-home"}}}
    content = {"Content-Type": "application/merge-patch+json"}
    path = f"/api/v1/namespaces/{namespace}/services/qwen"
    admin.patch(path, json=patch, headers=content).raise_for_status()
    admin.delete(f"/api/v1/namespaces/{namespace}/configmaps/qwen-openai").raise_for_status()
    wait_until(lambda: children(admin, namespace) == CHILDREN)
    wait_until(lambda: "nobody" not in read(admin, namespace, "services/qwen")["spec"]["selector"])
    assert read(admin, namespace, "services/qwen")["metadata"]["labels"]["their/own"] == "1"

    # A replica count that somebody scales by the Deployment's own scale is theirs.
    scale = f"/apis/apps/v1/namespaces/{namespace}/deployments/qwen-engine/scale?fieldManager=autoscaler"
    admin.patch(scale, json={"spec": {"replicas": 3}}, headers=content).raise_for_status()
    deploy(router={"replicas": 2})
    wait_until(lambda: read(admin, namespace, "deployments/qwen-router")["spec"]["replicas"] == 2)
    assert read(admin, namespace, "deployments/qwen-engine")["spec"]["replicas"] == 3
    assert operator.end() == 0


def test_a_refused_service_is_woken_with_the_charts_rights(
    admin: httpx.Client, namespace: str, tmp_path: Path, start: Callable[..., Operator], deploy: Callable[..., Any]
) -> None:
    operator = start()
    uid = deploy(disaggregation={role: {"replicas": 0} for role in PAIR_ROLES})["metadata"]["uid"]
    path = f"{API['deployments']}/namespaces/{namespace}/deployments"
    selector = {"labelSelector": "pagefleet.dev/role"}

    def engines() -> dict[str, dict[str, Any]]:
        items = admin.get(path, params=selector).raise_for_status().json()["items"]
        return {one["metadata"]["labels"]["pagefleet.dev/role"]: one for one in items}

    wait_until(lambda: set(engines()) == set(PAIR_ROLES))
    wait_until(lambda: reason(admin, namespace, "EngineReady") == "ScaledToZero")
    assert operator.end() == 0
    before = engines()
    status = InferenceServiceStatus.model_validate(read(admin, namespace)["status"])
    idle = ScalingStatus(mode="Internal", current=0, desired=0, reason="Idle", signal="", at="2026-01-01T00:00:00Z")
    previous = status.model_copy(
        update={"role_scaling": tuple(RoleScalingStatus(name=role, scaling=idle) for role in PAIR_ROLES)}
    )
    kind = BY_NAME["Deployment"]
    children = {
        (kind.kind, one["metadata"]["name"]): stored_child(one, kind.kind, kind.api_version).open(uid)
        for one in before.values()
    }
    asked = {role: ScalingSeen(2, "WokenUp", "") for role in PAIR_ROLES}
    observed = Observed(now=datetime.now(UTC), children=children, role_scaling=asked)

    async def wake() -> None:
        client = connect(await load_configuration(tmp_path / "kubeconfig"))
        try:
            cluster = KubeCluster(client, Fence(), TokenBucket(10, 10), Requests())
            await wake_asleep(cluster, (namespace, "qwen"), previous, observed)
        finally:
            await client.close()

    asyncio.run(wake())
    after = engines()
    assert {role: one["spec"]["replicas"] for role, one in after.items()} == dict.fromkeys(PAIR_ROLES, 2)
    for role, one in before.items():
        assert {**one["spec"], "replicas": 2} == after[role]["spec"]
        assert one["metadata"]["annotations"].items() <= after[role]["metadata"]["annotations"].items()


def test_of_an_older_revision_of_a_pair_the_number_changes_alone(
    admin: httpx.Client, namespace: str, start: Callable[..., Operator], deploy: Callable[..., Any]
) -> None:
    operator = start()
    deploy(disaggregation={role: {"replicas": 2} for role in PAIR_ROLES})
    path = f"{API['deployments']}/namespaces/{namespace}/deployments"
    selector = {"labelSelector": "pagefleet.dev/role"}

    def engines() -> dict[str, dict[str, Any]]:
        items = admin.get(path, params=selector).raise_for_status().json()["items"]
        return {one["metadata"]["name"]: one["spec"] for one in items}

    wait_until(lambda: len(engines()) == 2)
    before = engines()
    deploy(disaggregation={}, engine={"args": ["--seed", "1"]})
    # None of the new ones gets ready here: both revisions stay.
    wait_until(lambda: [one["replicas"] for one in engines().values()] == [1, 1, 1, 1])
    after = engines()
    assert {name: after[name] for name in before} == {name: {**one, "replicas": 1} for name, one in before.items()}
    wait_until(lambda: operator.metric("queue_depth") == 0)
    applied = operator.metric("applies_total")
    deploy(disaggregation={}, engine={"args": ["--seed", "1"]}, router={"replicas": 2})
    wait_until(lambda: read(admin, namespace, "deployments/qwen-router")["spec"]["replicas"] == 2)
    wait_until(lambda: operator.metric("queue_depth") == 0)
    assert operator.metric("applies_total") == applied + 1, "what stays as it is is applied by nobody"
    assert engines() == after
    assert operator.end() == 0


def test_what_belongs_to_a_deleted_service_is_collected(
    control_plane: ControlPlane,
    admin: httpx.Client,
    namespace: str,
    start: Callable[..., Operator],
    deploy: Callable[..., Any],
) -> None:
    if not control_plane.has_controllers:
        pytest.skip("kube-controller-manager is absent: garbage is not collected")
    operator = start()
    deploy()
    wait_until(lambda: children(admin, namespace) == CHILDREN)
    admin.delete(f"{SERVICES.format(namespace)}/qwen").raise_for_status()
    wait_until(lambda: not any(children(admin, namespace).values()))
    wait_until(lambda: operator.metric("queue_depth") == 0)
    time.sleep(0.5)
    assert not any(children(admin, namespace).values())
    assert operator.metric("reconcile_errors_total") == 0


def test_events_are_what_describe_shows(
    admin: httpx.Client, namespace: str, start: Callable[..., Operator], deploy: Callable[..., Any]
) -> None:
    start()
    uid = deploy(profileRef={"name": "nobody"})["metadata"]["uid"]
    wait_until(lambda: reason(admin, namespace, "Degraded") == "ProfileNotFound")
    # The question that `kubectl describe` asks.
    selector = f"involvedObject.name=qwen,involvedObject.namespace={namespace},involvedObject.uid={uid}"
    path = f"/api/v1/namespaces/{namespace}/events"
    events = wait_until(lambda: admin.get(path, params={"fieldSelector": selector}).json()["items"])
    assert [event["reason"] for event in events] == ["ProfileNotFound"]


def test_the_api_server_away_and_back(
    control_plane: ControlPlane,
    namespace: str,
    start: Callable[..., Operator],
    deploy: Callable[..., Any],
) -> None:
    operator = start()
    wait_until(lambda: operator.role() == "leader")
    deploy()
    control_plane.stop_api_server(signal.SIGKILL)
    try:
        before = operator.metric("api_answers_total")
        time.sleep(5.0)
        assert operator.metric("api_answers_total") - before < 30
        assert operator.get("/livez") == "live\n"
        assert operator.process.poll() is None
    finally:
        control_plane.start_api_server()
    with control_plane.client() as admin:
        wait_until(lambda: children(admin, namespace) == CHILDREN)
    assert operator.get("/livez") == "live\n"


def test_a_standby_takes_over_from_one_that_was_killed(
    admin: httpx.Client, namespace: str, start: Callable[..., Operator], deploy: Callable[..., Any]
) -> None:
    first = start()
    wait_until(lambda: first.role() == "leader")
    second = start()
    wait_until(lambda: second.role() == "standby")
    deploy()
    wait_until(lambda: children(admin, namespace) == CHILDREN)
    assert second.metric("applies_total") == 0
    first.end(signal.SIGKILL)
    killed_at = time.monotonic()
    deploy(replicas=2)
    wait_until(lambda: read(admin, namespace, "deployments/qwen-engine")["spec"]["replicas"] == 2)
    assert time.monotonic() - killed_at < 20.0
    third = start()
    wait_until(lambda: third.role() == "standby")
    assert second.end() == 0
    stopped_at = time.monotonic()
    wait_until(lambda: third.role() == "leader")
    assert time.monotonic() - stopped_at < 9.0, "it waited until the lease had run out"
    assert os.path.getsize(third.log) > 0


@pytest.fixture
def define_pools(admin: httpx.Client) -> Iterator[Callable[[], None]]:
    """Return what makes the API server know InferencePools, until the test's end."""
    path = f"{CRD_PATH}/{inference_pool_definition.NAME}"

    def define() -> None:
        apply(admin, path, inference_pool_definition.definition()).raise_for_status()
        wait_until(lambda: is_established(admin, inference_pool_definition.NAME))

    yield define
    admin.delete(path)
    wait_until(lambda: admin.get(path).status_code == 404)


def test_an_inference_pool_is_made_where_the_cluster_knows_the_kind(
    admin: httpx.Client,
    namespace: str,
    start: Callable[..., Operator],
    deploy: Callable[..., Any],
    define_pools: Callable[[], None],
) -> None:
    operator = start()
    deploy(router={"inferencePool": {"failureMode": "FailOpen"}})
    wait_until(lambda: reason(admin, namespace, "Degraded") == "KindMissing")
    wait_until(lambda: children(admin, namespace) == CHILDREN)
    assert operator.end() == 0

    define_pools()
    operator = start()
    path = f"/apis/{inference_pool_definition.GROUP}/v1/namespaces/{namespace}/inferencepools/qwen"
    wait_until(lambda: admin.get(path).status_code == 200)
    wait_until(lambda: reason(admin, namespace, "Degraded") == "AsWanted")
    pool = admin.get(path).json()["spec"]
    service = read(admin, namespace, "services/qwen")["spec"]
    pods = read(admin, namespace, "deployments/qwen-engine")["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= pods.items()
    assert (pool["targetPorts"], pool["appProtocol"]) == ([{"number": 8000}], "http")
    picker = pool["endpointPickerRef"]
    assert (picker["name"], picker["failureMode"]) == ("qwen", "FailOpen")
    assert picker["port"]["number"] in [one["port"] for one in service["ports"]]
    wait_until(lambda: operator.metric("queue_depth") == 0)
    written = operator.metric("applies_total")
    time.sleep(1.5)
    assert operator.metric("applies_total") == written  # what came back is what was wanted
    assert "Forbidden" not in operator.log.read_text()

    deploy(router={"replicas": 1})
    wait_until(lambda: admin.get(path).status_code == 404)
    assert operator.end() == 0
