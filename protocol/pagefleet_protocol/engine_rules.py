"""Rules about the engines of a resource: flags, variables, offload and ranks; `resource_rules.py` has all others."""

from __future__ import annotations

import re

from pagefleet_protocol.inference_service import EnvVar, InferenceServiceSpec
from pagefleet_protocol.kv_offload import KvOffload
from pagefleet_protocol.parallelism import Parallelism
from pagefleet_protocol.quantities import quantity
from pagefleet_protocol.resource_base import ITEMS, Rule

_FLEETS = "left to the fleet"
_OFFLOAD = "spec.engine.kvOffload"
_PARALLELISM = "spec.parallelism"
OWN_FLAGS = {
    "--host": _FLEETS,
    "--port": _FLEETS,
    "--kv-events-host": _FLEETS,
    "--fleet-key-file": _FLEETS,
    "--kv-host": _FLEETS,
    "--kv-port": _FLEETS,
    "--kv-peers": _FLEETS,
    "--kv-offload-dir": _FLEETS,
    "--served-model-name": "spec.model.name",
    "--dtype": "spec.engine.dtype",
    "--quantization": "spec.engine.quantization",
    "--max-model-len": "spec.engine.maxModelLen",
    "--drain-timeout": "spec.rollout.drainSeconds",
    "--kv-events-port": "spec.router.kvEvents",
    "--kv-offload-memory": _OFFLOAD,
    "--kv-offload-disk": _OFFLOAD,
    "--kv-offload-policy": _OFFLOAD,
    "--kv-connector": f"{_OFFLOAD} or spec.disaggregation",
    "--kv-role": "spec.disaggregation",
    "--kv-data-plane": "spec.disaggregation.dataPlane",
    "--kv-send-type": "spec.disaggregation.sendType",
    "--tensor-parallel-size": _PARALLELISM,
    "-tp": _PARALLELISM,
    "--pipeline-parallel-size": _PARALLELISM,
    "-pp": _PARALLELISM,
    "--data-parallel-size": _PARALLELISM,
    "-dp": _PARALLELISM,
    "--enable-expert-parallel": _PARALLELISM,
    "-ep": _PARALLELISM,
    "--nnodes": "spec.nodes",
    "--node-rank": _FLEETS,
    "--master-addr": _FLEETS,
    "--master-port": _FLEETS,
    "--headless": _FLEETS,
}
"""Flags of `pagefleet serve` that come from elsewhere, and from where: fields to set instead."""
ONE_COPY = (
    "copies that share no experts are engines by themselves: leave out parallelism.data, and give spec.replicas; or "
    "give parallelism.expert"
)
_KV_VARIABLES = tuple(f"PAGEFLEET_ENGINE_KV_{name}" for name in ("CONNECTOR", "ROLE", "DATA_PLANE"))
"""Which would say of the same what no flag may."""
KV_OF_RANKS = "K/V of several ranks goes by tcp, or by nccl between GPUs: leave out disaggregation.dataPlane"
PORTS_OF_A_POOL = 8
"""Of inference.networking.k8s.io/v1."""
LESS_THAN_RANKS = (
    f"an InferencePool has {PORTS_OF_A_POOL} ports, one for each data rank: lower it, or leave out router.inferencePool"
)
LEAST_ROOM = "1Mi"
"""Of kvOffload: less is a number without its unit."""


def _one_value(variable: EnvVar) -> bool:
    return (variable.value is None) != (variable.value_from is None)


def _no_kv_variable(variable: EnvVar) -> bool:
    return variable.name not in _KV_VARIABLES


def _no_own_flag(args: tuple[str, ...]) -> bool:
    """Command lines may shorten a flag, so the beginnings of our own flags count as well."""
    flags = [arg.partition("=")[0] for arg in args if re.match("--?[a-z]", arg)]
    return not any(own.startswith(flag) for own in OWN_FLAGS for flag in flags)


def _offload_has_room(offload: KvOffload) -> bool:
    sizes = (offload.memory, *((offload.disk.size,) if offload.disk else ()))
    return all(quantity(size) >= quantity(LEAST_ROOM) for size in sizes)


def _ranks(given: Parallelism) -> int:
    """Return the ranks that are written down."""
    return (given.tensor or 1) * (given.pipeline or 1) * (given.data or 1)


def _gpus_are_ranks(spec: InferenceServiceSpec) -> bool:
    gpus, nodes, ranks = spec.resources.gpus or 0, spec.nodes, _ranks(spec.parallelism)
    if gpus and spec.parallelism.tensor is not None:
        return ranks % gpus == 0 and nodes in (None, ranks // gpus)
    if gpus:
        return gpus * (nodes or 1) % ranks == 0
    return spec.parallelism.tensor is None or ranks % (nodes or 1) == 0


def _one_copy_over_nodes(spec: InferenceServiceSpec) -> bool:
    gpus = spec.resources.gpus or 0
    spread = (spec.nodes or 1) > 1 or (
        gpus > 0 and spec.parallelism.tensor is not None and _ranks(spec.parallelism) > gpus
    )
    return not spread or (spec.parallelism.data or 1) == 1 or bool(spec.parallelism.expert)


def _fits_a_pool(spec: InferenceServiceSpec) -> bool:
    return spec.router.inference_pool is None or (spec.parallelism.data or 1) <= PORTS_OF_A_POOL


def _kv_of_ranks_leaves(spec: InferenceServiceSpec) -> bool:
    both = spec.disaggregation
    if both is None or both.data_plane != "cuda_ipc":
        return True
    gpus = [one.gpus or 0 for one in (spec.resources, both.prefill.resources, both.decode.resources)]
    given = (spec.parallelism, both.prefill.parallelism, both.decode.parallelism)
    return max(*gpus, *((one.tensor or 1) * (one.pipeline or 1) for one in given)) <= 1


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


_PART_FIELDS = ("disaggregation.prefill.", "disaggregation.decode.")


def _cel_or_one(field: str) -> str:
    return f"(has(self.{field}) ? self.{field} : 1)"


_TENSOR, _PIPELINE, _DATA = (f"parallelism.{name}" for name in ("tensor", "pipeline", "data"))
_EXPERT = "parallelism.expert"
_CEL_RANKS = " * ".join(map(_cel_or_one, (_TENSOR, _PIPELINE, _DATA)))
_CEL_NODES = _cel_or_one("nodes")
_CEL_GPUS = "(has(self.resources.gpus) ? self.resources.gpus : 0)"
_ARGS_CEL = (
    f"self.all(arg, !arg.matches('^--?[a-z]') || {list(OWN_FLAGS)}.all(own, !own.startsWith(arg.split('=')[0])))"
)
_ARGS_MESSAGE = "must not hold what has its own field: " + "; ".join(
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
    Rule(
        (*_SPEC, "engine", "env", ITEMS),
        f"!(self.name in {list(_KV_VARIABLES)})",
        f"must set none of {', '.join(_KV_VARIABLES)}: engines pass K/V as spec.disaggregation says, so write that",
        _no_kv_variable,
    ),
    _offload_rule(*_SPEC, "engine", "kvOffload"),
)
"""Of services and profiles alike."""
RANK_RULES = (
    Rule(
        _SPEC,
        f"{_CEL_GPUS} > 0 ? (has(self.{_TENSOR}) ? {_CEL_RANKS} % {_CEL_GPUS} == 0 && (!has(self.nodes) || "
        f"{_CEL_RANKS} == {_CEL_GPUS} * self.nodes) : {_CEL_GPUS} * {_CEL_NODES} % ({_CEL_RANKS}) == 0) : "
        f"!has(self.{_TENSOR}) || {_CEL_RANKS} % {_CEL_NODES} == 0",
        "tensor * pipeline * data must be the GPUs of whole nodes (resources.gpus is of one node, spec.nodes their "
        "number; gpus 0: ranks compute on the CPU): leave tensor, gpus or nodes out, and it follows from the others",
        _gpus_are_ranks,
        "parallelism",
    ),
    Rule(
        _SPEC,
        f"{_cel_or_one(_DATA)} == 1 || has(self.{_EXPERT}) && self.{_EXPERT} || {_CEL_NODES} == 1 && "
        f"({_CEL_GPUS} == 0 || !has(self.{_TENSOR}) || {_CEL_RANKS} <= {_CEL_GPUS})",
        f"with several nodes {ONE_COPY}",
        _one_copy_over_nodes,
        "parallelism.data",
    ),
    Rule(
        _SPEC,
        f"!has(self.router.inferencePool) || {_cel_or_one(_DATA)} <= {PORTS_OF_A_POOL}",
        LESS_THAN_RANKS,
        _fits_a_pool,
        "parallelism.data",
    ),
    Rule(
        _SPEC,
        "!has(self.disaggregation) || self.disaggregation.dataPlane != 'cuda_ipc' || "
        + " && ".join(
            f"(!has(self.{where}{name}) || self.{where}{name} <= 1)"
            for where in ("", *_PART_FIELDS)
            for name in ("resources.gpus", "parallelism.tensor", "parallelism.pipeline")
        ),
        f"with several ranks, or several resources.gpus, {KV_OF_RANKS}",
        _kv_of_ranks_leaves,
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
