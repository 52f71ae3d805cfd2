"""A matrix in codes of 4 bits, each of which stands for one of sixteen floats: NVFP4, MXFP4, bitsandbytes' nf4 and fp4.

| | codes | scales | one number for the matrix |
|---|---|---|---|
| compressed-tensors `nvfp4-pack-quantized` | weight_packed [O, I / 2] | e4m3 [O, I / 16] | divides |
| ModelOpt `NVFP4` | weight [O, I / 2] | e4m3 [O, I / 16] | multiplies |
| compressed-tensors `mxfp4-pack-quantized` | weight_packed [O, I / 2] | powers of two [O, I / 32] | |
| bitsandbytes, by `loader.bitsandbytes` | weight [O, I / 2], the first in the upper half | float32 [O, G] | |

Shapes: I inputs, O outputs, G groups, J = I / 2 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import torch
from pagefleet_kernels.coded_matmul import CodedWeights, coded_matmul, dequantize_codes
from pagefleet_kernels.mxfp4 import LARGEST_SCALE
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.quantized import PackedProduct
from pagefleet_kernels.packed_matmul import pack_numbers
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear_kernel import LinearKernel
from pagefleet_engine.layers.quantization.form import Form, form_of
from pagefleet_engine.layers.quantization.kernels import NativeLinear, QuantizedLinear
from pagefleet_engine.layers.quantization_scheme import CodedScheme
from pagefleet_engine.layers.shard import Shard
from pagefleet_engine.layers.weight import Content, Kept, Placement, UnusableTensorError, Weight

TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * value / 12 for sign in (1.0, -1.0) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)),
}
"""What bitsandbytes' codes stand for; those of e2m1 are known to the kernels."""
_SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.uint8, "float32": torch.float32}
# Of random weights: of the numbers, and what the codes of a table deviate by.
_STANDARD_DEVIATION, _DEVIATIONS = 0.02, {"e2m1": 2.9, "nf4": 0.55, "fp4": 0.53}
_USUAL_POWER = 120  # 2^-7
_ROWS_AT_ONCE = 1024
"""That are dequantized in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrix:
    """Implements `layers.matrix.Matrix`."""

    weights: CodedWeights
    dtype: torch.dtype
    """Of the model."""
    native: Library | None = None
    """Who multiplies on a CPU."""

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """See Matrix."""
        weights = self.weights.rows(start, stop)
        return CodedLinear(weights) if self.native is None else NativeLinear(PackedProduct(self.native, weights))

    def plain(self) -> Tensor:
        """See Matrix."""
        return self.weights.dequantize().to(self.dtype)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See Matrix."""
        weights = self.weights
        return tuple(part for part in (weights.codes, weights.scales_OG, weights.factor_O) if part is not None)

    def of(self, stored: Sequence[Tensor]) -> CodedMatrix:
        """See Matrix."""
        codes, scales_OG, *factor = stored
        weights = replace(self.weights, codes=codes, scales_OG=scales_OG, factor_O=next(iter(factor), None))
        return replace(self, weights=weights)


class CodedLinear(QuantizedLinear):
    """By pagefleet_kernels; inputs are taken as they are."""

    __slots__ = ("_weights",)

    def __init__(self, weights: CodedWeights) -> None:
        self._weights = weights

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return coded_matmul(x_TI, self._weights, bias_O)


class CodedSlots:
    """Collects what arrives in the slots; installs a `CodedMatrix`, or a plain one, when all is there."""

    __slots__ = ("_arrived", "_form", "_install", "_outputs", "_placement", "_scheme", "slots")

    def __init__(
        self,
        scheme: CodedScheme,
        inputs: Shard,
        outputs: tuple[Shard, ...],
        placement: Placement,
        install: Callable[[CodedMatrix | Tensor], None],
    ) -> None:
        """See `layers.matrix.matrix_slots`; `install` gets the numbers themselves, in the model's type, where they are
        kept so.

        Raises:
            ModelLoadError: groups do not divide the inputs, or ranks would cut them.
        """
        self._scheme, self._placement, self._install = scheme, placement, install
        self._outputs = tuple(output.size for output in outputs)
        self._form = form_of(scheme, inputs, placement)[0]
        self._arrived: dict[str, Tensor] = {}
        self.slots: dict[str, Weight] = {}
        groups = _groups(scheme, inputs, placement)
        expanded, ones = self._form is Form.EXPANDED, (1,) * len(outputs)
        codes = Kept(placement.dtype, numbers=2) if expanded else Kept(torch.uint8)
        scales = _SCALE_DTYPES[scheme.scales]
        nothing = Kept(placement.dtype, numbers=0)
        self._add(scheme.codes_name, outputs, groups.times(scheme.group_size // 2), torch.uint8, codes)
        kept_scales = torch.float16 if self._form is Form.NATIVE else scales
        self._add(scheme.scales_name, outputs, groups, scales, nothing if expanded else Kept(kept_scales))
        self.slots[scheme.scales_name].holding(Content(_check_scales, partial(_usual_scales, scheme)))
        if scheme.factor_name:
            factor = nothing if expanded else Kept(torch.float32, numbers=Fraction(sum(self._outputs), len(outputs)))
            self._add(scheme.factor_name, ones, None, torch.float32, factor)
            self.slots[scheme.factor_name].holding(Content(_check_factor, torch.ones))
        if scheme.passed_over:
            self._add(scheme.passed_over, ones, None, torch.float32, nothing)

    def _add(
        self, name: str, rows: tuple[int | Shard, ...], columns: Shard | None, dtype: torch.dtype, kept: Kept
    ) -> None:
        self.slots[name] = Weight(rows, columns, self._placement, partial(self._take, name), dtype=dtype, kept=kept)

    def _take(self, name: str, tensor: Tensor) -> None:
        self._arrived[name] = tensor
        if len(self._arrived) == len(self.slots):
            arrived, self._arrived = self._arrived, {}
            self._install(self._matrix(arrived))

    def _matrix(self, arrived: dict[str, Tensor]) -> CodedMatrix | Tensor:
        scheme, bytes_OJ = self._scheme, arrived[self._scheme.codes_name]
        dtype, device = self._placement.dtype, bytes_OJ.device
        halves = (bytes_OJ & 15, bytes_OJ >> 4)
        codes_OI = torch.stack(halves[::-1] if scheme.first_is_upper else halves, -1).flatten(1)
        scales_OG, factor_O = arrived[scheme.scales_name], None
        if scheme.factor_name:
            factor = arrived[scheme.factor_name]
            rows = torch.tensor(self._outputs, device=device)
            factor_O = (factor.reciprocal() if scheme.factor_divides else factor).repeat_interleave(rows)
        values = TABLES.get(scheme.table)
        table = None if values is None else torch.tensor(values, device=device)
        if self._form is not Form.EXPANDED:
            weights = CodedWeights(pack_numbers(codes_OI, 4), table, scales_OG, factor_O, scheme.group_size)
            return CodedMatrix(weights, dtype, self._placement.native if self._form is Form.NATIVE else None)
        out_OI = torch.empty(codes_OI.shape, dtype=dtype, device=device)
        for start in range(0, len(out_OI), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            own = None if factor_O is None else factor_O[part]
            out_OI[part] = dequantize_codes(codes_OI[part], table, scales_OG[part], own)
        return out_OI


def _groups(scheme: CodedScheme, inputs: Shard, placement: Placement) -> Shard:
    path, size = placement.path, scheme.group_size
    if inputs.whole % size:
        raise ModelLoadError(
            f"{path} has {inputs.whole} inputs, which groups of {size} do not divide: give another checkpoint, or one "
            "in a float type"
        )
    try:
        return inputs.in_blocks_of(size)
    except ValueError:
        raise ModelLoadError(
            f"{path}: {placement.tensor.size} ranks would cut groups of {size} numbers that share a scale: give a "
            "smaller --tensor-parallel-size"
        ) from None


def _check_scales(scales: Tensor) -> None:
    is_power = scales.dtype == torch.uint8
    usable = scales <= LARGEST_SCALE if is_power else scales.to(torch.float32).isfinite()
    if not bool(usable.all()):
        raise UnusableTensorError("holds no usable scale: download the checkpoint again")


def _check_factor(factor: Tensor) -> None:
    if not bool((factor.isfinite() & (factor > 0.0)).all()):
        raise UnusableTensorError(f"is {float(factor.flatten()[0])}, no scale: download the checkpoint again")


def _usual_scales(scheme: CodedScheme, shape: tuple[int, ...]) -> Tensor:
    """Of random weights."""
    if scheme.scales == "e8m0":
        return torch.full(shape, _USUAL_POWER, dtype=torch.uint8)
    return torch.full(shape, _STANDARD_DEVIATION / _DEVIATIONS[scheme.table])
