"""A quantized matrix, and the slots of its numbers and of their scales, which the checkpoint holds apart.

Shapes: I inputs, O outputs, B blocks of outputs by C blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.quantized import PackedProduct
from pagefleet_kernels.packed_matmul import PackedWeights
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear_kernel import LinearKernel, PlainLinear, linear_kernel
from pagefleet_engine.layers.quantization.form import Form, form_of, kept_dtype
from pagefleet_engine.layers.quantization.inputs import FixedScale, InputQuantizer, dynamic_scale, joined, round_to
from pagefleet_engine.layers.quantization.kernels import ExpandedLinear, NativeLinear, PackedInt8Linear, RescaledLinear
from pagefleet_engine.layers.quantization.scaled import ScaledLinear
from pagefleet_engine.layers.quantization_scheme import STORAGE, Number, QuantizationScheme
from pagefleet_engine.layers.shard import Shard
from pagefleet_engine.layers.weight import Kept, Placement, Weight
from pagefleet_engine.ranks.group import RankGroup

# Of a byte: its other value makes a number around zero one from zero on.
_SIGN = 128


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """Implements `layers.matrix.Matrix`."""

    scheme: QuantizationScheme
    form: Form
    values_OI: Tensor
    scales: Tensor
    """float32: [O], or [B, C] with scales per block."""
    fixed: FixedScale | None
    """Where the scheme has one."""
    dtype: torch.dtype
    """Of the model."""
    traceable: bool = False
    """See Placement."""
    input_ranks: RankGroup | None = None
    """Those that the columns, and so the inputs, are divided among."""
    native: Library | None = None
    """Who multiplies on a CPU."""

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """See Matrix; with scales per block, rows of the device's own product start where a block does."""
        values_OI, scales = self.values_OI[start:stop], self._scales(start, stop)
        rounding = self.scheme.rounding
        inputs = None if rounding is None else InputQuantizer(rounding, self.fixed, self.input_ranks)
        match self.form:
            case Form.EXPANDED:
                within = 0 if self.scheme.block is None else start % self.scheme.block[0]
                weight_OI = dequantize(values_OI, scales, self.scheme.block, within).to(self.dtype)
                product = PlainLinear(weight_OI) if self.traceable else linear_kernel(weight_OI, self.native)
                return ExpandedLinear(product, inputs)
            case Form.RESCALED:
                assert inputs is not None, "numbers are multiplied by numbers"
                return RescaledLinear(values_OI, scales, inputs, self.dtype, self.native)
            case Form.PACKED_INT8:
                assert inputs is not None, "numbers are multiplied by numbers"
                return PackedInt8Linear(values_OI, scales, inputs)
            case Form.NATIVE:
                assert self.native is not None, "the form is theirs"
                weights = PackedWeights(values_OI.view(torch.uint8) ^ _SIGN, scales[:, None], None, 8, None)
                by_row = rounding is not None and rounding.scales == "token" and self.input_ranks is None
                packed = PackedProduct(self.native, weights, input_block=values_OI.shape[1] if by_row else None)
                return NativeLinear(packed, None if by_row else inputs)
            case Form.SCALED:
                assert self.scheme.block is None or start % self.scheme.block[0] == 0, "rows start where a block does"
                return ScaledLinear(values_OI, scales, self.scheme, self.fixed, self.dtype)

    def plain(self) -> Tensor:
        """See Matrix."""
        return dequantize(self.values_OI, self.scales, self.scheme.block).to(self.dtype)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See Matrix."""
        fixed = () if self.fixed is None else (self.fixed.scale, self.fixed.zero)
        return (self.values_OI, self.scales, *(one for one in fixed if one is not None))

    def of(self, stored: Sequence[Tensor]) -> QuantizedMatrix:
        """See Matrix."""
        values_OI, scales, *fixed = stored
        return replace(self, values_OI=values_OI, scales=scales, fixed=FixedScale(*fixed) if fixed else None)

    def _scales(self, start: int, stop: int) -> Tensor:
        if self.scheme.block is None:
            return self.scales[start:stop]
        rows = self.scheme.block[0]
        return self.scales[start // rows : -(-stop // rows)]


def dequantize(values_OI: Tensor, scales: Tensor, block: tuple[int, int] | None, within: int = 0) -> Tensor:
    """The float32 numbers that stored ones stand for, the first row of them so far `within` a block."""
    wide_OI = values_OI.to(torch.float32)
    if block is None:
        return wide_OI.mul_(scales[:, None])
    outputs, inputs = values_OI.shape
    scale_OC = scales.repeat_interleave(block[0], 0)[within : within + outputs]
    return wide_OI.mul_(scale_OC.repeat_interleave(block[1], 1)[:, :inputs])


def quantize_rows(weight_OI: Tensor, number: Number, ranks: RankGroup | None = None) -> tuple[Tensor, Tensor]:
    """Numbers [O, I] in their storage type, and float32 scales [O]; `ranks` have the rest of the rows."""
    scale_O1 = dynamic_scale(weight_OI, number, ranks)
    values_OI = round_to(weight_OI.to(torch.float32).div_(scale_O1), number).to(STORAGE[number])
    return values_OI, scale_O1.squeeze(-1)


_WEIGHT, _INPUT_SCALE, _INPUT_ZERO = "weight", "input_scale", "input_zero_point"


class QuantizedSlots:
    """Collects what arrives in the slots, and installs the matrix when all is there."""

    __slots__ = ("_arrived", "_form", "_input_ranks", "_install", "_outputs", "_placement", "_scheme", "slots")

    def __init__(
        self,
        scheme: QuantizationScheme,
        inputs: Shard,
        outputs: tuple[Shard, ...],
        placement: Placement,
        install: Callable[[QuantizedMatrix], None],
    ) -> None:
        """See `layers.matrix.matrix_slots`.

        Raises:
            ModelLoadError: blocks of a merged matrix do not end where its parts do, or where a rank's part does.
        """
        self._scheme, self._placement, self._install = scheme, placement, install
        self._outputs = tuple(output.size for output in outputs)
        self._form = form_of(scheme, inputs, placement)[0]
        self._input_ranks = placement.tensor if inputs.is_part else None
        self._arrived: dict[str, Tensor] = {}
        self.slots: dict[str, Weight] = {}
        self._add(_WEIGHT, outputs, inputs, None if scheme.on_load else scheme.storage)
        if not scheme.on_load:
            rows, columns = _scale_shape(scheme, inputs, outputs, placement)
            self._add(scheme.scale_name, rows, columns, torch.float32)
        if scheme.input_scales == "tensor":
            self._add(_INPUT_SCALE, (1,) * len(outputs), None, torch.float32)
            if scheme.input_zero_points:
                self._add(_INPUT_ZERO, (1,) * len(outputs), None, torch.int8)

    def _add(self, name: str, rows: tuple[int | Shard, ...], columns: Shard | None, dtype: torch.dtype | None) -> None:
        take, place = partial(self._take, name), self._placement
        if name != _WEIGHT:
            self.slots[name] = Weight(rows, columns, place, take, dtype=dtype)
            return
        # Stored numbers wait for their scales; plain ones are rounded, and so copied, at once.
        kept = Kept(kept_dtype(self._scheme, self._form, place.dtype), is_copy=self._scheme.on_load)
        if place.traceable and place.balance is not None:  # experts that move are there in both forms
            kept = replace(kept, dtype=self._scheme.storage, numbers=1 + place.dtype.itemsize)
        self.slots[name] = Weight(rows, columns, place, take, dtype=dtype, kept=kept)

    def _take(self, name: str, tensor: Tensor) -> None:
        self._arrived[name] = tensor
        if len(self._arrived) == len(self.slots):
            arrived, self._arrived = self._arrived, {}
            self._install(self._matrix(arrived))

    def _matrix(self, arrived: dict[str, Tensor]) -> QuantizedMatrix:
        scheme, weight_OI = self._scheme, arrived[_WEIGHT]
        if scheme.on_load:
            weight_OI, scales = quantize_rows(weight_OI, scheme.number, self._input_ranks)
        else:
            scales = arrived[scheme.scale_name]
            self._check(scheme.scale_name, scales.isfinite())
        if scheme.weight_scales == "tensor":
            # One scale per part becomes one per row: the parts keep their own without being rounded again.
            rows = torch.tensor(self._outputs, device=scales.device)
            scales = scales.repeat_interleave(rows)
        fixed = None
        if _INPUT_SCALE in arrived:
            input_scales = arrived[_INPUT_SCALE]
            self._check(_INPUT_SCALE, input_scales.isfinite() & (input_scales > 0.0))
            fixed = joined(input_scales, arrived.get(_INPUT_ZERO))
        place = self._placement
        return QuantizedMatrix(
            scheme, self._form, weight_OI, scales, fixed, place.dtype, place.traceable, self._input_ranks, place.native
        )

    def _check(self, name: str, usable: Tensor) -> None:
        if not usable.all():
            raise ModelLoadError(f"{self._placement.path}: {name} holds no usable scale: download the checkpoint again")


def _scale_shape(
    scheme: QuantizationScheme, inputs: Shard, outputs: tuple[Shard, ...], placement: Placement
) -> tuple[tuple[int | Shard, ...], Shard | None]:
    match scheme.weight_scales:
        case "tensor":
            return (1,) * len(outputs), None
        case "channel":
            return outputs, None
        case "block":
            assert scheme.block is not None, "scales per block have a block"
            rows, columns = scheme.block
            try:
                row_blocks, column_blocks = [one.in_blocks_of(rows) for one in outputs], inputs.in_blocks_of(columns)
            except ValueError:
                if placement.tensor.size == 1:
                    raise ModelLoadError(
                        f"{placement.path}: queries, keys and values that lie between each other cut blocks of "
                        f"{rows}x{columns} that share a scale: give a checkpoint with one scale per channel"
                    ) from None
                raise ModelLoadError(
                    f"{placement.path}: {placement.tensor.size} ranks would cut blocks of {rows}x{columns} that share "
                    "a scale: give a smaller --tensor-parallel-size"
                ) from None
            if any(output.size % rows for output in outputs[:-1]):
                raise ModelLoadError(
                    f"{placement.path}: parts of {', '.join(str(output.size) for output in outputs)} rows do not end "
                    f"with a block of {rows} rows: give a checkpoint with smaller blocks, or one scale per channel"
                )
            return tuple(row_blocks), column_blocks
