"""What follows a product of experts inside its kernel: the bias, and how gate and up are joined."""

from __future__ import annotations

from typing import Literal

from pagefleet_kernels._triton import jit, tl
from pagefleet_kernels.activation import activate, sigmoid

Gate = Literal["silu", "gelu_tanh", "gelu", "relu", "swigluoai"]
"""How gate and up are joined: `act(gate) * up`, or as gpt-oss does, both clamped to 7:
`gate * sigmoid(1.702 * gate) * (up + 1)`."""


@jit()
def join_gate(gate, up, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """See `Gate`; of float32. What is no number stays none."""
    if KIND == "swigluoai":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        out = gate * sigmoid(1.702 * gate) * (up + 1.0)
    else:
        out = activate(gate, KIND) * up
    return out


@jit()
def add_bias(out, bias_ptr, inside_n, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """To rows of float32."""
    if HAS_BIAS:
        out += tl.load(bias_ptr, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    return out
