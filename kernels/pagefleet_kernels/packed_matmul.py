"""Products of floats with a matrix in numbers of 4 or 8 bits, which become floats in registers.

A group's numbers less its zero point are exact in any float type, and so is nothing rounded before the sums, which are
scaled by group (GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978).

Two numbers of 4 bits lie in a byte, 16 inputs apart, so that a byte's halves meet inputs that are neighbours too:

inputs of a row    |0 1 ... 15|16 17 ... 31|32 33 ... 47|48 ...     |
bytes              |0|16 1|17  ...   15|31 |32|48 33|49 ...         |

Shapes: T tokens, I inputs, O outputs, J bytes of a row, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagefleet_kernels._triton import COMPILE_OPTIONS, INTERPRETED, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8, as_bytes, decode_e4m3, has_native_fp8
from pagefleet_kernels.tuning import MatmulTile, all_registers, launch_table, matmul_tile

RUN = 32
"""Inputs whose numbers of 4 bits lie in one run of bytes."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """Stands for `(number - zero point) * scale`, or `number * scale - offset`."""

    numbers: torch.Tensor
    """uint8 [O, J], as `pack_numbers` makes them."""
    scales_OG: torch.Tensor
    """float32"""
    zeros_OG: torch.Tensor | None
    """uint8, or float32 where they are no whole numbers; None: 8, or 128 for numbers of 8 bits."""
    bits: int
    """4 or 8."""
    group: int | None
    """Inputs of a row that share a scale; None: all of them, and G is 1."""
    offsets_OG: torch.Tensor | None = None
    """float32, in place of zero points; on a GPU nothing multiplies these."""

    @property
    def num_inputs(self) -> int:
        """Columns of the matrix."""
        return self.numbers.shape[1] * 8 // self.bits

    @property
    def num_outputs(self) -> int:
        """Rows of the matrix."""
        return self.numbers.shape[0]

    def rows(self, start: int, stop: int) -> PackedWeights:
        """These of its rows."""
        zeros_OG, offsets_OG = (None if one is None else one[start:stop] for one in (self.zeros_OG, self.offsets_OG))
        return replace(
            self,
            numbers=self.numbers[start:stop],
            scales_OG=self.scales_OG[start:stop],
            zeros_OG=zeros_OG,
            offsets_OG=offsets_OG,
        )

    def dequantize(self) -> torch.Tensor:
        """float32 [O, I]."""
        values = unpack_numbers(self.numbers, self.bits).to(torch.float32)
        grouped_OGg = values.view(len(values), -1, self.group or self.num_inputs)
        if self.offsets_OG is not None:
            return grouped_OGg.mul_(self.scales_OG[..., None]).sub_(self.offsets_OG[..., None]).flatten(1)
        grouped_OGg -= (1 << (self.bits - 1)) if self.zeros_OG is None else self.zeros_OG[..., None]
        return grouped_OGg.mul_(self.scales_OG[..., None]).flatten(1)


def pack_numbers(numbers_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [O, J] of uint8 numbers below 2^bits; those of 4 bits in whole runs."""
    if bits == 8:
        return numbers_OI.contiguous()
    if numbers_OI.shape[1] % RUN:
        raise UnsupportedShapeError(f"{numbers_OI.shape[1]} inputs are not whole runs of {RUN}")
    first, second = numbers_OI.reshape(len(numbers_OI), -1, 2, RUN // 2).unbind(2)
    return (first | second << 4).flatten(1)


def unpack_numbers(numbers_OJ: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `pack_numbers`."""
    if bits == 8:
        return numbers_OJ
    runs = numbers_OJ.reshape(len(numbers_OJ), -1, RUN // 2)
    return torch.stack((runs & 15, runs >> 4), 2).flatten(1)


def packed_matmul(
    x_TI: torch.Tensor,
    weights: PackedWeights,
    bias_O: torch.Tensor | None = None,
    *,
    tile: MatmulTile | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """`x W^T + bias` as a new contiguous [T, O] in x's dtype; sums are float32.

    Groups are powers of two from 32 on. `tile` asks for the Triton kernel with this launch.
    """
    check_packed(x_TI, weights, bias_O)
    return _product(x_TI, None, weights, bias_O, x_TI.dtype, tile, backend)


def packed_rounded_matmul(
    x_TI: torch.Tensor,
    scale_T1: torch.Tensor,
    weights: PackedWeights,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    tile: MatmulTile | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """The same for inputs that were rounded to fp8 or int8, with a float32 scale for each token; of `dtype`.

    Their numbers are multiplied in bfloat16, which holds each of them, and those of the weights.
    """
    if dtype not in _FLOATS or scale_T1.shape != (x_TI.shape[0], 1):
        raise UnsupportedShapeError(f"a product in {dtype} with scales {list(scale_T1.shape)} is not supported")
    check_packed(x_TI, weights, bias_O, (FP8, torch.int8))
    return _product(x_TI, scale_T1, weights, bias_O, dtype, tile, backend)


def _product(
    x_TI: torch.Tensor,
    scale_T1: torch.Tensor | None,
    weights: PackedWeights,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    tile: MatmulTile | None,
    backend: Backend | None,
) -> torch.Tensor:
    if choose_backend(x_TI.device, backend) == "torch":
        sums_TO = x_TI.float() @ weights.dequantize().t()
        if scale_T1 is not None:
            sums_TO *= scale_T1
        return (sums_TO if bias_O is None else sums_TO + bias_O.float()).to(dtype)
    if weights.offsets_OG is not None:
        raise UnsupportedShapeError("offsets are not supported: zero points are")
    if tile is None:
        tile = matmul_tile(launch_table(architecture(x_TI.device)).packed, x_TI.shape[0])
    return _triton_matmul(x_TI, scale_T1, weights, bias_O, dtype, tile)


def check_packed(
    x_TI: torch.Tensor,
    weights: PackedWeights,
    bias_O: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...] = _FLOATS,
) -> None:
    """Raises UnsupportedShapeError where no kernel has the product."""
    num_outputs, num_inputs, group = weights.numbers.shape[0], weights.num_inputs, weights.group
    if x_TI.dim() != 2 or x_TI.shape[1] != num_inputs or x_TI.stride(1) != 1 or x_TI.dtype not in dtypes:
        raise UnsupportedShapeError(
            f"activations {list(x_TI.shape)} of {x_TI.dtype} do not fit {num_inputs} inputs: floats [T, I] do, "
            "with a contiguous last axis"
        )
    if weights.bits not in (4, 8) or weights.numbers.dtype != torch.uint8 or weights.numbers.stride(1) != 1:
        raise UnsupportedShapeError(f"numbers of {weights.bits} bits in {weights.numbers.dtype} are not supported")
    if group is not None and (group < RUN or group & (group - 1) or num_inputs % group):
        raise UnsupportedShapeError(
            f"groups of {group} of {num_inputs} inputs are not supported: powers of two from {RUN}, which divide the "
            "inputs, are"
        )
    wanted = (num_outputs, num_inputs // group if group is not None else 1)
    parts = (weights.scales_OG, weights.zeros_OG, weights.offsets_OG)
    given = [tuple(one.shape) for one in parts if one is not None]
    if any(shape != wanted for shape in given):
        raise UnsupportedShapeError(f"scales, zero points and offsets {given} must be {wanted}")
    if bias_O is not None and bias_O.shape != (num_outputs,):
        raise UnsupportedShapeError(f"{num_outputs} outputs need as many biases, not {list(bias_O.shape)}")


def _triton_matmul(
    x_TI: torch.Tensor,
    scale_T1: torch.Tensor | None,
    weights: PackedWeights,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    tile: MatmulTile,
) -> torch.Tensor:
    (num_tokens, num_inputs), num_outputs = x_TI.shape, weights.numbers.shape[0]
    out_TO = torch.empty((num_tokens, num_outputs), dtype=dtype, device=x_TI.device)
    if out_TO.numel() == 0:
        return out_TO
    group = weights.group or 0
    block_k = tile.block_k // max(1, x_TI.element_size() // 2)  # tables are sized for two bytes at most
    tiles_m = -(-num_tokens // tile.block_m)
    zeros_OG = weights.scales_OG if weights.zeros_OG is None else weights.zeros_OG
    _packed_matmul_kernel[(tiles_m * -(-num_outputs // tile.block_n),)](
        out_TO,
        as_bytes(x_TI),
        weights.scales_OG if scale_T1 is None else scale_T1,
        weights.numbers,
        weights.scales_OG,
        zeros_OG,
        out_TO if bias_O is None else bias_O,
        num_tokens,
        tiles_m,
        x_TI.stride(0),
        weights.numbers.stride(0),
        weights.scales_OG.stride(0),
        OUTPUTS=num_outputs,
        INPUTS=num_inputs,
        GROUP=group,
        BITS=weights.bits,
        HAS_ZEROS=weights.zeros_OG is not None,
        HAS_X_SCALE=scale_T1 is not None,
        HAS_BIAS=bias_O is not None,
        X_IS_FP8=x_TI.dtype == FP8,
        NATIVE=has_native_fp8(x_TI.device),
        IEEE=INTERPRETED,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=min(max(RUN, block_k), group or block_k, max(RUN, next_power_of_2(num_inputs))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **all_registers(x_TI.device),
        **COMPILE_OPTIONS,
    )
    return out_TO


@jit(do_not_specialize=("num_tokens", "tiles_m"))
def _packed_matmul_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    num_tokens,
    tiles_m,
    stride_x,
    stride_weight,
    stride_scale,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    X_IS_FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of the product. Neighbours share a tile of weights, which is the larger matrix."""
    program = tl.program_id(0)
    m = (program % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (program // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_m, inside_n = m < num_tokens, n < OUTPUTS
    BYTES: tl.constexpr = BLOCK_K * BITS // 8
    j = tl.arange(0, BYTES)
    k = inputs_of(j, BITS)
    x_tile_ptr = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    weight_tile_ptr = weight_ptr + n.to(tl.int64)[None, :] * stride_weight + j[:, None]
    scale_row_ptr = scale_ptr + n.to(tl.int64) * stride_scale
    zero_row_ptr = zero_ptr + n.to(tl.int64) * stride_scale
    middle: tl.constexpr = 1 << (BITS - 1)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        inside = (k < INPUTS - start)[None, :]
        x = load_inputs(x_tile_ptr + start, inside_m[:, None] & inside, HAS_X_SCALE, X_IS_FP8, NATIVE)
        mask = (k < INPUTS - start)[:, None] & inside_n[None, :]
        weight = tl.load(weight_tile_ptr + start * BITS // 8, mask=mask, other=0)
        if HAS_ZEROS:
            column = 0
            if GROUP > 0:
                column = start // GROUP
            zero = load_zeros(zero_row_ptr + column, inside_n)
        else:
            zero = middle
        part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if GROUP == 0:
            part = sums
        if BITS == 4:
            upper_x = load_inputs(x_tile_ptr + start + 16, inside_m[:, None] & inside, HAS_X_SCALE, X_IS_FP8, NATIVE)
            part = multiply_numbers(x, (weight & 15).to(tl.int32) - zero, part, IEEE)
            part = multiply_numbers(upper_x, (weight >> 4).to(tl.int32) - zero, part, IEEE)
        else:
            part = multiply_numbers(x, weight.to(tl.int32) - zero, part, IEEE)
        if GROUP == 0:
            sums = part
        else:
            scale = tl.load(scale_row_ptr + start // GROUP, mask=inside_n, other=0.0)
            sums += part * scale[None, :]
    if GROUP == 0:
        sums *= tl.load(scale_row_ptr, mask=inside_n, other=0.0)[None, :]
    if HAS_X_SCALE:
        sums *= tl.load(x_scale_ptr + m, mask=inside_m, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    out_tile_ptr = out_ptr + m.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(out_tile_ptr, sums.to(out_ptr.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])


@jit()
def load_inputs(ptr, mask, ROUNDED: tl.constexpr, IS_FP8: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of floats, or of rounded numbers as floats."""
    x = tl.load(ptr, mask=mask, other=0)
    if ROUNDED and IS_FP8:
        x = decode_e4m3(x, NATIVE).to(tl.bfloat16)
    elif ROUNDED:
        x = x.to(tl.float32).to(tl.bfloat16)
    return x


@jit()
def inputs_of(j, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inputs that these bytes' numbers multiply, or the first of their two."""
    k = j
    if BITS == 4:
        k = (j // 16) * 32 + j % 16
    return k


@jit()
def load_zeros(ptr, mask):  # type: ignore[no-untyped-def]
    """A row of zero points."""
    zero = tl.load(ptr, mask=mask, other=0)
    if ptr.dtype.element_ty == tl.uint8:
        zero = zero.to(tl.int32)
    return zero[None, :]


@jit()
def multiply_numbers(x, numbers, sums, IEEE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`sums + x numbers`; numbers of up to 8 bits are exact in any float type, what is less by a float is rounded."""
    weight = numbers.to(tl.float32)
    if IEEE:  # the interpreter would multiply the bit patterns of bfloat16
        sums = tl.dot(x.to(tl.float32), weight, sums, input_precision="ieee")
    else:
        sums = tl.dot(x, weight.to(x.dtype), sums, input_precision="ieee")
    return sums
