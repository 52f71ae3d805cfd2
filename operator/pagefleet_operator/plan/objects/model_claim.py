"""The claim that holds downloaded models, for cache type pvc without a claim of the user's."""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService

from pagefleet_operator.plan.objects.names_and_labels import Object, metadata
from pagefleet_operator.plan.resolved import Resolved

DEFAULT_SIZE = "100Gi"


def model_claim(service: InferenceService, resolved: Resolved) -> Object:
    """Return the claim. All of it but the size is fixed from the first day; the size can grow where its class can."""
    assert resolved.makes_claim
    cache = service.spec.cache
    spec: Object = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": cache.size or DEFAULT_SIZE}},
    }
    if cache.storage_class is not None:
        spec["storageClassName"] = cache.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(service, resolved.claim, "model"),
        "spec": spec,
    }
