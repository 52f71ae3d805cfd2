"""The slots of a quantized matrix: its numbers and their scales, which the checkpoint holds apart.

Shapes: I inputs, O outputs, B blocks of outputs by C blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization.form import form_on, kept_dtype
from pagefleet_engine.layers.quantization.matrix import QuantizedMatrix, quantize_rows
from pagefleet_engine.layers.quantization_scheme import QuantizationScheme
from pagefleet_engine.layers.weight import Kept, Placement, Weight

_WEIGHT, _INPUT_SCALE = "weight", "input_scale"


class QuantizedSlots:
    """Collects what arrives in the slots, and installs the matrix when all is there."""

    __slots__ = ("_arrived", "_form", "_install", "_outputs", "_placement", "_scheme", "slots")

    def __init__(
        self,
        scheme: QuantizationScheme,
        inputs: int,
        outputs: tuple[int, ...],
        placement: Placement,
        install: Callable[[QuantizedMatrix], None],
    ) -> None:
        """See `layers.matrix.matrix_slots`.

        Raises:
            ModelLoadError: blocks of a merged matrix do not end where its parts do.
        """
        self._scheme, self._outputs, self._placement, self._install = scheme, outputs, placement, install
        self._form = form_on(scheme, inputs, placement)[0]
        self._arrived: dict[str, Tensor] = {}
        self.slots: dict[str, Weight] = {}
        self._add(_WEIGHT, outputs, inputs, None if scheme.on_load else scheme.storage)
        if not scheme.on_load:
            rows, columns = _scale_shape(scheme, inputs, outputs, placement)
            self._add(scheme.scale_name, rows, columns, torch.float32)
        if scheme.input_scales == "tensor":
            self._add(_INPUT_SCALE, (1,) * len(outputs), None, torch.float32)

    def _add(self, name: str, rows: tuple[int, ...], columns: int | None, dtype: torch.dtype | None) -> None:
        take, place = partial(self._take, name), self._placement
        if name != _WEIGHT:
            self.slots[name] = Weight(rows, columns, place, take, dtype=dtype)
            return
        # Stored numbers wait for their scales; plain ones are rounded, and so copied, at once.
        kept = Kept(kept_dtype(self._scheme, self._form, place.dtype), is_copy=self._scheme.on_load)
        self.slots[name] = Weight(rows, columns, place, take, dtype=dtype, kept=kept)

    def _take(self, name: str, tensor: Tensor) -> None:
        self._arrived[name] = tensor
        if len(self._arrived) == len(self.slots):
            arrived, self._arrived = self._arrived, {}
            self._install(self._matrix(arrived))

    def _matrix(self, arrived: dict[str, Tensor]) -> QuantizedMatrix:
        scheme, weight_OI = self._scheme, arrived[_WEIGHT]
        if scheme.on_load:
            weight_OI, scales = quantize_rows(weight_OI, scheme.number)
        else:
            scales = arrived[scheme.scale_name]
            self._check(scheme.scale_name, scales.isfinite())
        if scheme.weight_scales == "tensor":
            # One scale per part becomes one per row: the parts keep their own without being rounded again.
            rows = torch.tensor(self._outputs, device=scales.device)
            scales = scales.repeat_interleave(rows)
        # Parts read the same inputs, which are quantized once: with the scale that covers the widest range.
        input_scale = arrived[_INPUT_SCALE].amax() if _INPUT_SCALE in arrived else None
        if input_scale is not None:
            self._check(_INPUT_SCALE, input_scale.isfinite() & (input_scale > 0.0))
        place = self._placement
        return QuantizedMatrix(scheme, self._form, weight_OI, scales, input_scale, place.dtype, place.traceable)

    def _check(self, name: str, usable: Tensor) -> None:
        if not usable.all():
            raise ModelLoadError(f"{self._placement.path}: {name} holds no usable scale: download the checkpoint again")


def _scale_shape(
    scheme: QuantizationScheme, inputs: int, outputs: tuple[int, ...], placement: Placement
) -> tuple[tuple[int, ...], int | None]:
    match scheme.weight_scales:
        case "tensor":
            return (1,) * len(outputs), None
        case "channel":
            return outputs, None
        case "block":
            assert scheme.block is not None, "scales per block have a block"
            rows, columns = scheme.block
            if any(output % rows for output in outputs[:-1]):
                raise ModelLoadError(
                    f"{placement.path}: parts of {', '.join(map(str, outputs))} rows do not end with a block of "
                    f"{rows} rows: give a checkpoint with smaller blocks, or one scale per channel"
                )
            return tuple(-(-output // rows) for output in outputs), -(-inputs // columns)
