"""Rules about the engines of a resource: flags, variables, offload and ranks; `resource_rules.py` has all others."""

from __future__ import annotations

import re

from pagefleet_protocol.inference_service import EnvVar, InferenceServiceSpec
from pagefleet_protocol.kv_offload import KvOffload
from pagefleet_protocol.quantities import quantity
from pagefleet_protocol.resource_base import ITEMS, Rule

_FLEETS = "left to the fleet"
_OFFLOAD = "set spec.engine.kvOffload"
_PARALLELISM = "set spec.resources.gpus or spec.parallelism"
OWN_FLAGS = {
    "--host": _FLEETS,
    "--port": _FLEETS,
    "--kv-events-host": _FLEETS,
    "--fleet-key-file": _FLEETS,
    "--kv-host": _FLEETS,
    "--kv-port": _FLEETS,
    "--kv-peers": _FLEETS,
    "--kv-offload-dir": _FLEETS,
    "--served-model-name": "set spec.model.name",
    "--dtype": "set spec.engine.dtype",
    "--quantization": "set spec.engine.quantization",
    "--max-model-len": "set spec.engine.maxModelLen",
    "--drain-timeout": "set spec.rollout.drainSeconds",
    "--kv-events-port": "set spec.router.kvEvents",
    "--kv-offload-memory": _OFFLOAD,
    "--kv-offload-disk": _OFFLOAD,
    "--kv-offload-policy": _OFFLOAD,
    "--kv-connector": f"{_OFFLOAD} or spec.disaggregation",
    "--kv-role": "set spec.disaggregation",
    "--kv-data-plane": "set spec.disaggregation.dataPlane",
    "--kv-send-type": "set spec.disaggregation.sendType",
    "--tensor-parallel-size": _PARALLELISM,
    "-tp": _PARALLELISM,
}
"""Flags of `pagefleet serve` that come from fields, and what to do instead of giving them."""
LEAST_ROOM = "1Mi"
"""Of kvOffload: less is a number without its unit."""


def _one_value(variable: EnvVar) -> bool:
    return (variable.value is None) != (variable.value_from is None)


def _no_own_flag(args: tuple[str, ...]) -> bool:
    """Command lines may shorten a flag, so the beginnings of our own flags count as well."""
    flags = [arg.partition("=")[0] for arg in args if re.match("--?[a-z]", arg)]
    return not any(own.startswith(flag) for own in OWN_FLAGS for flag in flags)


def _offload_has_room(offload: KvOffload) -> bool:
    sizes = (offload.memory, *((offload.disk.size,) if offload.disk else ()))
    return all(quantity(size) >= quantity(LEAST_ROOM) for size in sizes)


def _gpus_are_ranks(spec: InferenceServiceSpec) -> bool:
    return not (spec.resources.gpus or 0) % (spec.parallelism.tensor or 1)


def _cel_has_room(size: str) -> str:
    """Return CEL for a size that is large enough; one that is no quantity at all breaks its own pattern."""
    text = f"string(self.{size})"
    return f"(!isQuantity({text}) || quantity({text}).compareTo(quantity('{LEAST_ROOM}')) >= 0)"


def _offload_rule(*at: str) -> Rule:
    return Rule(
        at,
        f"{_cel_has_room('memory')} && (!has(self.disk) || {_cel_has_room('disk.size')})",
        f"takes {LEAST_ROOM} or more as memory, and as disk.size: give a unit with the number, as in 8Gi",
        _offload_has_room,
    )


_SPEC = ("spec",)
_PARTS = tuple((*_SPEC, "disaggregation", role) for role in ("prefill", "decode"))
_ARGS_CEL = (
    f"self.all(arg, !arg.matches('^--?[a-z]') || {list(OWN_FLAGS)}.all(own, !own.startsWith(arg.split('=')[0])))"
)
_ARGS_MESSAGE = "must not hold " + "; ".join(
    f"{', '.join(flag for flag, one in OWN_FLAGS.items() if one == remedy)} ({remedy})"
    for remedy in dict.fromkeys(OWN_FLAGS.values())
)
ENGINE_RULES = (
    Rule((*_SPEC, "engine", "args"), _ARGS_CEL, _ARGS_MESSAGE, _no_own_flag),
    Rule(
        (*_SPEC, "engine", "env", ITEMS),
        "has(self.value) != has(self.valueFrom)",
        "give either value or valueFrom",
        _one_value,
    ),
    _offload_rule(*_SPEC, "engine", "kvOffload"),
)
"""Of services and profiles alike."""
RANK_RULES = (
    Rule(
        _SPEC,
        "!has(self.parallelism.tensor) || !has(self.resources.gpus) || "
        "self.resources.gpus % self.parallelism.tensor == 0",
        "must have as many ranks as resources.gpus has GPUs (0: ranks compute on the CPU): leave one of the two out",
        _gpus_are_ranks,
        "parallelism",
    ),
)
PART_RULES = tuple(
    rule
    for part in _PARTS
    for rule in (
        Rule((*part, "args"), _ARGS_CEL, _ARGS_MESSAGE, _no_own_flag),
        _offload_rule(*part, "kvOffload"),
    )
)
"""Of prefill and of decode engines."""
