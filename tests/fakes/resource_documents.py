"""InferenceServices and InferenceProfiles as YAML would give them. No test in here."""

from __future__ import annotations

from typing import Any


def service_document(name: str = "qwen", **spec: Any) -> dict[str, Any]:
    """The five lines, with these fields of the spec more."""
    return {
        "apiVersion": "pagefleet.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "builtin://tiny"}, **spec},
    }


def profile_document(name: str = "h100", **spec: Any) -> dict[str, Any]:
    """A profile with these fields of the spec."""
    return {
        "apiVersion": "pagefleet.dev/v1alpha1",
        "kind": "InferenceProfile",
        "metadata": {"name": name},
        "spec": spec,
    }
