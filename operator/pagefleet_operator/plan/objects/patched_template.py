"""podTemplate merged into a pod template. What it does not mention stays as safe as it was, in added containers too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagefleet_operator.plan.objects.names_and_labels import Object
from pagefleet_operator.plan.objects.pod import container_security, pod_security
from pagefleet_operator.plan.objects.strategic_merge import strategic_merge

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
