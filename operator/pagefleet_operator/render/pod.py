"""What all our pods have in common: no privilege, a read-only root, a bounded /tmp, no token nobody asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagefleet_protocol.kube_names import LIVE_PATH, PORT_NAME, READY_PATH, SERVING_PORT

from pagefleet_operator.render.labels import PROGRAM, Object
from pagefleet_operator.render.revision import with_revision
from pagefleet_operator.render.settings import ClusterSettings
from pagefleet_operator.render.strategic_merge import strategic_merge

USER_ID = 65532
"""`nonroot` of our images."""
TMP_PATH = "/tmp"  # noqa: S108 the pod's own volume, shared with nobody
PRE_STOP_S = 5
"""Between the end of an endpoint and the signal: routers and nodes have heard by then, and send nothing new."""
GRACE_MARGIN_S = 15
"""A process that has drained still has to close its connections and, an engine, its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """When a container counts as started, ready, alive. Seconds, and how often in a row."""

    startup_period_s: int
    startup_failures: int
    ready_period_s: int
    startup_path: str = READY_PATH
    port: str = PORT_NAME
    """Name of the port that is asked."""
    live_failures: int = 3
    """Ten seconds apart."""


def pod_security() -> Object:
    """Return the pod's part of what Pod Security `restricted` wants."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        # Claims are made writable for this group. The whole tree is walked only when its top is not right.
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    """Return a container's part of what Pod Security `restricted` wants, and a read-only root file system."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }


def container(name: str, image: str, args: Iterable[str]) -> Object:
    """Return a container that runs `pagefleet` with `args`."""
    return {
        "name": name,
        "image": image,
        "command": [PROGRAM],
        "args": list(args),
        "env": [{"name": "HOME", "value": TMP_PATH}],
        "securityContext": container_security(),
        # The last lines of stderr become the pod's message, which the operator shows.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": TMP_PATH}],
    }


def serving(probe: Probe) -> Object:
    """Return what a container that answers HTTP has beside: port, probes and an orderly end."""
    return {
        "ports": [{"name": PORT_NAME, "containerPort": SERVING_PORT, "protocol": "TCP"}],
        "startupProbe": _http(probe.port, probe.startup_path, probe.startup_period_s, probe.startup_failures),
        "readinessProbe": _http(probe.port, READY_PATH, probe.ready_period_s, 2),
        "livenessProbe": _http(probe.port, LIVE_PATH, 10, probe.live_failures),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
    }


def grace_s(drain_s: int) -> int:
    """Return what a pod gets before it is killed: strictly more than it may take to end by itself."""
    return PRE_STOP_S + drain_s + GRACE_MARGIN_S


def env(values: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in values.items()]


def tmp_volume(size_limit: str) -> Object:
    """Return the volume at /tmp; a pod that fills it is evicted, and its node is not."""
    return {"name": "tmp", "emptyDir": {"sizeLimit": size_limit}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gear:
    """Files that a container is given for one purpose: the flags that name them, mounts, and the volumes behind."""

    args: tuple[str, ...] = ()
    mounts: tuple[Object, ...] = ()
    volumes: tuple[Object, ...] = ()
    init_containers: tuple[Object, ...] = ()
    """What fills them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodParts:
    """What makes one pod differ from another."""

    labels: Mapping[str, str]
    service_account: str
    containers: tuple[Object, ...]
    volumes: tuple[Object, ...]
    init_containers: tuple[Object, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the pod's spec."""


def pod_template(parts: PodParts, settings: ClusterSettings) -> Object:
    """Return a pod template without its revision."""
    spec: Object = {
        "serviceAccountName": parts.service_account,
        "automountServiceAccountToken": False,
        # Variables such as QWEN_PORT for every Service of the namespace would be read as settings by somebody.
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "containers": list(parts.containers),
        "volumes": list(parts.volumes),
        **parts.more,
    }
    if parts.init_containers:
        spec["initContainers"] = list(parts.init_containers)
    if settings.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secret]
    return {"metadata": {"labels": dict(parts.labels)}, "spec": spec}


def deployment_spec(template: Object, match: Mapping[str, str], rollout: Mapping[str, Any]) -> Object:
    """Return a Deployment's spec, apart from `replicas`; `rollout` holds strategy and deadlines."""
    return {
        "selector": {"matchLabels": dict(match)},
        # Two old ReplicaSets: the one that serves while a rollout is stuck, and the one before.
        "revisionHistoryLimit": 2,
        # A process that ends in its first seconds was not worth ending an old one for.
        "minReadySeconds": 5,
        **rollout,
        "template": with_revision(template),
    }


def with_annotations(template: Mapping[str, Any], annotations: Mapping[str, str]) -> Object:
    """Return a pod template with annotations that no patch may change."""
    metadata = template["metadata"]
    return {**template, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **annotations}}}


def rolling_update(max_surge: int, max_unavailable: int) -> Object:
    assert max_surge + max_unavailable > 0, "a rollout that may neither add nor remove a pod never ends"
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": max_surge, "maxUnavailable": max_unavailable}}


def spread(match: Mapping[str, str], keys: Sequence[str] = ("pod-template-hash",)) -> Object:
    """Return the wish, not the condition, that pods are on different nodes: those of one revision.

    `keys`: of labels that such pods have alike.
    """
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(match)},
        "matchLabelKeys": list(keys),
    }


def _http(port: str, path: str, period_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


CONTAINER_LISTS = ("initContainers", "containers")


def patched(template: Object, patch: Mapping[str, Any]) -> Object:
    """Return `template` with the strategic merge patch applied.

    A setting of the security context that was taken away comes back: a container without one would run with more rights
    than any that is written down, and Pod Security `restricted` would refuse it. To change one, give another value.
    """
    if not patch:
        return template
    merged = strategic_merge(template, patch)
    spec = merged.setdefault("spec", {})
    spec["securityContext"] = strategic_merge(pod_security(), spec.get("securityContext") or {})
    spec.setdefault("automountServiceAccountToken", False)
    for name in CONTAINER_LISTS:
        if name in spec:
            spec[name] = [_secured(one) for one in spec[name]]
    return merged


def _secured(container: Mapping[str, Any]) -> Object:
    given = container.get("securityContext") or {}
    return {**container, "securityContext": strategic_merge(container_security(), given)}
