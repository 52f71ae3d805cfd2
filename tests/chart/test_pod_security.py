"""Every pod of the chart may run in a namespace that enforces `restricted`; the checker itself misses nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.helm_chart import pod_templates, render
from tests.fakes.pod_security import violations

PODS = dict(pod_templates(render()))
GOOD = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {"name": "a", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
    ],
}


def test_the_chart_has_two_kinds_of_pods() -> None:
    assert sorted(PODS) == ["Deployment/pagefleet-operator", "Pod/pagefleet-test"]


@pytest.mark.parametrize("name", PODS)
def test_pods_are_restricted(name: str) -> None:
    assert violations(PODS[name]) == []


@pytest.mark.parametrize("name", PODS)
def test_pods_write_nowhere_but_into_their_own_folders(name: str) -> None:
    spec = PODS[name]["spec"]
    assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in spec["containers"])
    emptied = [volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume]
    assert all(one["sizeLimit"] for one in emptied)
    others = [volume for volume in spec["volumes"] if "emptyDir" not in volume]
    assert all(set(volume) == {"name", "projected"} for volume in others), "projected volumes are read-only"


@pytest.mark.parametrize("name", PODS)
def test_pods_have_a_memory_limit_and_tell_how_they_ended(name: str) -> None:
    for container in PODS[name]["spec"]["containers"]:
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def pod(**fields: Any) -> dict[str, Any]:
    return {"spec": {**GOOD, **fields}}


def container(**fields: Any) -> dict[str, Any]:
    (good,) = GOOD["containers"]
    return pod(containers=[{**good, **fields}])  # type: ignore[dict-item]


def context(**fields: Any) -> dict[str, Any]:
    base = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return container(securityContext={**base, **fields})


def test_the_checker_lets_a_good_pod_pass() -> None:
    assert violations(pod()) == []
    assert violations(context(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]})) == []


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        (pod(hostNetwork=True), "spec.hostNetwork"),
        (pod(hostPID=True), "spec.hostPID"),
        (pod(hostIPC=True), "spec.hostIPC"),
        (pod(volumes=[{"name": "v", "hostPath": {"path": "/"}}]), "spec.volumes[v].hostPath"),
        (pod(volumes=[{"name": "v", "nfs": {}}]), "spec.volumes[v].nfs"),
        (pod(securityContext={}), "spec.containers[a].securityContext.runAsNonRoot"),
        (pod(securityContext={}), "spec.containers[a].securityContext.seccompProfile.type"),
        (pod(securityContext={**GOOD["securityContext"], "runAsUser": 0}), "spec.securityContext.runAsUser"),  # type: ignore[dict-item]
        (pod(securityContext={"sysctls": [{"name": "kernel.msgmax"}]}), "spec.securityContext.sysctls"),
        (pod(securityContext={"appArmorProfile": {"type": "Unconfined"}}), "spec.securityContext.appArmorProfile"),
        (pod(securityContext={"seLinuxOptions": {"type": "spc_t"}}), "spec.securityContext.seLinuxOptions"),
        (pod(securityContext={"windowsOptions": {"hostProcess": True}}), "spec.securityContext.windowsOptions"),
        (pod(initContainers=[{"name": "b"}]), "spec.initContainers[b].securityContext.capabilities.drop"),
        (context(privileged=True), "spec.containers[a].securityContext.privileged"),
        (context(allowPrivilegeEscalation=True), "spec.containers[a].securityContext.allowPrivilegeEscalation"),
        (context(procMount="Unmasked"), "spec.containers[a].securityContext.procMount"),
        (context(runAsNonRoot=False), "spec.containers[a].securityContext.runAsNonRoot"),
        (context(runAsUser=0), "spec.containers[a].securityContext.runAsUser"),
        (context(seccompProfile={"type": "Unconfined"}), "spec.containers[a].securityContext.seccompProfile"),
        (context(capabilities={}), "spec.containers[a].securityContext.capabilities.drop"),
        (context(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}), "capabilities.add: SYS_ADMIN"),
        (container(ports=[{"hostPort": 80}]), "spec.containers[a].ports"),
        (container(livenessProbe={"httpGet": {"host": "10.0.0.1"}}), "livenessProbe.httpGet.host"),
        (container(lifecycle={"preStop": {"tcpSocket": {"host": "10.0.0.1"}}}), "lifecycle.preStop.tcpSocket.host"),
        ({**pod(), "metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/a": "x"}}}, "apparmor"),
    ],
)
def test_the_checker_finds(bad: dict[str, Any], path: str) -> None:
    assert any(path in violation for violation in violations(bad))
