"""Kubernetes' pod security standard `restricted`, rule by rule, for a pod that nobody has sent to a cluster yet.

Source: Kubernetes documentation, "Pod Security Standards", baseline and restricted profiles of v1.36. No test in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Fields = Mapping[str, Any]

VOLUME_TYPES = frozenset(
    (
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    )
)
SAFE_SYSCTLS = frozenset(
    (
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    )
)
SELINUX_TYPES = frozenset(("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"))
SECCOMP_TYPES = frozenset(("RuntimeDefault", "Localhost"))
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def violations(template: Fields) -> list[str]:
    """Return what keeps a pod {metadata, spec} out of a `restricted` namespace: a path and a reason each."""
    spec = template["spec"]
    found = list(_of_pod(spec))
    pod_context = spec.get("securityContext", {})
    for group in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(group, []):
            path = f"spec.{group}[{container['name']}]"
            found += [f"{path}.{violation}" for violation in _of_container(container, pod_context)]
    annotations = template.get("metadata", {}).get("annotations", {})
    return found + [f"metadata.annotations: {name}" for name in annotations if "apparmor.security" in name]


def _of_pod(spec: Fields) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"spec.{field}: must not be true"
    for volume in spec.get("volumes", []):
        for kind in set(volume) - {"name"} - VOLUME_TYPES:
            yield f"spec.volumes[{volume['name']}].{kind}: type not allowed"
    context = spec.get("securityContext", {})
    for sysctl in context.get("sysctls", []):
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"spec.securityContext.sysctls: {sysctl['name']} is not safe"
    yield from (f"spec.securityContext.{violation}" for violation in _of_either_context(context))


def _of_either_context(context: Fields) -> Iterator[str]:
    """What pods and containers can both say."""
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "windowsOptions.hostProcess: must not be true"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions: only a container type may be set"
    if context.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield "appArmorProfile.type: must not be Unconfined"
    if context.get("runAsUser") == 0:
        yield "runAsUser: must not be 0"


def _of_container(container: Fields, pod_context: Fields) -> Iterator[str]:
    context = container.get("securityContext", {})
    effective = {**pod_context, **context}
    yield from (f"securityContext.{violation}" for violation in _of_either_context(context))
    if context.get("privileged"):
        yield "securityContext.privileged: must not be true"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "securityContext.allowPrivilegeEscalation: must be false"
    if context.get("procMount", "Default") != "Default":
        yield "securityContext.procMount: must be Default"
    if effective.get("runAsNonRoot") is not True:
        yield "securityContext.runAsNonRoot: must be true"
    if effective.get("seccompProfile", {}).get("type") not in SECCOMP_TYPES:
        yield "securityContext.seccompProfile.type: must be RuntimeDefault or Localhost"
    yield from _of_capabilities(context.get("capabilities", {}))
    yield from _of_host_access(container)


def _of_capabilities(capabilities: Fields) -> Iterator[str]:
    if "ALL" not in capabilities.get("drop", []):
        yield "securityContext.capabilities.drop: must hold ALL"
    for added in set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"securityContext.capabilities.add: {added} not allowed"


def _of_host_access(container: Fields) -> Iterator[str]:
    for port in container.get("ports", []):
        if port.get("hostPort"):
            yield f"ports: hostPort {port['hostPort']} not allowed"
    actions = [(name, container.get(name, {})) for name in PROBES]
    actions += [(f"lifecycle.{name}", action) for name, action in container.get("lifecycle", {}).items()]
    for name, action in actions:
        for method in ("httpGet", "tcpSocket"):
            if action.get(method, {}).get("host"):
                yield f"{name}.{method}.host: must not be set"
