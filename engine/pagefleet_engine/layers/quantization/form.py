"""In which form a quantized matrix is kept on a device, and why it is not the one that pays."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from pagefleet_engine.layers.quantization.scheme import QuantizationScheme
from pagefleet_engine.layers.weight import Placement

_FP8_CAPABILITY = (8, 9)
_KERNEL_BLOCK = (128, 128)


class Form(Enum):
    """How the weights live, and who multiplies."""

    SCALED = "in 8 bits, multiplied by pagefleet_kernels"
    PACKED_INT8 = "in 8 bits, multiplied by oneDNN"
    RESCALED = "as the stored numbers in a floating type that holds them exactly, the product is scaled"
    EXPANDED = "as the numbers that they stand for, in the model's type"


def form_on(scheme: QuantizationScheme, placement: Placement) -> tuple[Form, str]:
    """The form on the placement's device, and what stands in the way of eight bits; `""` where nothing does."""
    if placement.use_kernels:
        capability = torch.cuda.get_device_capability(placement.device) if placement.device.type == "cuda" else None
        return form_with_kernels(scheme, capability)
    return form_on_cpu(scheme, has_onednn_int8())


def form_with_kernels(scheme: QuantizationScheme, capability: tuple[int, int] | None) -> tuple[Form, str]:
    """`capability`: of the GPU, as in (9, 0); None for the kernels' twins, which run anything."""
    if scheme.input_scales == "none":
        return Form.EXPANDED, "only weights are quantized"
    if scheme.number == "fp8" and capability is not None and capability < _FP8_CAPABILITY:
        generation = f"sm_{capability[0]}{capability[1]}"
        reason = f"{generation} does not multiply fp8, sm_89 and later do"
        return (Form.EXPANDED if scheme.block is not None else Form.RESCALED), reason
    if scheme.block not in (None, _KERNEL_BLOCK):
        return Form.EXPANDED, "the kernels multiply blocks of 128x128"
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


def has_onednn_int8() -> bool:
    """Whether oneDNN multiplies bytes with 32-bit sums here; without that instruction its sums can overflow."""
    mkldnn: Any = torch.backends.mkldnn
    ops: Any = torch.ops.onednn
    return bool(
        mkldnn.is_available()
        and hasattr(ops, "qlinear_prepack")
        and hasattr(ops, "qlinear_pointwise")
        and torch.cpu._is_vnni_supported()
    )


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """A type to multiply stored numbers in: bfloat16 holds each fp8 and int8 value, and has float32's range."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def kept_dtype(scheme: QuantizationScheme, placement: Placement) -> torch.dtype:
    """The type in which the weights stay in memory."""
    match form_on(scheme, placement)[0]:
        case Form.EXPANDED:
            return placement.dtype
        case Form.RESCALED:
            return exact_dtype(placement.dtype)
        case _:
            return scheme.storage
