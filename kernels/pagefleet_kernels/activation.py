"""Activations of an MLP, alone or of a gate, times the up projection: SiLU, GELU in its exact or its tanh form, ReLU.

Shapes: T tokens, I intermediate width. Sources: Shazeer, arXiv 2002.05202; Hendrycks and Gimpel, arXiv 1606.08415.
"""

from __future__ import annotations

from typing import Literal, get_args, overload

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.early_launch import early_launch, wait_for_inputs
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import as_bytes
from pagefleet_kernels.quantize import Quantized, QuantizeSpec, quantize_constants, quantize_rows
from pagefleet_kernels.tuning import launch_table, tile_warps

Kind = Literal["silu", "gelu_tanh", "gelu", "relu"]


@overload
def gated_activation(
    gate_up_TI2: torch.Tensor, kind: Kind = ..., *, quantize: None = ..., backend: Backend | None = ...
) -> torch.Tensor: ...
@overload
def gated_activation(
    gate_up_TI2: torch.Tensor, kind: Kind = ..., *, quantize: QuantizeSpec, backend: Backend | None = ...
) -> Quantized: ...
def gated_activation(
    gate_up_TI2: torch.Tensor,
    kind: Kind = "silu",
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
    return _run(gate_up_TI2, kind, True, quantize, backend)


@overload
def activation(
    x_TI: torch.Tensor, kind: Kind, *, quantize: None = ..., backend: Backend | None = ...
) -> torch.Tensor: ...
@overload
def activation(
    x_TI: torch.Tensor, kind: Kind, *, quantize: QuantizeSpec, backend: Backend | None = ...
) -> Quantized: ...
def activation(
    x_TI: torch.Tensor, kind: Kind, *, quantize: QuantizeSpec | None = None, backend: Backend | None = None
) -> torch.Tensor | Quantized:
    """`activation(x)`; a new contiguous `[T, I]`, rounded from float32."""
    if x_TI.dim() != 2 or x_TI.stride(1) != 1:
        raise UnsupportedShapeError(
            f"x must be [T, I] with a contiguous last axis, not {list(x_TI.shape)} with strides {x_TI.stride()}"
        )
    return _run(x_TI, kind, False, quantize, backend)


def _run(
    x: torch.Tensor, kind: Kind, gated: bool, quantize: QuantizeSpec | None, backend: Backend | None
) -> torch.Tensor | Quantized:
    if kind not in get_args(Kind):
        raise UnsupportedShapeError(f"there is no activation {kind!r}: choose {', '.join(get_args(Kind))}")
    if choose_backend(x.device, backend) == "torch":
        twin = reference.gated_activation if gated else reference.activation
        if quantize is None:
            return twin(x, kind)
        return Quantized(
            *reference.quantize(twin(x.float(), kind), quantize.dtype, quantize.static_scale, quantize.group)
        )
    num_tokens, width, device = x.shape[0], x.shape[1] // (2 if gated else 1), x.device
    dtype = x.dtype if quantize is None else quantize.dtype
    out_TI = torch.empty((num_tokens, width), dtype=dtype, device=device)
    scale = x if quantize is None else quantize.scale_for(num_tokens, width, device)
    if out_TI.numel():
        block = _tile(width, quantize, device)
        _activation_kernel[(num_tokens, (width + block - 1) // block)](
            as_bytes(out_TI),
            scale,
            scale if quantize is None or quantize.static_scale is None else quantize.static_scale,
            x,
            x.stride(0),
            WIDTH=width,
            BLOCK=block,
            KIND=kind,
            GATED=gated,
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
    if quantize is not None and quantize.whole_rows:
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
def activate(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of float32; what is no number stays none."""
    if KIND == "gelu_tanh":
        x = gelu_tanh(x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    else:
        x = x * sigmoid(x)
    return x


@jit()
def _activation_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    scale_ptr,
    static_ptr,
    x_ptr,
    stride_token,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
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
    x = tl.load(x_ptr + token * stride_token + column, mask=mask, other=0.0)
    out = activate(x.to(tl.float32), KIND)
    if GATED:
        up = tl.load(x_ptr + token * stride_token + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        if not QUANTIZE:
            out = out.to(x.dtype).to(tl.float32)
        out *= up
    if QUANTIZE:
        row = token + tl.arange(0, 1)
        quantize_rows(
            out_ptr, scale_ptr, static_ptr, out[None, :], row, column, token + 1, WIDTH, GROUP, STATIC, FP8, NATIVE
        )  # fmt: skip
    else:
        tl.store(out_ptr + token * WIDTH + column, out.to(x.dtype), mask=mask)
