"""What an API server makes of an applied object: defaults, canonical quantities, nothing empty. No test in here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]

_KEPT_THOUGH_EMPTY = frozenset(
    {"emptyDir", "podSelector", "namespaceSelector", "maxSurge", "maxUnavailable", "replicas"}
)
_POINTERS = frozenset(
    {
        "automountServiceAccountToken",
        "enableServiceLinks",
        "allowPrivilegeEscalation",
        "blockOwnerDeletion",
        "optional",
    }
)
_FIELD_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "httpGet": {"scheme": "HTTP"},
    "secret": {"defaultMode": 420},
    "fieldRef": {"apiVersion": "v1"},
    "image": {"pullPolicy": "IfNotPresent"},
}
_CANONICAL = {"1500m": "1500m", "1000m": "1", "2000m": "2", "0.5": "500m", "1024Mi": "1Gi", "2048Mi": "2Gi"}


def server_default(wanted: Mapping[str, Any]) -> Object:
    """Return the object as it is read back."""
    seen = _plain(copy.deepcopy(dict(wanted)))
    assert isinstance(seen, dict)
    metadata = seen["metadata"]
    metadata |= {"uid": "1", "resourceVersion": "7", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = seen.get("spec", {})
    for template in [spec["template"]] if seen["kind"] in ("Deployment", "Job") else []:
        _pod(template["spec"])
    if seen["kind"] == "Service":
        spec |= {"sessionAffinity": "None", "ipFamilies": ["IPv4"], "internalTrafficPolicy": "Cluster"}
        spec.setdefault("clusterIP", "10.0.0.7")
    if seen["kind"] == "Job":
        spec["template"]["metadata"]["labels"]["batch.kubernetes.io/controller-uid"] = "1"
        spec |= {"parallelism": 1, "completions": 1, "suspend": False, "podReplacementPolicy": "Failed"}
    if seen["kind"] == "PersistentVolumeClaim":
        spec |= {"volumeMode": "Filesystem"}
    if seen["kind"] == "HTTPRoute":
        spec["parentRefs"][0] |= {"group": "gateway.networking.k8s.io", "kind": "Gateway"}
        backend = spec["rules"][0]["backendRefs"][0]
        spec["rules"][0]["backendRefs"][0] = {"group": "", "kind": "Service", "weight": 1} | backend
    if seen["kind"] == "InferencePool":
        spec |= {"appProtocol": "http"}
    return seen | {"status": {"observedGeneration": 1}}


def _plain(value: Any, name: str = "") -> Any:
    """Leave out what Go's encoder leaves out, and write quantities as it does."""
    if isinstance(value, dict):
        fields = {key: _plain(below, key) for key, below in value.items()}
        kept = {
            key: below for key, below in fields.items() if key in _POINTERS | _KEPT_THOUGH_EMPTY or not _empty(below)
        }
        if name in ("requests", "limits"):
            return {key: _CANONICAL.get(str(below), str(below)) for key, below in kept.items()}
        return kept | {key: one for key, one in _FIELD_DEFAULTS.get(name, {}).items() if kept and key not in kept}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _CANONICAL.get(value, value) if name == "sizeLimit" else value


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ("", 0) or value in ({}, [])


def _pod(spec: Object) -> None:
    for key, value in {
        "restartPolicy": "Always",
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "terminationGracePeriodSeconds": 30,
        "serviceAccount": spec["serviceAccountName"],
    }.items():
        spec.setdefault(key, value)
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        container |= {"terminationMessagePath": "/dev/termination-log", "imagePullPolicy": "IfNotPresent"}
        container.setdefault("resources", {})
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                container[probe].setdefault("successThreshold", 1)
