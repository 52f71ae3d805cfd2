"""Gated activations: SiLU (Llama) or the tanh form of GELU (Gemma) of the gate, times the up projection.

Shapes: T tokens, I intermediate width. Sources: Shazeer, arXiv 2002.05202; Hendrycks and Gimpel, arXiv 1606.08415.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.early_launch import early_launch, wait_for_inputs
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import as_bytes
from pagefleet_kernels.quantize import Quantized, QuantizeSpec, quantize_constants, quantize_rows
from pagefleet_kernels.tuning import launch_table, tile_warps

Gate = Literal["silu", "gelu_tanh"]


@overload
def gated_activation(
    gate_up_TI2: torch.Tensor, kind: Gate = ..., *, quantize: None = ..., backend: Backend | None = ...
) -> torch.Tensor: ...
@overload
def gated_activation(
    gate_up_TI2: torch.Tensor, kind: Gate = ..., *, quantize: QuantizeSpec, backend: Backend | None = ...
) -> Quantized: ...
def gated_activation(
    gate_up_TI2: torch.Tensor,
    kind: Gate = "silu",
    *,
    quantize: QuantizeSpec | None = None,
    backend: Backend | None = None,
) -> torch.Tensor | Quantized:
    """`activation(gate) * up` for `[T, 2 * I]` holding the gate in its first half; a new contiguous `[T, I]`.

    The activation is computed in float32 and rounded to the dtype before the product, as two separate operations would
    do. With `quantize` nothing is rounded before eight bits are made.
    """
    if gate_up_TI2.dim() != 2 or gate_up_TI2.shape[1] % 2 or gate_up_TI2.stride(1) != 1:
        raise UnsupportedShapeError(
            f"gate and up must lie side by side in a [T, 2 * I] tensor with a contiguous last axis, "
            f"not {list(gate_up_TI2.shape)} with strides {gate_up_TI2.stride()}"
        )
    if kind not in ("silu", "gelu_tanh"):
        raise UnsupportedShapeError(f"there is no gated activation {kind!r}: choose 'silu' or 'gelu_tanh'")
    if choose_backend(gate_up_TI2.device, backend) == "torch":
        if quantize is None:
            return reference.gated_activation(gate_up_TI2, kind)
        out = reference.gated_activation(gate_up_TI2.float(), kind)
        return Quantized(*reference.quantize(out, quantize.dtype, quantize.static_scale, quantize.group))
    num_tokens, width, device = gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2, gate_up_TI2.device
    dtype = gate_up_TI2.dtype if quantize is None else quantize.dtype
    out_TI = torch.empty((num_tokens, width), dtype=dtype, device=device)
    scale = gate_up_TI2 if quantize is None else quantize.scale_for(num_tokens, width, device)
    if out_TI.numel():
        block = _tile(width, quantize, device)
        _gated_activation_kernel[(num_tokens, (width + block - 1) // block)](
            as_bytes(out_TI),
            scale,
            gate_up_TI2,
            gate_up_TI2.stride(0),
            WIDTH=width,
            BLOCK=block,
            GELU=kind == "gelu_tanh",
            QUANTIZE=quantize is not None,
            num_warps=tile_warps(block),
            **quantize_constants(quantize, device),
            **early_launch(device),
            **COMPILE_OPTIONS,
        )
    return out_TI if quantize is None else Quantized(out_TI, scale)


def _tile(width: int, quantize: QuantizeSpec | None, device: torch.device) -> int:
    """Columns of a program: the whole row where one scale is for all of it."""
    whole = next_power_of_2(width)
    if quantize is not None and quantize.static_scale is None and quantize.group is None:
        return whole
    group = 1 if quantize is None else quantize.group or 1
    return max(group, min(whole, launch_table(architecture(device)).tile_elements))


@jit()
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    """Of float32."""
    # 0.5 x (1 + tanh(y)) = x / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3)
    near = tl.minimum(tl.maximum(x, -16.0), 16.0)  # the cube must not overflow, and beyond this nothing changes
    return x * sigmoid(1.5957691216057308 * (near + 0.044715 * near * near * near))


@jit()
def sigmoid(x):  # type: ignore[no-untyped-def]
    """Of float32."""
    # exp of a negative number only, so that it cannot overflow
    decay = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, decay) / (1.0 + decay)


@jit()
def _gated_activation_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    scale_ptr,
    gate_up_ptr,
    stride_token,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    QUANTIZE: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up_ptr + token * stride_token + column, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * stride_token + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    active = gelu_tanh(x) if GELU else x * sigmoid(x)
    if QUANTIZE:
        row = token + tl.arange(0, 1)
        out = (active * up)[None, :]
        quantize_rows(out_ptr, scale_ptr, out, row, column, token + 1, WIDTH, GROUP, STATIC, FP8, NATIVE)
    else:
        out = active.to(gate.dtype).to(tl.float32) * up
        tl.store(out_ptr + token * WIDTH + column, out.to(gate.dtype), mask=mask)
