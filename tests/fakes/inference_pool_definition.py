"""InferencePool v1 as an API server is told of it: the published fields, defaults and rules. No test in here."""

from __future__ import annotations

from typing import Any

GROUP = "inference.networking.k8s.io"
NAME = f"inferencepools.{GROUP}"
_TEXT = {"type": "string"}
_PORT = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535}},
}
_PICKER = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {**_TEXT, "default": "", "maxLength": 253},
        "kind": {**_TEXT, "default": "Service", "minLength": 1, "maxLength": 63},
        "name": {**_TEXT, "minLength": 1, "maxLength": 253},
        "port": _PORT,
        "failureMode": {**_TEXT, "default": "FailClose", "enum": ["FailOpen", "FailClose"]},
    },
    "x-kubernetes-validations": [
        {
            "rule": "self.kind != 'Service' || has(self.port)",
            "message": "port is required when kind is 'Service' or unspecified (defaults to 'Service')",
        }
    ],
}
_SPEC = {
    "type": "object",
    "required": ["selector", "targetPorts"],
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "properties": {
                "matchLabels": {
                    "type": "object",
                    "maxProperties": 64,
                    "additionalProperties": {**_TEXT, "maxLength": 63},
                }
            },
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": _PORT,
            "x-kubernetes-list-type": "atomic",
            "x-kubernetes-validations": [
                {
                    "rule": "self.all(p1, self.exists_one(p2, p1.number==p2.number))",
                    "message": "port number must be unique",
                }
            ],
        },
        "appProtocol": {**_TEXT, "default": "http", "enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": _PICKER,
    },
}


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "required": ["spec"],
                "properties": {
                    "apiVersion": _TEXT,
                    "kind": _TEXT,
                    "metadata": {"type": "object"},
                    "spec": _SPEC,
                    "status": status,
                },
            }
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME, "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "plural": "inferencepools",
                "singular": "inferencepool",
                "kind": "InferencePool",
                "listKind": "InferencePoolList",
                "shortNames": ["infpool"],
            },
            "versions": [version],
        },
    }
