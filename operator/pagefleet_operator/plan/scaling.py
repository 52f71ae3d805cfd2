"""Whose number of engines counts beside spec.replicas: an autoscaler's, and nobody's who does it by hand."""

from __future__ import annotations

from pagefleet_protocol.kube_names import FIELD_MANAGER

_BY_HAND = ("kubectl", "k9s", "lens")
"""How programs call themselves that do what a person tells them; they are to scale the InferenceService."""


def is_autoscaler(manager: str) -> bool:
    """Whether a manager of a Deployment's scale subresource decides by itself, as a HorizontalPodAutoscaler's does."""
    return manager != FIELD_MANAGER and not manager.lower().startswith(_BY_HAND)
