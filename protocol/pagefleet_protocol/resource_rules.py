"""Rules about several fields at once, each in two languages: CEL for the API server, Python for files, one message.

`tests/kubernetes/test_crds.py` holds the two against each other. CEL's cost is bounded by the limits of the fields.
Source: Kubernetes documentation, "Validation rules" of CustomResourceDefinitions.
"""

from __future__ import annotations

import re

from pydantic.alias_generators import to_snake

from pagefleet_protocol.engine_rules import ENGINE_RULES, PART_RULES, RANK_RULES
from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_service import (
    Autoscaling,
    DisaggregatedRole,
    Disaggregation,
    InferenceService,
    InferenceServiceSpec,
    Model,
    Rollout,
    ScalingTarget,
)
from pagefleet_protocol.kube_names import DOTTED_SUFFIX, NODES_SUFFIX, RESERVED_SUFFIXES
from pagefleet_protocol.model_uri import EXAMPLES, HUB_PAGE, PATTERN
from pagefleet_protocol.resource_base import Rule

MAX_NAME_LENGTH = 40
_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_SERVICE_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_RESERVED = f"({'|'.join(RESERVED_SUFFIXES)}|{NODES_SUFFIX}|{DOTTED_SUFFIX})$"
_CACHE_TYPES = {
    "hf": ("auto", "none", "pvc", "hostPath"),
    "s3": ("auto", "none", "pvc", "hostPath"),
    "gs": ("auto", "none", "pvc", "hostPath"),
    "modelscope": ("auto", "none", "pvc", "hostPath"),
    "https": ("auto", "none", "pvc", "hostPath"),
    "http": ("auto", "none", "pvc", "hostPath"),
    "pvc": ("auto", "pvc"),
    "oci": ("auto", "image"),
    "file": ("auto", "none"),
    "builtin": ("auto", "none"),
}


_HUB_NAME = "^[^:]*(:[^/]*)?$"
"""What has no scheme; a colon may stand before a GGUF file's type of numbers."""


def _name_fits(resource: InferenceService | InferenceProfile, pattern: str = _NAME) -> bool:
    return len(resource.name) <= MAX_NAME_LENGTH and re.fullmatch(pattern[1:-1], resource.name) is not None


def _service_name_fits(service: InferenceService) -> bool:
    return _name_fits(service, _SERVICE_NAME) and re.search(_RESERVED, service.name) is None


def _cache_suits_the_model(spec: InferenceServiceSpec) -> bool:
    types = _CACHE_TYPES.get(spec.model.uri.partition("://")[0])
    return types is None or spec.cache.type in types


def _claim_has_a_use(spec: InferenceServiceSpec) -> bool:
    cache = spec.cache
    makes = cache.size is not None or cache.storage_class is not None
    if cache.claim is None and not makes:
        return True
    return cache.type == "pvc" and not spec.model.uri.startswith("pvc://") and not (cache.claim is not None and makes)


def _name_is_no_alias(service: InferenceService) -> bool:
    return service.model_name not in service.spec.model.aliases


def _store_has_a_use(model: Model) -> bool:
    scheme = model.uri.partition("://")[0]
    return (
        (model.revision is None or scheme == "hf")
        and (model.secret_ref is None or scheme in ("hf", "s3", "gs"))
        and (model.endpoint is None or scheme in ("hf", "s3"))
    )


def _path_is_for_nodes(spec: InferenceServiceSpec) -> bool:
    return (spec.cache.type == "hostPath") == (spec.cache.path is not None)


def _rollout_moves(rollout: Rollout) -> bool:
    return rollout.max_surge != 0 or rollout.max_unavailable != 0


def _exposure_is_whole(spec: InferenceServiceSpec) -> bool:
    expose = spec.expose
    return (
        (expose.type == "ClusterIP") == (expose.host is None)
        and (expose.type == "Gateway") == (expose.gateway_ref is not None)
        and (expose.type == "Ingress" or (expose.tls is None and expose.class_name is None))
    )


def _replicas_has_one_master(spec: InferenceServiceSpec) -> bool:
    """The API server fills in 1 where nothing is written, so 1 counts as nothing."""
    return spec.autoscaling is None or spec.autoscaling.mode != "Internal" or spec.replicas == 1


def _outside_has_the_bounds(scaling: Autoscaling) -> bool:
    given = (scaling.max, scaling.target, scaling.scale_to_zero)
    return scaling.mode != "External" or (scaling.min == 1 and given == (None, None, None))


def _at_most_is_given(scaling: Autoscaling) -> bool:
    return scaling.mode == "External" or (scaling.max is not None and scaling.min <= scaling.max)


def _one_kind_of_target(target: ScalingTarget) -> bool:
    latencies = target.ttft_ms is not None or target.itl_ms is not None
    return latencies != (target.queue is not None or target.kv_usage is not None)


def _roles_have_the_engines(spec: InferenceServiceSpec) -> bool:
    return spec.disaggregation is None or (spec.replicas == 1 and spec.autoscaling is None)


def _pool_has_whole_engines(spec: InferenceServiceSpec) -> bool:
    return spec.router.inference_pool is None or spec.disaggregation is None


def _both_or_none(disaggregation: Disaggregation) -> bool:
    prefill, decode = disaggregation.prefill, disaggregation.decode
    rests = [role.autoscaling.scale_to_zero if role.autoscaling else None for role in (prefill, decode)]
    return (prefill.replicas == 0) == (decode.replicas == 0) and rests[0] == rests[1]


def _scales_within(role: DisaggregatedRole, others: tuple[str, ...]) -> bool:
    scaling = role.autoscaling
    if scaling is None:
        return True
    bounded = scaling.mode != "External" and scaling.max is not None and scaling.min <= scaling.max
    right = scaling.target is None or all(getattr(scaling.target, to_snake(other)) is None for other in others)
    return bounded and (scaling.mode != "Internal" or role.replicas == 1) and right


def _cel_scales_within(name: str, others: tuple[str, ...]) -> str:
    scaling = f"self.{name}.autoscaling"
    right = " && ".join(f"!has({scaling}.target.{other})" for other in others)
    return (
        f"!has({scaling}) || {scaling}.mode != 'External' && has({scaling}.max) && {scaling}.min <= {scaling}.max && "
        f"({scaling}.mode != 'Internal' || self.{name}.replicas == 1) && (!has({scaling}.target) || {right})"
    )


def _cel_rests(name: str) -> str:
    """Return CEL's word for the seconds after which a role's engines end; 0: they never do."""
    rest = f"self.{name}.autoscaling.scaleToZero"
    return f"(has(self.{name}.autoscaling) && has({rest}) ? {rest}.after : 0)"


def _cel_cache_types() -> str:
    """Of a URI that is none of these, its own rule tells."""
    by_types: dict[tuple[str, ...], list[str]] = {}
    for scheme, types in _CACHE_TYPES.items():
        by_types.setdefault(types, []).append(scheme)
    names = f"|{_HUB_NAME}"
    return " && ".join(
        f"(!self.model.uri.matches('^({'|'.join(schemes)})://{names if 'hf' in schemes else ''}') || "
        f"self.cache.type in {list(types)})"
        for types, schemes in by_types.items()
    )


_LENGTH_CEL = f"self.metadata.name.size() <= {MAX_NAME_LENGTH}"
# Defaults of objects are held against their own rules before their fields have defaults, so rules that read
# spec.cache.type and spec.expose.type are rules of the spec.
_SPEC = ("spec",)
_MODEL = ("spec", "model")
_ENGINE = ("spec", "engine")
_DISAGGREGATION = ("spec", "disaggregation")
_PREFILL_TARGETS = ("ttftMs", "queue")
_DECODE_TARGETS = ("itlMs", "kvUsage")
PROFILE_RULES = (
    Rule(
        (),
        f"{_LENGTH_CEL} && self.metadata.name.matches('{_NAME}')",
        f"must be at most {MAX_NAME_LENGTH} lower-case letters, digits and '-', starting with a letter and not ending "
        "with '-'",
        _name_fits,
        "metadata.name",
    ),
    *ENGINE_RULES,
)
"""Rules of InferenceProfile."""
SERVICE_RULES = (
    Rule(
        (),
        f"{_LENGTH_CEL} && self.metadata.name.matches(r'{_SERVICE_NAME}') && "
        f"!self.metadata.name.matches('{_RESERVED}')",
        f"must be at most {MAX_NAME_LENGTH} lower-case letters, digits, '-' and '.', starting with a letter, with a "
        "letter or digit at both sides of each '.' and at the end, and not ending with "
        f"{', '.join(RESERVED_SUFFIXES)}, -engine- and a number, or -x and ten hexadecimal digits (parts of "
        "InferenceServices are called so)",
        _service_name_fits,
        "metadata.name",
    ),
    Rule(
        (*_MODEL, "uri"),
        f"self.matches(r'{PATTERN}') && !self.matches('{HUB_PAGE}')",
        f"must be one of {EXAMPLES}",
        lambda uri: re.fullmatch(PATTERN[1:-1], uri) is not None and not re.match(HUB_PAGE, uri),
    ),
    Rule(
        (),
        "!((has(self.spec.model.name) ? self.spec.model.name : self.metadata.name) in self.spec.model.aliases)",
        "must not repeat the model's name (spec.model.name, else metadata.name)",
        _name_is_no_alias,
        "spec.model.aliases",
    ),
    Rule(
        _MODEL,
        f"(!has(self.revision) || self.uri.matches('^hf://|{_HUB_NAME}')) && "
        f"(!has(self.secretRef) || self.uri.matches('^(hf|s3|gs)://|{_HUB_NAME}')) && "
        f"(!has(self.endpoint) || self.uri.matches('^(hf|s3)://|{_HUB_NAME}'))",
        "takes revision for hf:// alone, secretRef for hf://, s3:// and gs:// (images are pulled with "
        "imagePullSecrets), endpoint for hf:// and s3://: leave out what the URI has no use for",
        _store_has_a_use,
    ),
    Rule(
        _SPEC,
        _cel_cache_types(),
        "does not suit the model: what is downloaded takes auto, none, pvc or hostPath; pvc:// takes auto or pvc; "
        "oci:// takes auto or image; file:// and builtin:// take auto or none",
        _cache_suits_the_model,
        "cache.type",
    ),
    Rule(
        _SPEC,
        "!has(self.cache.claim) && !has(self.cache.size) && !has(self.cache.storageClass) || "
        "self.cache.type == 'pvc' && !self.model.uri.startsWith('pvc://') && "
        "!(has(self.cache.claim) && (has(self.cache.size) || has(self.cache.storageClass)))",
        "claim (one that exists) and size with storageClass (one is made) exclude each other; both are for type pvc "
        "alone, and not for pvc:// models",
        _claim_has_a_use,
        "cache",
    ),
    Rule(
        _SPEC,
        "(self.cache.type == 'hostPath') == has(self.cache.path)",
        "is needed for type hostPath, and for no other",
        _path_is_for_nodes,
        "cache.path",
    ),
    Rule(
        ("spec", "rollout"),
        "!(has(self.maxSurge) && has(self.maxUnavailable)) || self.maxSurge + self.maxUnavailable > 0",
        "maxSurge and maxUnavailable must not both be 0: no rollout would ever begin",
        _rollout_moves,
    ),
    Rule(
        _SPEC,
        "(self.expose.type == 'ClusterIP') != has(self.expose.host) && "
        "(self.expose.type == 'Gateway') == has(self.expose.gatewayRef) && "
        "(self.expose.type == 'Ingress' || !has(self.expose.tls) && !has(self.expose.className))",
        "does not suit its type: ClusterIP takes nothing more; Ingress needs host, may have className and tls; Gateway "
        "needs host and gatewayRef, and has tls of its own",
        _exposure_is_whole,
        "expose",
    ),
    Rule(
        _SPEC,
        "!has(self.autoscaling) || self.autoscaling.mode != 'Internal' || self.replicas == 1",
        "is chosen by autoscaling in mode Internal: leave it out (min and max bound it)",
        _replicas_has_one_master,
        "replicas",
    ),
    Rule(
        (*_SPEC, "autoscaling"),
        "self.mode != 'External' || self.min == 1 && !has(self.max) && !has(self.target) && !has(self.scaleToZero)",
        "takes nothing but mode where that is External: bounds and targets are in the autoscaler outside",
        _outside_has_the_bounds,
    ),
    Rule(
        (*_SPEC, "autoscaling"),
        "self.mode == 'External' || has(self.max) && self.min <= self.max",
        "must be given, and be at least min: the most engines that there may be, as in max: 8",
        _at_most_is_given,
        "max",
    ),
    Rule(
        (*_SPEC, "autoscaling", "target"),
        "(has(self.ttftMs) || has(self.itlMs)) != (has(self.queue) || has(self.kvUsage))",
        "give ttftMs and itlMs, or queue and kvUsage; of a pair one is enough",
        _one_kind_of_target,
    ),
    Rule(
        _SPEC,
        "!has(self.disaggregation) || self.replicas == 1 && !has(self.autoscaling)",
        "has replicas and autoscaling of its own for prefill and for decode: leave out spec.replicas and "
        "spec.autoscaling",
        _roles_have_the_engines,
        "disaggregation",
    ),
    Rule(
        _SPEC,
        "!has(self.router.inferencePool) || !has(self.disaggregation)",
        "is for engines that compute whole requests, since a gateway asks one engine: leave it out, or disaggregation",
        _pool_has_whole_engines,
        "router.inferencePool",
    ),
    Rule(
        _DISAGGREGATION,
        f"(self.prefill.replicas == 0) == (self.decode.replicas == 0) && "
        f"{_cel_rests('prefill')} == {_cel_rests('decode')}",
        "prefill and decode need each other: give replicas 0 to both or to neither, and the same scaleToZero",
        _both_or_none,
    ),
    Rule(
        _DISAGGREGATION,
        _cel_scales_within("prefill", _DECODE_TARGETS),
        "autoscaling of prefill is Internal or Advisory (whoever scales it from outside sets replicas instead), has "
        "max, which is not below min, and ttftMs or queue as target; replicas is left out in mode Internal",
        lambda both: _scales_within(both.prefill, _DECODE_TARGETS),
        "prefill",
    ),
    Rule(
        _DISAGGREGATION,
        _cel_scales_within("decode", _PREFILL_TARGETS),
        "autoscaling of decode is Internal or Advisory (whoever scales it from outside sets replicas instead), has "
        "max, which is not below min, and itlMs or kvUsage as target; replicas is left out in mode Internal",
        lambda both: _scales_within(both.decode, _PREFILL_TARGETS),
        "decode",
    ),
    *ENGINE_RULES,
    *RANK_RULES,
    *PART_RULES,
)
"""Rules of InferenceService."""
