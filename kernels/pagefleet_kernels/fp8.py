"""Numbers of eight bits inside kernels: OCP e4m3 ("fn": no infinity, largest 448), by instruction or by arithmetic, and
e5m2, the upper half of a float16, for keys and values.

GPUs before sm_89 have no conversion and Triton's interpreter rounds wrongly, so there the bits are worked out. Kernels
take such tensors as uint8 (`as_bytes`). Source: Micikevicius et al., arXiv 2209.05433.
"""

from __future__ import annotations

import torch

from pagefleet_kernels._triton import jit, tl
from pagefleet_kernels.dispatch import architecture

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
E5M2 = torch.float8_e5m2
LARGEST_FP8 = {FP8: FP8_MAX, E5M2: 57344.0}
"""The largest number of each type; e5m2 has infinity besides."""


def has_native_fp8(device: torch.device) -> bool:
    """Whether kernels on `device` convert to and from e4m3 in one instruction (sm_89 and later)."""
    name = architecture(device)
    return name.startswith("sm_") and int(name.removeprefix("sm_")) >= 89


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A tensor in eight bits as uint8, of the same strides; others as they are."""
    return x.view(torch.uint8) if x.dtype in LARGEST_FP8 else x


def fp8_form(dtype: torch.dtype) -> int:
    """By which kernels know what pages hold: bits of a fraction, 3 in e4m3 and 2 in e5m2; 0 of other types."""
    return {FP8: 3, E5M2: 2}.get(dtype, 0)


@jit()
def decode_fp8(code, FORM: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of uint8 codes of a form."""
    if FORM == 2:
        value = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = decode_e4m3(code, NATIVE)
    return value


@jit()
def encode_fp8(x, FORM: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint8 codes of float32 values, to nearest even; beyond the largest they saturate, NaN stays NaN."""
    return _encode_e5m2(x) if FORM == 2 else encode_e4m3(x, NATIVE)


@jit()
def decode_e4m3(code, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of uint8 codes."""
    if NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.uint32)
        # by 2^-120 too small, as exponents of float32 begin so much lower; those below its least are exact too
        scaled = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        value = scaled.to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return value


@jit()
def encode_e4m3(x, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint8 codes of float32 values, to nearest even; beyond 448 they saturate, NaN stays NaN."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    if NATIVE:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        # 2^14 has its last place at 2^-9, where a subnormal has its: the addition rounds
        tiny = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        unsigned = tl.where(magnitude < 0x3C800000, tiny, normal)
        unsigned = tl.where(magnitude > 0x7F800000, 0x7F, unsigned)
        code = (unsigned | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@jit()
def _encode_e5m2(x):  # type: ignore[no-untyped-def]
    x = tl.where(x > 57344.0, 57344.0, tl.where(x < -57344.0, -57344.0, x))
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21) - 448
    # 2^7 has its last place at 2^-16, where a subnormal has its: the addition rounds
    tiny = (tl.abs(x) + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
    unsigned = tl.where(magnitude < 0x38800000, tiny, normal)
    unsigned = tl.where(magnitude > 0x7F800000, 0x7F, unsigned)
    return (unsigned | ((bits >> 24) & 0x80)).to(tl.uint8)
