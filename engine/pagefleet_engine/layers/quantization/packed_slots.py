"""The slots of a matrix in numbers of a few bits: words, scales, zero points and the groups of inputs.

Shapes: I inputs, O outputs, G groups, W words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization.form import Form, form_of
from pagefleet_engine.layers.quantization.packed import PackedMatrix, dequantize_packed
from pagefleet_engine.layers.quantization.packed_contents import packed_contents, packed_kept
from pagefleet_engine.layers.quantization.packing import Unpacked, names_of, read_packed, tensor_shards
from pagefleet_engine.layers.quantization_scheme import PackedScheme
from pagefleet_engine.layers.shard import Shard
from pagefleet_engine.layers.weight import Placement, Weight


class PackedSlots:
    """Collects what arrives in the slots; installs a `PackedMatrix`, or a plain one, when all is there."""

    __slots__ = ("_arrived", "_form", "_inputs", "_install", "_outputs", "_placement", "_scheme", "slots")

    def __init__(
        self,
        scheme: PackedScheme,
        inputs: Shard,
        outputs: tuple[Shard, ...],
        placement: Placement,
        install: Callable[[PackedMatrix | Tensor], None],
    ) -> None:
        """See `layers.matrix.matrix_slots`; `install` gets the numbers themselves, in the model's type, where they are
        kept so.

        Raises:
            ModelLoadError: groups do not divide the inputs, or ranks would cut words or groups.
        """
        self._scheme, self._placement, self._install = scheme, placement, install
        self._inputs, self._outputs = inputs, outputs
        self._form = form_of(scheme, inputs, placement)[0]
        self._arrived: dict[str, list[Tensor]] = {}
        shards = _shards(scheme, inputs, outputs, placement)
        kept, contents = packed_kept(scheme, self._form, placement.dtype), packed_contents(scheme, inputs)
        names = names_of(scheme)
        self.slots: dict[str, Weight] = {}
        for name in shards[0]:
            rows = tuple(part[name][0] for part in shards)
            columns = tuple(part[name][1] for part in shards) if len(shards[0][name]) > 1 else None
            dtype = torch.int8 if scheme.packing == "int-quantized" else torch.int32
            if name == names.scales or (name == names.zeros and scheme.float_zeros):
                dtype = torch.float32
            slot = Weight(rows, columns, placement, partial(self._take, name), dtype=dtype, kept=kept[name])
            self.slots[name] = slot.holding(contents.get(name))

    def _take(self, name: str, whole: Tensor) -> None:
        self._arrived[name] = self.slots[name].parts(whole)
        if len(self._arrived) == len(self.slots):
            arrived, self._arrived = self._arrived, {}
            parts = [
                read_packed(self._scheme, {name: tensors[part] for name, tensors in arrived.items()}, *sizes)
                for part, sizes in enumerate((self._inputs.size, output.size) for output in self._outputs)
            ]
            arrived.clear()
            self._install(self._matrix(parts))

    def _matrix(self, parts: list[Unpacked]) -> PackedMatrix | Tensor:
        scheme, dtype = self._scheme, self._placement.dtype
        groups = [self._groups(part) for part in parts]
        if self._form is Form.EXPANDED:
            rows = [dequantize_packed(scheme, part, own, dtype) for part, own in zip(parts, groups, strict=True)]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        if any(not torch.equal(own, groups[0]) for own in groups[1:]):
            raise ModelLoadError(
                f"{self._placement.path}: its projections have inputs in different orders (g_idx), and are computed as "
                "one: quantize them with the same order, or without desc_act"
            )
        zeros = [part.zeros_OG for part in parts if part.zeros_OG is not None]
        together = Unpacked(
            torch.cat([part.codes_OI for part in parts]),
            torch.cat([part.scales_OG for part in parts]),
            torch.cat(zeros) if zeros else None,
            None,
        )
        place = self._placement
        native = place.native if self._form is Form.NATIVE else None
        ranks = place.tensor if self._inputs.is_part else None
        return PackedMatrix.of_numbers(scheme, together, groups[0], dtype, native, ranks)

    def _groups(self, part: Unpacked) -> Tensor:
        """The group of each input of a rank, counted from its first where they are of neighbours; int64 [I]."""
        size, num_inputs = self._scheme.group_size, self._inputs.size
        device = part.codes_OI.device
        if size is None:
            return torch.zeros(num_inputs, dtype=torch.int64, device=device)
        if part.groups_I is None:
            return torch.arange(num_inputs, device=device) // size
        if bool((part.groups_I >= 0).all()):
            return part.groups_I.to(torch.int64)
        own = [torch.arange(r.start, r.stop, device=device) for r in self._inputs.ranges]
        return torch.cat(own) // size


def _shards(
    scheme: PackedScheme, inputs: Shard, outputs: tuple[Shard, ...], placement: Placement
) -> list[dict[str, tuple[Shard, ...]]]:
    path, size = placement.path, scheme.group_size
    if size is not None and inputs.whole % size:
        raise ModelLoadError(
            f"{path} has {inputs.whole} inputs, which groups of {size} do not divide: give group_size as the weights "
            "were quantized with, or another checkpoint"
        )
    in_words = 1 if scheme.packing == "awq" else scheme.word
    if scheme.packing not in ("compressed-tensors", "int-quantized") and not scheme.float_zeros:
        for output in outputs:
            if inputs.whole % in_words or output.whole % scheme.word:
                raise ModelLoadError(
                    f"{path} is {output.whole} x {inputs.whole}, which words of {scheme.word} numbers do not divide: "
                    "leave the layer out when you quantize (modules_to_not_convert)"
                )
    try:
        return [tensor_shards(scheme, inputs, output) for output in outputs]
    except ValueError:
        unit = f"{scheme.block[0]}x{scheme.block[1]}"
        if placement.tensor.size == 1:
            raise ModelLoadError(
                f"{path}: projections that lie between each other cut pieces of {unit} numbers that are stored as one: "
                "give a checkpoint in a float type"
            ) from None
        raise ModelLoadError(
            f"{path}: {placement.tensor.size} ranks would cut pieces of {unit} numbers that share words or a scale: "
            "give a smaller --tensor-parallel-size"
        ) from None
