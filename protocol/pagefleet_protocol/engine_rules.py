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
ONE_RANK = "an engine passes its K/V to nobody: leave out disaggregation and engine.kvOffload, or the ranks but one"
_DATA_RANKS = ("--data-parallel-size", "-dp")
"""Copies of the model on GPUs of their own, each of which has K/V of its own."""
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


def _kv_is_of_one_rank(spec: InferenceServiceSpec) -> bool:
    gpus, tensor, both = spec.resources.gpus or 0, spec.parallelism.tensor, spec.disaggregation
    if both is not None:
        return max(gpus, tensor or 0, *(one.resources.gpus or 0 for one in (both.prefill, both.decode))) <= 1
    copied = any(arg.startswith(_DATA_RANKS) for arg in spec.engine.args)
    return spec.engine.kv_offload is None or (tensor or (1 if copied else gpus)) <= 1


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


def _cel_one_gpu(node: str) -> str:
    return f"(!has({node}.resources.gpus) || {node}.resources.gpus <= 1)"


_SPEC = ("spec",)
_PARTS = tuple((*_SPEC, "disaggregation", role) for role in ("prefill", "decode"))
_ONE_TENSOR_RANK = "(!has(self.parallelism.tensor) || self.parallelism.tensor == 1)"
_COPIED = (
    "has(self.parallelism.tensor) || has(self.engine.args) && "
    f"self.engine.args.exists(arg, {' || '.join(f'arg.startsWith({flag!r})' for flag in _DATA_RANKS)})"
)
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
    Rule(
        _SPEC,
        f"(!has(self.engine.kvOffload) || {_ONE_TENSOR_RANK} && ({_cel_one_gpu('self')} || {_COPIED})) && "
        f"(!has(self.disaggregation) || {_ONE_TENSOR_RANK} && {_cel_one_gpu('self')} && "
        f"{_cel_one_gpu('self.disaggregation.prefill')} && {_cel_one_gpu('self.disaggregation.decode')})",
        f"with several ranks, or several resources.gpus, {ONE_RANK}",
        _kv_is_of_one_rank,
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
