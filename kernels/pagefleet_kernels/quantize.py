"""Rounding activations to eight bits: fp8 (e4m3) or int8, with scales per tensor, per token or per group of inputs.

A value is its number times its scale; scales are float32. Shapes: T tokens, I inputs, C = I / group, rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8, as_bytes, encode_e4m3, has_native_fp8
from pagefleet_kernels.reference import LARGEST
from pagefleet_kernels.tuning import launch_table, tile_warps

SMALLEST_SCALE = 1e-12
"""A scale of zero would divide by zero; smaller inputs become zero."""


class Quantized(NamedTuple):
    """Numbers of eight bits and what one of them stands for."""

    values: torch.Tensor
    """fp8 or int8, in the shape of what was quantized, contiguous."""
    scale: torch.Tensor
    """float32: [1] per tensor, [T, 1] per token, [T, C] per group. NaN where what was quantized has one: int8 has none,
    and what is multiplied must be none either."""


Activations = torch.Tensor | Quantized
"""What a product reads: numbers, or such as whoever computed them has rounded for it."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeSpec:
    """How activations are rounded; made once per layer. Without `static_scale` or `group`, each token has a scale."""

    dtype: torch.dtype = FP8
    static_scale: torch.Tensor | None = None
    """float32, one element, on the device of the activations: the scale of the whole tensor."""
    group: int | None = None
    """Inputs that share a scale, a power of two; the last group may be shorter."""

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST:
            raise UnsupportedShapeError(f"cannot quantize to {self.dtype}: float8_e4m3fn and int8 are supported")
        if self.group is not None and (
            self.group & (self.group - 1) or self.group < 1 or self.static_scale is not None
        ):
            raise UnsupportedShapeError(f"a group of {self.group} must be a power of two, and has no static scale")

    @property
    def scales_rows(self) -> bool:
        """Whether each row has scales. In int8 also by a static one, which is NaN for a row with a NaN."""
        return self.static_scale is None or self.dtype == torch.int8

    @property
    def whole_rows(self) -> bool:
        """Whether one scale is for a row, so that a program must hold it whole."""
        return self.scales_rows and self.group is None

    def scale_for(self, num_rows: int, width: int, device: torch.device) -> torch.Tensor:
        """Where a kernel puts its scales, or the static one."""
        if self.static_scale is not None and not self.scales_rows:
            return self.static_scale.view(1)
        groups = 1 if self.group is None else -(-width // self.group)
        return torch.empty((num_rows, groups), dtype=torch.float32, device=device)


def quantize_fp8(
    x_TI: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    group: int | None = None,
    per_token: bool = True,
    backend: Backend | None = None,
) -> Quantized:
    """To e4m3: by a static `scale` of one element, else by the largest magnitude of each token, or of each `group`
    of its inputs, or (`per_token=False`) of the whole tensor."""
    if scale is None and group is None and not per_token:
        scale = (x_TI.abs().amax().float() / LARGEST[FP8]).clamp_(min=SMALLEST_SCALE)
    return quantize(x_TI, QuantizeSpec(FP8, scale, group), backend=backend)


def quantize(x_TI: torch.Tensor, spec: QuantizeSpec, *, backend: Backend | None = None) -> Quantized:
    """Round `x` as `spec` says, to nearest even; beyond the largest number (448 in fp8, 127 in int8) to that."""
    if x_TI.dim() != 2 or x_TI.stride(1) != 1:
        raise UnsupportedShapeError(
            f"activations must be [T, I] with a contiguous last axis, not {list(x_TI.shape)} "
            f"with strides {x_TI.stride()}"
        )
    num_tokens, width = x_TI.shape
    scale = spec.scale_for(num_tokens, width, x_TI.device)
    if choose_backend(x_TI.device, backend) == "torch":
        return Quantized(*reference.quantize(x_TI, spec.dtype, spec.static_scale, spec.group))
    values = torch.empty(x_TI.shape, dtype=spec.dtype, device=x_TI.device)
    if values.numel() == 0:
        return Quantized(values, scale)
    block = max(next_power_of_2(width), spec.group or 1)
    if not spec.whole_rows:
        block = max(spec.group or 1, min(block, launch_table(architecture(x_TI.device)).tile_elements))
    _quantize_kernel[(num_tokens, (width + block - 1) // block)](
        as_bytes(values),
        scale,
        scale if spec.static_scale is None else spec.static_scale,
        x_TI,
        x_TI.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=tile_warps(block),
        **quantize_constants(spec, x_TI.device),
        **COMPILE_OPTIONS,
    )
    return Quantized(values, scale)


def quantize_with_zeros(
    x_TI: torch.Tensor,
    fixed: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    backend: Backend | None = None,
) -> tuple[Quantized, torch.Tensor]:
    """To int8, from the least to the largest of each token and zero; a value is its number less its token's zero point,
    times the scale. `fixed`: scale and zero point of the whole tensor, float32 of one element each.

    Returns:
        Numbers and scales of rows, and whole numbers in float32 [T, 1] or [1].
    """
    if x_TI.dim() != 2 or x_TI.stride(1) != 1:
        raise UnsupportedShapeError(f"activations must be [T, I] with a contiguous last axis, not {list(x_TI.shape)}")
    num_tokens, width = x_TI.shape
    if choose_backend(x_TI.device, backend) == "torch":
        values, scale, zero = reference.quantize_with_zeros(x_TI, fixed)
        return Quantized(values, scale), zero
    scale = torch.empty((num_tokens, 1), dtype=torch.float32, device=x_TI.device)
    zero = torch.empty_like(scale) if fixed is None else fixed[1].view(1)
    values = torch.empty(x_TI.shape, dtype=torch.int8, device=x_TI.device)
    if values.numel():
        block = next_power_of_2(width)
        _quantize_with_zeros_kernel[(num_tokens,)](
            values,
            scale,
            zero,
            scale if fixed is None else fixed[0],
            x_TI,
            x_TI.stride(0),
            WIDTH=width,
            BLOCK=block,
            STATIC=fixed is not None,
            num_warps=tile_warps(block),
            **COMPILE_OPTIONS,
        )
    return Quantized(values, scale), zero


def quantize_constants(spec: QuantizeSpec | None, device: torch.device) -> dict[str, int | bool]:
    """What `quantize_rows` must know when it is compiled: GROUP (0: the whole row), STATIC, FP8 and NATIVE."""
    if spec is None:
        return {"GROUP": 0, "STATIC": False, "FP8": False, "NATIVE": False}
    is_fp8 = spec.dtype == FP8
    return {
        "GROUP": spec.group or 0,
        "STATIC": spec.static_scale is not None,
        "FP8": is_fp8,
        "NATIVE": is_fp8 and has_native_fp8(device),
    }


@jit()
def quantize_rows(  # type: ignore[no-untyped-def]
    values_ptr,
    scale_ptr,
    static_ptr,
    x,
    row,
    column,
    num_rows,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store a tile of float32 rows, zero beyond their end, as numbers and scales. With GROUP the tile must hold whole
    groups; else whole rows, but of fp8 with a STATIC scale. `row` and `column` are vectors, `row` of int64."""
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    offset = row[:, None] * WIDTH + column[None, :]
    if STATIC and FP8:
        tl.store(values_ptr + offset, encode(x / tl.load(static_ptr), FP8, NATIVE), mask=mask)
    elif GROUP == 0:
        largest = _largest_size(x, 1)
        scale = tl.where(largest <= float("inf"), tl.load(static_ptr), largest) if STATIC else _scale_of(largest, FP8)
        tl.store(scale_ptr + row, scale, mask=row < num_rows)
        tl.store(values_ptr + offset, encode(x / scale[:, None], FP8, NATIVE), mask=mask)
    else:
        num_groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        groups: tl.constexpr = x.shape[1] // GROUP
        grouped = tl.reshape(x, (x.shape[0], groups, GROUP))
        scale = _scale_of(_largest_size(grouped, 2), FP8)
        group = tl.min(column, axis=0) // GROUP + tl.arange(0, groups)
        inside = (row < num_rows)[:, None] & (group < num_groups)[None, :]
        tl.store(scale_ptr + row[:, None] * num_groups + group[None, :], scale, mask=inside)
        scaled = tl.reshape(grouped / scale[:, :, None], (x.shape[0], x.shape[1]))
        tl.store(values_ptr + offset, encode(scaled, FP8, NATIVE), mask=mask)


@jit()
def encode(x, FP8: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes of scaled float32 values; in int8 some number for NaN, whose scale is NaN."""
    if FP8:
        code = encode_e4m3(x, NATIVE)
    else:
        nearby = tl.minimum(tl.maximum(tl.where(tl.abs(x) <= float("inf"), x, 0.0), -127.0), 127.0)
        code = nearest(nearby).to(tl.int8)
    return code


@jit()
def nearest(x):  # type: ignore[no-untyped-def]
    """Whole numbers, ties to even; |x| is below 2^22."""
    return (x + 12582912.0) - 12582912.0  # adding 1.5 * 2^23 leaves no place for a fraction


@jit()
def _largest_size(x, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest magnitude of float32 values: NaN where one is NaN, whose bits are above all others' as an integer."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS).to(tl.float32, bitcast=True)


@jit()
def _scale_of(largest, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = largest * (1.0 / 448.0 if FP8 else 1.0 / 127.0)
    return tl.where(scale < 1e-12, 1e-12, scale)  # NaN stays NaN


@jit()
def _quantize_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    scale_ptr,
    static_ptr,
    x_ptr,
    stride_token,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_token + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    row = token + tl.arange(0, 1)
    quantize_rows(
        values_ptr, scale_ptr, static_ptr, x[None, :], row, column, token + 1, WIDTH, GROUP, STATIC, FP8, NATIVE
    )


@jit()
def _quantize_with_zeros_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    scale_ptr,
    zero_ptr,
    static_ptr,
    x_ptr,
    stride_token,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + token * stride_token + column, mask=inside, other=0.0).to(tl.float32)
    size = _largest_size(x, 0)
    x = tl.where(tl.abs(x) <= float("inf"), x, 0.0)
    if STATIC:
        scale, zero = tl.load(static_ptr), tl.load(zero_ptr)
    else:
        least, largest = tl.minimum(tl.min(x, axis=0), 0.0), tl.maximum(tl.max(x, axis=0), 0.0)
        scale = tl.maximum((largest - least) * (1.0 / 255.0), 1e-12)
        zero = nearest(-least / scale) - 128.0
        tl.store(zero_ptr + token, zero)
    tl.store(scale_ptr + token, tl.where(size <= float("inf"), scale, size))
    scaled = tl.minimum(tl.maximum(x / scale, -1024.0), 1024.0)
    number = tl.minimum(tl.maximum(nearest(scaled) + zero, -128.0), 127.0)
    tl.store(values_ptr + token * WIDTH + column, number.to(tl.int8), mask=inside)
