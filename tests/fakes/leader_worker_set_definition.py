"""LeaderWorkerSet v1 as an API server is told of it: what we use of its fields and defaults. No test in here."""

from __future__ import annotations

from typing import Any

GROUP = "leaderworkerset.x-k8s.io"
NAME = f"leaderworkersets.{GROUP}"
_COUNT = {"type": "integer", "format": "int32"}
_COUNT_OR_PERCENT = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
_POD_TEMPLATE = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _one_of(*names: str) -> dict[str, Any]:
    """Return a word's schema; the first is what stands where nobody says any."""
    return {"type": "string", "default": names[0], "enum": list(names)}


_TEMPLATE = {
    "type": "object",
    "required": ["workerTemplate"],
    "properties": {
        "size": {**_COUNT, "default": 1},
        "restartPolicy": _one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "Default", "None"),
        "leaderTemplate": _POD_TEMPLATE,
        "workerTemplate": _POD_TEMPLATE,
    },
}
_ROLLOUT = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": _one_of("RollingUpdate"),
        "rollingUpdateConfiguration": {
            "type": "object",
            "properties": {
                "partition": {**_COUNT, "default": 0},
                "maxUnavailable": {**_COUNT_OR_PERCENT, "default": 1},
                "maxSurge": {**_COUNT_OR_PERCENT, "default": 0},
            },
        },
    },
}
_NETWORK = {
    "type": "object",
    "required": ["subdomainPolicy"],
    "properties": {"subdomainPolicy": {"type": "string", "enum": ["Shared", "UniquePerReplica"]}},
}
_SPEC = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {**_COUNT, "default": 1, "minimum": 0, "maximum": 1000000},
        "leaderWorkerTemplate": _TEMPLATE,
        "rolloutStrategy": _ROLLOUT,
        "startupPolicy": _one_of("LeaderCreated", "LeaderReady"),
        "networkConfig": _NETWORK,
    },
}
_CONDITION = {
    "type": "object",
    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
    "properties": {
        **{name: {"type": "string"} for name in ("type", "status", "reason", "message")},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "observedGeneration": {"type": "integer", "format": "int64"},
    },
}
_STATUS = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas"), _COUNT),
        "hpaPodSelector": {"type": "string"},
        "observedGeneration": {"type": "integer", "format": "int64"},
        "conditions": {"type": "array", "items": _CONDITION},
    },
}


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.hpaPodSelector",
    }
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": _SPEC,
        "status": _STATUS,
    }
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": scale},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "plural": "leaderworkersets",
                "singular": "leaderworkerset",
                "kind": "LeaderWorkerSet",
                "listKind": "LeaderWorkerSetList",
                "shortNames": ["lws"],
            },
            "versions": [version],
        },
    }
