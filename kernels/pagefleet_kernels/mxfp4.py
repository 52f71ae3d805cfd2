"""Numbers of four bits: OCP MXFP4, 32 of e2m1 with one power of two. Two lie in a byte, the first in its lower half.

Source: OCP Microscaling Formats (MX) Specification 1.0. Shapes: I numbers, J = I / 2 bytes, C = I / 32 scales.
"""

from __future__ import annotations

import torch

from pagefleet_kernels._triton import jit, tl

MXFP4_BLOCK = 32
"""Numbers that share a scale."""
LARGEST_SCALE = 240
"""Code of the largest scale that kernels multiply by, 2^113; one stands for 2^(code - 127)."""
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALF, *(-value for value in _HALF))
"""What its codes stand for."""


def dequantize_mxfp4(bytes_J: torch.Tensor, scales_C: torch.Tensor) -> torch.Tensor:
    """The float32 numbers [..., I] that uint8 codes [..., J] with uint8 scales [..., C] stand for, exactly."""
    values = torch.tensor(E2M1, device=bytes_J.device)
    # By bytes: what the lower and the upper half stand for.
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)
    found = pairs[bytes_J.to(torch.int32)].view(*scales_C.shape, MXFP4_BLOCK)
    return torch.ldexp(found, scales_C.to(torch.int32)[..., None] - 127).flatten(-2)


@jit()
def decode_e2m1(code):  # type: ignore[no-untyped-def]
    """float32 values of codes from 0 to 15, times 2^-14."""
    bits = code.to(tl.uint16)
    return (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32)


@jit()
def decode_scale(code):  # type: ignore[no-untyped-def]
    """float32 values of a scale's code, times 2^14."""
    return ((code.to(tl.uint32) + 14) << 23).to(tl.float32, bitcast=True)
