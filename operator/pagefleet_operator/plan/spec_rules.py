"""Fields of an InferenceService that contradict each other.

The API server refuses most of these by the resource's own rules. They are checked here too: `pagefleet up` has no API
server, and a cluster may still have an older definition of the resource.
"""

from __future__ import annotations

from collections.abc import Callable

from pagefleet_protocol.inference_service import InferenceService, InferenceServiceSpec
from pagefleet_protocol.kube_names import RESERVED_SUFFIXES
from pagefleet_protocol.model_uri import ModelUri, parse_model_uri

from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.refusal import Refusal

_CACHES = {
    "hf": ("auto", "none", "pvc", "hostPath"),
    "s3": ("auto", "none", "pvc", "hostPath"),
    "gs": ("auto", "none", "pvc", "hostPath"),
    "pvc": ("auto", "pvc"),
    "oci": ("auto", "image"),
    "file": ("auto", "none"),
    "builtin": ("auto", "none"),
}
"""Scheme of the model's URI -> cache types that can hold it."""


def find_contradiction(service: InferenceService) -> Refusal | None:
    """Return the first one, or nothing."""
    if service.name.endswith(RESERVED_SUFFIXES):
        return _invalid(
            "metadata.name", f"may not end in {', '.join(RESERVED_SUFFIXES)}: objects of other services end so"
        )
    uri = parse_model_uri(service.spec.model.uri)
    checks: tuple[Callable[[InferenceServiceSpec, ModelUri], Refusal | None], ...] = (_model, _cache, _env)
    found = next((refusal for check in checks if (refusal := check(service.spec, uri))), None)
    return found or _rollout(service.spec) or _expose(service.spec)


def _invalid(path: str, message: str) -> Refusal:
    return Refusal(path, Reason.INVALID_SPEC, message)


def _model(spec: InferenceServiceSpec, uri: ModelUri) -> Refusal | None:
    model = spec.model
    if model.revision is not None and uri.scheme != "hf":
        return _invalid("spec.model.revision", f"only hf:// has revisions, {uri.scheme}:// has none: leave it out")
    if model.secret_ref is not None and not uri.remote:
        remedy = (
            "name the registry's Secret in podTemplate.spec.imagePullSecrets" if uri.scheme == "oci" else "leave it out"
        )
        return _invalid("spec.model.secretRef", f"credentials are for hf://, s3:// and gs://: {remedy}")
    if model.endpoint is not None and uri.scheme not in ("hf", "s3"):
        return _invalid("spec.model.endpoint", f"is for hf:// and s3://, not for {uri.scheme}://: leave it out")
    return None


def _cache(spec: InferenceServiceSpec, uri: ModelUri) -> Refusal | None:
    cache, allowed = spec.cache, _CACHES[uri.scheme]
    if cache.type not in allowed:
        return _invalid("spec.cache.type", f"is {cache.type}; a model at {uri.scheme}:// takes {' or '.join(allowed)}")
    if cache.type == "hostPath" and cache.path is None:
        return _invalid("spec.cache.path", "is needed for cache.type hostPath: give a folder of the nodes")
    if cache.type != "hostPath" and cache.path is not None:
        return _invalid("spec.cache.path", "is for cache.type hostPath: set the type, or leave the path out")
    return _claim(spec, uri)


def _claim(spec: InferenceServiceSpec, uri: ModelUri) -> Refusal | None:
    cache = spec.cache
    for name, given in (("claim", cache.claim), ("size", cache.size), ("storageClass", cache.storage_class)):
        if given is None:
            continue
        if uri.scheme == "pvc":
            return _invalid(f"spec.cache.{name}", "the model's pvc:// URI names the claim already: leave it out")
        if cache.type != "pvc":
            return _invalid(f"spec.cache.{name}", "is for cache.type pvc: set the type, or leave it out")
        if name != "claim" and cache.claim is not None:
            return _invalid(f"spec.cache.{name}", f"cache.claim {cache.claim} exists already: leave it out")
    return None


def _env(spec: InferenceServiceSpec, uri: ModelUri) -> Refusal | None:
    for index, variable in enumerate(spec.engine.env):
        if variable.value is not None and variable.value_from is not None:
            return _invalid(f"spec.engine.env[{index}]", f"{variable.name} has value and valueFrom: give one of them")
    return None


def _rollout(spec: InferenceServiceSpec) -> Refusal | None:
    if spec.rollout.max_surge == 0 and spec.rollout.max_unavailable == 0:
        return _invalid(
            "spec.rollout", "maxSurge and maxUnavailable are both 0, so no engine could be replaced: raise one of them"
        )
    return None


def _expose(spec: InferenceServiceSpec) -> Refusal | None:
    expose = spec.expose
    if expose.type != "ClusterIP" and expose.host is None:
        return _invalid("spec.expose.host", f"is needed for expose.type {expose.type}: give the name that clients use")
    if expose.type == "Gateway" and expose.gateway_ref is None:
        return _invalid("spec.expose.gatewayRef", "is needed for expose.type Gateway: name the Gateway")
    if expose.type != "Gateway" and expose.gateway_ref is not None:
        return _invalid("spec.expose.gatewayRef", "is for expose.type Gateway: set the type, or leave it out")
    if expose.type != "Ingress" and (expose.tls is not None or expose.class_name is not None):
        field = "tls" if expose.tls is not None else "className"
        return _invalid(f"spec.expose.{field}", "is for expose.type Ingress: set the type, or leave it out")
    return None
