"""The gated activation of Llama's MLP: SiLU of the gate times the up projection.

Shapes: T tokens, I intermediate width. Source: Shazeer, arXiv 2002.05202.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.tuning import launch_table


def silu_and_mul(gate_up_TI2: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """`silu(gate) * up` for `[T, 2 * I]` holding the gate in its first half; a new contiguous `[T, I]`.

    SiLU is computed in float32 and rounded to the dtype before the product, as two separate operations would do.
    """
    if gate_up_TI2.dim() != 2 or gate_up_TI2.shape[1] % 2 or gate_up_TI2.stride(1) != 1:
        raise UnsupportedShapeError(
            f"gate and up must lie side by side in a [T, 2 * I] tensor with a contiguous last axis, "
            f"not {list(gate_up_TI2.shape)} with strides {gate_up_TI2.stride()}"
        )
    if choose_backend(gate_up_TI2.device, backend) == "torch":
        return reference.silu_and_mul(gate_up_TI2)
    num_tokens, width = gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2
    out_TI = torch.empty((num_tokens, width), dtype=gate_up_TI2.dtype, device=gate_up_TI2.device)
    if out_TI.numel() == 0:
        return out_TI
    block = min(next_power_of_2(width), launch_table(architecture(gate_up_TI2.device)).tile_elements)
    _silu_and_mul_kernel[(num_tokens, (width + block - 1) // block)](
        out_TI, gate_up_TI2, gate_up_TI2.stride(0), WIDTH=width, BLOCK=block, **COMPILE_OPTIONS
    )
    return out_TI


@jit()
def _silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    out_ptr, gate_up_ptr, stride_token, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up_ptr + token * stride_token + column, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + token * stride_token + WIDTH + column, mask=mask, other=0.0)
    x = gate.to(tl.float32)
    # exp of a negative number only, so that a large gate cannot overflow
    decay = tl.exp(-tl.abs(x))
    silu = (x * tl.where(x >= 0, 1.0, decay) / (1.0 + decay)).to(gate.dtype)
    out = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, out.to(gate.dtype), mask=mask)
