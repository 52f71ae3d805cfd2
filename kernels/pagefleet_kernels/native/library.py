"""The compiled library, as plain C functions; each kernel is there once for every instruction set."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch  # noqa: F401  brings the OpenMP that the library computes with: both then share one pool of threads

from pagefleet_kernels.errors import BackendUnavailableError

LIBRARY = Path(__file__).with_name("libpagefleet_kernels.so")
_ABI_VERSION = 15


class Layer(Structure):
    """See kernels.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("kv_heads", c_int32),
        ("group", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("is_bf16", c_int32),
        ("window", c_int32),
        ("chunk", c_int32),
        ("pages", c_int32),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("slopes", c_void_p),
    )


class Step(Structure):
    """See kernels.h."""

    _fields_ = (
        ("starts", c_void_p),
        ("seq_lens", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("num_seqs", c_int32),
    )


class Plan(Structure):
    """See kernels.h."""

    _fields_ = (
        ("tasks", c_void_p),
        ("num_tasks", c_int32),
        ("threads", c_int32),
        ("partials", c_void_p),
        ("counters", c_void_p),
        ("part", c_int64),
    )


class PlanSize(Structure):
    """See kernels.h."""

    _fields_ = (
        ("tasks", c_int32),
        ("slots", c_int32),
        ("tiles", c_int32),
        ("threads", c_int32),
        ("queries", c_int32),
    )


class Experts(Structure):
    """See kernels.h."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("num_experts", c_int32),
        ("hidden", c_int32),
        ("width", c_int32),
        ("gate", c_int32),
        ("is_bf16", c_int32),
    )


class Packed(Structure):
    """See kernels.h."""

    _fields_ = (
        ("packed", c_void_p),
        ("row_scales", c_void_p),
        ("table", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("zeros", c_int32),
        ("input_block", c_int32),
        ("shared", c_int32),
    )


class Dense(Structure):
    """See kernels.h."""

    _fields_ = (("packed", c_void_p), ("inputs", c_int32), ("outputs", c_int32), ("is_bf16", c_int32))


class QuantizedExperts(Structure):
    """See kernels.h."""

    _fields_ = (
        ("layer", Experts),
        ("gate", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("rounds_rows", c_int32),
    )


class Routed(Structure):
    """See kernels.h."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("experts", c_void_p),
        ("weights", c_void_p),
        ("num_rows", c_int32),
        ("top_k", c_int32),
    )


class Blocks(Structure):
    """See kernels.h."""

    _fields_ = (
        ("blocks", c_void_p),
        ("row_bytes", c_int64),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("kind", c_int32),
    )


class Product(Structure):
    """See kernels.h."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("other", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("other_stride", c_int64),
        ("rows", c_int32),
        ("then", c_int32),
        ("is_bf16", c_int32),
    )


class Sampling(Structure):
    """See kernels.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("fields", c_void_p),
        ("lens", c_void_p),
        ("rows", c_int32),
        ("vocab", c_int32),
        ("is_bf16", c_int32),
        ("threads", c_int32),
    )


class Rows(Structure):
    """See kernels.h."""

    _fields_ = (
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("tokens", c_int32),
        ("heads", c_int32),
        ("width", c_int32),
        ("weight_stride", c_int32),
        ("is_bf16", c_int32),
        ("threads", c_int32),
    )


class Rotation(Structure):
    """See kernels.h."""

    _fields_ = (
        ("cos_sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("num_heads", c_int32),
        ("rotary_dim", c_int32),
        ("neighbours", c_int32),
    )


class Routing(Structure):
    """See kernels.h."""

    _fields_ = (
        ("correction", c_void_p),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("scoring", c_int32),
        ("renormalize", c_int32),
        ("num_groups", c_int32),
        ("top_groups", c_int32),
        ("best_of_group", c_int32),
        ("scale", c_float),
    )


class Call(Structure):
    """See kernels.h."""

    _fields_ = (
        ("function", c_int32),
        ("counts", c_int32 * 5),
        ("number", c_float),
        ("strides", c_int64 * 4),
        ("at", c_void_p * 6),
    )


TASK_INTS = 9
"""Of a Task of kernels.h."""
CALLS = (
    "plan_attention",
    "write_pages",
    "attend",
    "run_experts",
    "run_quantized_experts",
    "run_product",
    "run_dense",
    "norm",
    "rotate",
    "route",
    "decode_blocks",
)
"""The functions of a Call, by number."""


_LAYER, _STEP, _PLAN = POINTER(Layer), POINTER(Step), POINTER(Plan)
_EXPERTS, _QUANTIZED, _ROUTED = POINTER(Experts), POINTER(QuantizedExperts), POINTER(Routed)
_PACKED, _DENSE, _PRODUCT = POINTER(Packed), POINTER(Dense), POINTER(Product)
FUNCTIONS: Mapping[str, Any] = {
    "room": CFUNCTYPE(c_int32, _LAYER),
    "part": CFUNCTYPE(c_int32, _LAYER, c_int32),
    "attend": CFUNCTYPE(None, _LAYER, _STEP, _PLAN, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64),
    "experts_room": CFUNCTYPE(c_int64, _EXPERTS, c_int32),
    "run_experts": CFUNCTYPE(None, _EXPERTS, _ROUTED, c_void_p, c_int32),
    "quantized_experts_room": CFUNCTYPE(c_int64, _QUANTIZED, c_int32),
    "run_quantized_experts": CFUNCTYPE(None, _QUANTIZED, _ROUTED, c_void_p, c_int32),
    "product_room": CFUNCTYPE(c_int64, _PACKED, c_int32),
    "run_product": CFUNCTYPE(None, _PACKED, _PRODUCT, c_void_p, c_int32),
    "dense_bytes": CFUNCTYPE(c_int64, _DENSE),
    "lay_out_dense": CFUNCTYPE(None, _DENSE, c_void_p, c_int64, c_void_p, c_int32),
    "dense_room": CFUNCTYPE(c_int64, _DENSE, c_int32),
    "run_dense": CFUNCTYPE(None, _DENSE, c_int32, _PRODUCT, c_int64, c_int64, c_void_p, c_int32),
    "sampling_room": CFUNCTYPE(c_int64, c_int32, c_int32),
    "sample": CFUNCTYPE(None, POINTER(Sampling), c_void_p, c_void_p),
    "norm": CFUNCTYPE(None, POINTER(Rows), c_void_p, c_void_p, c_void_p, c_float),
    "rotate": CFUNCTYPE(None, POINTER(Rows), c_void_p, POINTER(Rotation)),
    "write_pages": CFUNCTYPE(None, _LAYER, c_void_p, c_void_p, *[c_int64] * 4, c_void_p, c_int32, c_int32),
    "decode_blocks": CFUNCTYPE(None, c_int32, c_void_p, c_int64, c_void_p, c_int32),
    "lay_out_blocks": CFUNCTYPE(c_int32, POINTER(Blocks), c_void_p, c_void_p, c_int32),
}
"""Those that each instruction set has, in the order of kernels.h."""


class _InstructionSet(Structure):
    _fields_ = (("name", c_char_p), *FUNCTIONS.items())


_PLAN_ATTENTION = CFUNCTYPE(PlanSize, _STEP, *[c_int32] * 5, _PLAN)
_ROUTE = CFUNCTYPE(None, POINTER(Routing), c_void_p, c_int64, c_int32, c_void_p, c_void_p, c_int32, c_int32)
_RUN_CALLS = CFUNCTYPE(None, c_void_p, POINTER(Call), c_int32)


class Library:
    """The functions, those of one instruction set among them; calls let other threads of Python run."""

    def __init__(self, library: ctypes.CDLL, chosen: _InstructionSet) -> None:
        self.instruction_set = str(chosen.name.decode())
        self.multiplies_bf16 = self.instruction_set.endswith(("_bf16", "_amx"))
        self.room, self.part, self.attend = chosen.room, chosen.part, chosen.attend
        self.experts_room, self.run_experts = chosen.experts_room, chosen.run_experts
        self.quantized_experts_room = chosen.quantized_experts_room
        self.run_quantized_experts = chosen.run_quantized_experts
        self.product_room, self.run_product = chosen.product_room, chosen.run_product
        self.dense_bytes, self.lay_out_dense = chosen.dense_bytes, chosen.lay_out_dense
        self.dense_room, self.run_dense = chosen.dense_room, chosen.run_dense
        self.sampling_room, self.sample = chosen.sampling_room, chosen.sample
        self.norm, self.rotate, self.write_pages = chosen.norm, chosen.rotate, chosen.write_pages
        self.decode_blocks, self.lay_out_blocks = chosen.decode_blocks, chosen.lay_out_blocks
        self.plan_attention = _PLAN_ATTENTION(("plan_attention", library))
        self.route = _ROUTE(("route", library))
        self.run_calls = partial(_RUN_CALLS(("run_calls", library)), ctypes.addressof(chosen))
        """Makes some of CALLS, an array and how many they are."""
        self.most_experts: int = library.most_experts()
        """That `route` chooses from."""
        self.parts_per_thread: int = library.parts_per_thread()
        """How fine `plan_attention` cuts."""
        self.own_cpu = library.own_cpu
        """The CPU that OpenMP gave the calling thread; -1: it binds none."""


def load_library(path: Path = LIBRARY) -> list[Library]:
    """The library for each instruction set that this processor has, the best first.

    Raises:
        BackendUnavailableError: it was not compiled, or does not fit this package or process.
    """
    if not path.exists():
        raise BackendUnavailableError("they were not compiled when this package was made, for want of a C++ compiler")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailableError(f"{path.name} cannot be loaded ({error})") from error
    if library.abi_version() != _ABI_VERSION:
        raise BackendUnavailableError(f"{path.name} is of another version: compile it again, with `make native`")
    library.instruction_set.argtypes, library.instruction_set.restype = (c_int32,), POINTER(_InstructionSet)
    found: list[Library] = []
    while chosen := library.instruction_set(len(found)):
        found.append(Library(library, chosen.contents))
    return found
