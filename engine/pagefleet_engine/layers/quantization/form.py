"""In which form a quantized matrix is kept on a device, and why it is not the one that pays most."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch
from pagefleet_kernels.mxfp4 import MXFP4_BLOCK
from pagefleet_kernels.native.attention import DTYPES
from pagefleet_kernels.native.quantized import takes_packed
from torch import Tensor

from pagefleet_engine.gguf.blocks import BY_NAME
from pagefleet_engine.layers.quantization_scheme import (
    BlockScheme,
    CodedScheme,
    PackedScheme,
    Quantization,
    QuantizationScheme,
    Rounding,
    Scheme,
)
from pagefleet_engine.layers.shard import Shard, shard_of
from pagefleet_engine.layers.weight import Placement

_FP8_CAPABILITY = (8, 9)
_SMALLEST_BLOCK = 16
_TRIED_INPUTS = 64
_PACKED_COLUMNS = 32


class Form(Enum):
    """How the weights live, and who multiplies."""

    SCALED = "as they are stored, multiplied by pagefleet_kernels"
    NATIVE = "as they are stored, multiplied by compiled kernels, by inputs in 8 bits"
    PACKED_INT8 = "in 8 bits, multiplied by oneDNN"
    RESCALED = "as their numbers in a floating type that holds them exactly; products are scaled"
    EXPANDED = "expanded to the model's type"


def form_of(scheme: Scheme, inputs: int | Shard, placement: Placement) -> tuple[Form, str]:
    """The form of a matrix of these columns, which may be a rank's, on the placement's device, and what keeps it from
    the device's own product in few bits; `""` where nothing does."""
    if placement.traceable:
        return Form.EXPANDED, "--compile takes torch's own operations on plain matrices"
    columns = shard_of(inputs)
    if isinstance(scheme, PackedScheme) and scheme.act_order and columns.is_part:
        return Form.EXPANDED, "a rank has parts of groups in act order"
    if placement.use_kernels:
        return _with_kernels(scheme, columns.size, placement.device)
    if placement.native is not None and placement.dtype in DTYPES:
        return _with_native(scheme, columns.size)
    if isinstance(scheme, QuantizationScheme):
        return form_on_cpu(scheme, has_onednn_int8())
    # torch's own product of 4 bits is slower than oneDNN's of what they stand for, but for one row
    return Form.EXPANDED, "without compiled kernels a CPU multiplies floats"


def _with_kernels(scheme: Scheme, inputs: int, device: torch.device) -> tuple[Form, str]:
    match scheme:
        case PackedScheme(group_size=size):
            if inputs % _PACKED_COLUMNS or (size is not None and (size < _PACKED_COLUMNS or size & (size - 1))):
                return Form.EXPANDED, f"kernels take groups of {_PACKED_COLUMNS} inputs, or a power of two more"
        case CodedScheme(group_size=size):
            if inputs % _PACKED_COLUMNS or size < _SMALLEST_BLOCK or size & (size - 1):
                return Form.EXPANDED, f"kernels take groups of a power of two, in runs of {_PACKED_COLUMNS} inputs"
            return Form.SCALED, "only weights are quantized"
        case BlockScheme(types=types):
            if left := [kind for kind in dict.fromkeys(types) if not BY_NAME[kind].on_gpu]:
                return Form.EXPANDED, f"kernels do not take {' and '.join(left)}"
        case _:
            capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
            return form_with_kernels(scheme, inputs, capability)
    return Form.SCALED, ""


def _with_native(scheme: Scheme, inputs: int) -> tuple[Form, str]:
    match scheme:
        case QuantizationScheme():
            if _is_native(scheme, inputs):
                return Form.NATIVE, "" if scheme.rounding is not None else "only weights are quantized"
            return form_on_cpu(scheme, has_onednn_int8())
        case BlockScheme():
            return Form.NATIVE, ""
        case PackedScheme(inputs=Rounding() as rounding) if not _is_native_int8(rounding):
            return Form.EXPANDED, "compiled kernels round inputs to int8"
    in_runs = inputs % _PACKED_COLUMNS == 0 or (isinstance(scheme, PackedScheme) and scheme.bits == 8)
    if takes_packed(inputs, scheme.group_size) and in_runs:
        return Form.NATIVE, ""
    return Form.EXPANDED, "compiled kernels take groups of a multiple of 16 inputs"


def _is_native(scheme: QuantizationScheme, inputs: int) -> bool:
    if scheme.number == "mxfp4":
        return takes_packed(inputs, MXFP4_BLOCK)
    rounds = scheme.rounding is None or _is_native_int8(scheme.rounding)
    return scheme.number == "int8" and scheme.block is None and rounds and takes_packed(inputs, None)


def _is_native_int8(rounding: Rounding | None) -> bool:
    """Whether compiled products round inputs so: by rows, around zero."""
    if rounding is None or rounding.number != "int8":
        return False
    return rounding.scales != "group" and not rounding.zero_points and rounding.bound is None


def describe_forms(quantization: Quantization, widths: Sequence[int], placement: Placement) -> list[str]:
    """A line for each scheme and the form it takes in layers of so many inputs, for the log."""
    lines = []
    for rule in quantization.rules:
        forms = [form_of(rule.scheme, inputs, placement) for inputs in widths]
        for form, reason in dict.fromkeys(forms):
            why = f" ({reason})" if reason else ""
            lines.append(f"{rule.scheme.describe()}: weights are kept {form.value}{why}")
    return list(dict.fromkeys(lines))


def form_with_kernels(scheme: QuantizationScheme, inputs: int, capability: tuple[int, int] | None) -> tuple[Form, str]:
    """`capability`: of the GPU, as in (9, 0); None for the kernels' twins, which run anything."""
    if scheme.number == "mxfp4":
        return Form.SCALED, ""
    if scheme.block is not None:
        rows, columns = scheme.block
        if rows != columns or columns < _SMALLEST_BLOCK or columns & (columns - 1):
            return Form.EXPANDED, f"the kernels multiply square blocks of a power of two, not {rows}x{columns}"
        if scheme.input_scales == "group" and inputs % columns:
            return Form.EXPANDED, f"{inputs} inputs are no multiple of a block of {columns}"
    if scheme.input_scales == "none":
        return Form.SCALED, "only weights are quantized"
    if scheme.number == "fp8" and capability is not None and capability < _FP8_CAPABILITY:
        return Form.SCALED, f"sm_{capability[0]}{capability[1]} does not multiply fp8 (sm_89 and later do)"
    return Form.SCALED, ""


def form_on_cpu(scheme: QuantizationScheme, has_int8: bool) -> tuple[Form, str]:
    """`has_int8`: oneDNN multiplies int8 here, exactly."""
    if scheme.input_scales == "none":
        return Form.EXPANDED, "only weights are quantized"
    if scheme.block is not None:
        return Form.EXPANDED, "a CPU does not multiply fp8"
    if scheme.number == "fp8":
        return Form.RESCALED, "a CPU does not multiply fp8"
    return (Form.PACKED_INT8, "") if has_int8 else (Form.RESCALED, "this CPU has no int8 dot product")


@cache
def has_onednn_int8() -> bool:
    """Whether oneDNN multiplies bytes here with sums that are exact: tried, as what the processor has may be kept from
    oneDNN (`ONEDNN_MAX_CPU_ISA`). Without an int8 dot product two products are summed in 16 bits, and overflow."""
    mkldnn: Any = torch.backends.mkldnn
    ops: Any = torch.ops.onednn
    if not (mkldnn.is_available() and torch.cpu._is_vnni_supported()):
        return False
    if not (hasattr(ops, "qlinear_prepack") and hasattr(ops, "qlinear_pointwise")):
        return False
    inputs_TI = torch.full((2, _TRIED_INPUTS), 255, dtype=torch.uint8)
    packed = ops.qlinear_prepack.default(
        torch.full((_TRIED_INPUTS, _TRIED_INPUTS), 127, dtype=torch.int8), [2, _TRIED_INPUTS]
    )
    ones, zeros = torch.ones(_TRIED_INPUTS), torch.zeros(_TRIED_INPUTS, dtype=torch.int32)
    sums_TO: Tensor = ops.qlinear_pointwise.default(
        inputs_TI, 1.0, 0, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return bool((sums_TO == 255 * 127 * _TRIED_INPUTS).all())


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """A type to multiply stored numbers in: bfloat16 holds each fp8 and int8 value, and has float32's range."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def kept_dtype(scheme: QuantizationScheme, form: Form, dtype: torch.dtype) -> torch.dtype:
    """The type in which the weights of a model of `dtype` stay in memory."""
    match form:
        case Form.EXPANDED:
            return dtype
        case Form.RESCALED:
            return exact_dtype(dtype)
        case _:
            return scheme.storage
