"""Products of floats with a matrix in codes of 4 bits, each of which stands for one of sixteen floats.

A code's float times the scale of its group is made in registers, in the type of the inputs: exact for e2m1 with scales
in e4m3 (NVFP4) or powers of two (MXFP4), rounded once else (nf4, Dettmers et al., arXiv 2305.14314). What is one number
for a whole row multiplies the sums. Codes lie in bytes as those of `packed_matmul`.

Shapes: T tokens, I inputs, O outputs, J = I / 2 bytes, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagefleet_kernels._triton import COMPILE_OPTIONS, INTERPRETED, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8, as_bytes, decode_e4m3, has_native_fp8
from pagefleet_kernels.mxfp4 import E2M1, decode_e2m1
from pagefleet_kernels.packed_matmul import RUN, inputs_of, unpack_numbers
from pagefleet_kernels.tuning import MatmulTile, launch_table, matmul_tile

SMALLEST_GROUP = 16
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeights:
    """Stands for `table[code] * scale * factor`."""

    codes: torch.Tensor
    """uint8 [O, J], as `packed_matmul.pack_numbers` makes them of 4 bits."""
    table: torch.Tensor | None
    """float32 [16]; None: e2m1."""
    scales_OG: torch.Tensor
    """float32, float8_e4m3fn, or uint8, of which one stands for 2^(code - 127)."""
    factor_O: torch.Tensor | None
    """float32; None: 1."""
    group: int
    """Inputs of a row that share a scale: a power of two from 16 on."""

    @property
    def num_inputs(self) -> int:
        """Columns of the matrix."""
        return 2 * self.codes.shape[1]

    @property
    def num_outputs(self) -> int:
        """Rows of the matrix."""
        return self.codes.shape[0]

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4

    def rows(self, start: int, stop: int) -> CodedWeights:
        """These of its rows."""
        factor_O = None if self.factor_O is None else self.factor_O[start:stop]
        return replace(self, codes=self.codes[start:stop], scales_OG=self.scales_OG[start:stop], factor_O=factor_O)

    def plain_scales(self) -> torch.Tensor:
        """float32 [O, G]."""
        return _plain_scales(self.scales_OG)

    def dequantize(self) -> torch.Tensor:
        """float32 [O, I]."""
        return dequantize_codes(unpack_numbers(self.codes, 4), self.table, self.scales_OG, self.factor_O)


def dequantize_codes(
    codes_OI: torch.Tensor, table: torch.Tensor | None, scales_OG: torch.Tensor, factor_O: torch.Tensor | None
) -> torch.Tensor:
    """The float32 numbers [O, I] that uint8 codes stand for; the others are as in `CodedWeights`."""
    if table is None:
        table = torch.tensor(E2M1, device=codes_OI.device)
    values_OGg = table[codes_OI.to(torch.int32)].view(*scales_OG.shape, -1)
    values_OI = values_OGg.mul_(_plain_scales(scales_OG)[..., None]).flatten(1)
    return values_OI if factor_O is None else values_OI.mul_(factor_O[:, None])


def _plain_scales(scales_OG: torch.Tensor) -> torch.Tensor:
    if scales_OG.dtype != torch.uint8:
        return scales_OG.to(torch.float32)
    return torch.ldexp(torch.ones(scales_OG.shape, device=scales_OG.device), scales_OG.to(torch.int32) - 127)


def coded_matmul(
    x_TI: torch.Tensor,
    weights: CodedWeights,
    bias_O: torch.Tensor | None = None,
    *,
    tile: MatmulTile | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """`x W^T + bias` as a new contiguous [T, O] in x's dtype; sums are float32.

    `tile` asks for the Triton kernel with this launch.
    """
    check_coded(x_TI, weights, bias_O)
    if choose_backend(x_TI.device, backend) == "torch":
        sums_TO = x_TI.float() @ weights.dequantize().t()
        return (sums_TO if bias_O is None else sums_TO + bias_O.float()).to(x_TI.dtype)
    if tile is None:
        tile = matmul_tile(launch_table(architecture(x_TI.device)).packed, x_TI.shape[0])
    return _triton_matmul(x_TI, weights, bias_O, tile)


def check_coded(x_TI: torch.Tensor, weights: CodedWeights, bias_O: torch.Tensor | None) -> None:
    """Raises UnsupportedShapeError where no kernel has the product."""
    num_outputs, num_inputs, group = weights.num_outputs, weights.num_inputs, weights.group
    if x_TI.dim() != 2 or x_TI.shape[1] != num_inputs or x_TI.stride(1) != 1 or x_TI.dtype not in _FLOATS:
        raise UnsupportedShapeError(
            f"activations {list(x_TI.shape)} of {x_TI.dtype} do not fit {num_inputs} inputs: floats [T, I] do, "
            "with a contiguous last axis"
        )
    if group < SMALLEST_GROUP or group & (group - 1) or num_inputs % group or num_inputs % RUN:
        raise UnsupportedShapeError(
            f"groups of {group} of {num_inputs} inputs are not supported: powers of two from {SMALLEST_GROUP}, which "
            f"divide the inputs, are, where these are runs of {RUN}"
        )
    wanted = (num_outputs, num_inputs // group)
    if weights.scales_OG.shape != wanted:
        raise UnsupportedShapeError(f"scales {tuple(weights.scales_OG.shape)} must be {wanted}")
    for name, one in (("factors", weights.factor_O), ("biases", bias_O)):
        if one is not None and one.shape != (num_outputs,):
            raise UnsupportedShapeError(f"{num_outputs} outputs need as many {name}, not {list(one.shape)}")


def _triton_matmul(
    x_TI: torch.Tensor, weights: CodedWeights, bias_O: torch.Tensor | None, tile: MatmulTile
) -> torch.Tensor:
    (num_tokens, num_inputs), num_outputs = x_TI.shape, weights.codes.shape[0]
    out_TO = x_TI.new_empty((num_tokens, num_outputs))
    if out_TO.numel() == 0:
        return out_TO
    block_k = tile.block_k // max(1, x_TI.element_size() // 2)  # tables are sized for two bytes at most
    tiles_m = -(-num_tokens // tile.block_m)
    _coded_matmul_kernel[(tiles_m * -(-num_outputs // tile.block_n),)](
        out_TO,
        x_TI,
        weights.codes,
        out_TO if weights.table is None else weights.table,
        as_bytes(weights.scales_OG),
        out_TO if weights.factor_O is None else weights.factor_O,
        out_TO if bias_O is None else bias_O,
        num_tokens,
        tiles_m,
        x_TI.stride(0),
        weights.codes.stride(0),
        weights.scales_OG.stride(0),
        OUTPUTS=num_outputs,
        INPUTS=num_inputs,
        GROUP=weights.group,
        E2M1=weights.table is None,
        SCALE_BITS=scale_bits(weights.scales_OG.dtype),
        HAS_FACTOR=weights.factor_O is not None,
        HAS_BIAS=bias_O is not None,
        NATIVE=has_native_fp8(x_TI.device),
        IEEE=INTERPRETED,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=min(max(RUN, block_k), max(RUN, next_power_of_2(num_inputs))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **COMPILE_OPTIONS,
    )
    return out_TO


def scale_bits(dtype: torch.dtype) -> int:
    """Of a scale's fraction, by which kernels know its type."""
    return {torch.float32: 23, FP8: 3, torch.uint8: 0}[dtype]


@jit(do_not_specialize=("num_tokens", "tiles_m"))
def _coded_matmul_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    code_ptr,
    table_ptr,
    scale_ptr,
    factor_ptr,
    bias_ptr,
    num_tokens,
    tiles_m,
    stride_x,
    stride_code,
    stride_scale,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    j = tl.arange(0, BLOCK_K // 2)
    k = inputs_of(j, 4)
    x_tile_ptr = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    code_tile_ptr = code_ptr + n.to(tl.int64)[None, :] * stride_code + j[:, None]
    scale_row_ptr = scale_ptr + n.to(tl.int64)[None, :] * stride_scale
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        inside = k < INPUTS - start
        mask = inside[:, None] & inside_n[None, :]
        codes = tl.load(code_tile_ptr + start // 2, mask=mask, other=0)
        for half in tl.static_range(2):
            x = tl.load(x_tile_ptr + start + 16 * half, mask=inside_m[:, None] & inside[None, :], other=0.0)
            column = (start + k + 16 * half) // GROUP
            sums = multiply_codes(
                x, (codes >> (4 * half)) & 15, scale_row_ptr + column[:, None], mask, sums, table_ptr,
                E2M1, SCALE_BITS, NATIVE, IEEE,
            )  # fmt: skip
    if HAS_FACTOR:
        sums *= tl.load(factor_ptr + n, mask=inside_n, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    out_tile_ptr = out_ptr + m.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(out_tile_ptr, sums.to(out_ptr.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])


@jit()
def multiply_codes(  # type: ignore[no-untyped-def]
    x,
    codes,
    scale_ptr,
    mask,
    sums,
    table_ptr,
    E2M1: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    IEEE: tl.constexpr,
):
    """`sums` and the product of a tile of rows with the numbers that codes from 0 to 15 and their scales stand for."""
    scale = _decode_scale(tl.load(scale_ptr, mask=mask, other=0), SCALE_BITS, NATIVE)
    weight = (_decode(codes, table_ptr, E2M1) * scale).to(x.dtype)
    if IEEE:  # the interpreter would multiply the bit patterns of bfloat16
        sums = tl.dot(x.to(tl.float32), weight.to(tl.float32), sums, input_precision="ieee")
    else:
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    return sums


@jit()
def _decode(codes, table_ptr, E2M1: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of codes from 0 to 15."""
    if E2M1:
        value = decode_e2m1(codes)
        value *= 16384.0
    else:
        value = tl.load(table_ptr + codes.to(tl.int32))
    return value


@jit()
def _decode_scale(scale, BITS: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of scales as they are stored."""
    if BITS == 3:
        value = decode_e4m3(scale, NATIVE)
    elif BITS == 0:  # codes from 1 on: smaller ones are no normal number
        value = (scale.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    else:
        value = scale
    return value
