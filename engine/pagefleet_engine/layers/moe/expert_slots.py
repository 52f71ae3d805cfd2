"""The slots of all experts' matrices: one by one, or stacked in one tensor, as checkpoints have them.

Shapes: E experts, I inputs, O outputs of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from pagefleet_kernels.native.library import Library
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.matrix import Matrix, matrix_slots
from pagefleet_engine.layers.quantization.form import Form, form_of
from pagefleet_engine.layers.quantization.mxfp4 import Mxfp4Matrix, check_scales, mxfp4_columns, mxfp4_kept
from pagefleet_engine.layers.quantization_scheme import BlockScheme, QuantizationScheme, Scheme
from pagefleet_engine.layers.shard import Shard, shard_of, stacked
from pagefleet_engine.layers.weight import Content, Kept, Placement, Weight, parts_of

InstallExpert = Callable[[int, Matrix], None]
"""Gets each expert's matrix, with the expert's number, once."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """One tensor that holds the matrices of all experts."""

    name: str
    transposed: bool = False
    """It has a row for each input, and a name without `.weight`."""
    in_turns: bool = False
    """Rows of gate and up, or columns, take turns."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the parts of a layer of experts."""

    block: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    """What chooses experts beside the router's scores, where the family has it."""
    correction_is_row: bool = False
    """It is a matrix of one row."""
    gate_up: str | Stacked = "experts.{}.gate_up_proj"
    down: str | Stacked = "experts.{}.down_proj"
    shared: str = "shared_experts"
    biased: bool = False
    """The router has a bias, and so have the experts, all in one tensor."""


EXPERT_NAMES = ExpertNames()
"""The names in most families."""


def expert_slots(
    name: str | Stacked,
    experts: Shard,
    inputs: int | Shard,
    outputs: tuple[int | Shard, ...],
    placement: Placement,
    install: InstallExpert,
) -> Iterator[tuple[str, Weight]]:
    """Slots by name, relative to `placement.path`; `name` is as in `ExpertNames`, `outputs` as in `matrix_slots`.

    `experts`: which of them are a rank's; `install` numbers these from 0.

    Raises:
        ModelLoadError: the matrices cannot be divided as they are quantized, or experts differ in how they are.
    """
    if isinstance(name, Stacked):
        rows, within = (_joined(outputs, name),), of_stack(name, placement)
        scheme = within.scheme(1)
        if isinstance(scheme, QuantizationScheme) and scheme.number == "mxfp4":
            stack_slots = _Mxfp4Stack(experts, shard_of(inputs), rows[0], _order(outputs, name), install)
            yield from stack_slots.slots(scheme, within)
            return
        if scheme is not None and not _has_stacks(scheme, name):
            raise ModelLoadError(
                f"{within.path}: {scheme.describe()} of experts in one tensor are not run here: give a checkpoint that "
                "has each expert in tensors of its own"
            )
        stack = [matrix_slots(inputs, rows, within, partial(install, place)) for place in range(experts.size)]
        for kind in stack[0]:
            slot = _stacked_slot([slots[kind] for slots in stack], experts, _order(outputs, name), placement)
            yield (name.name if name.transposed else f"{name.name}.{kind}"), slot
        return
    first: tuple[str, object] | None = None
    for place, number in enumerate(itertools.chain(*experts.ranges)):
        layer = name.format(number)
        slots = matrix_slots(inputs, outputs, placement.within(layer), partial(install, place))
        scheme = placement.within(layer).scheme(len(outputs))
        form = scheme, {kind: (weight.dtype, weight.shape) for kind, weight in slots.items()}
        if first is None:
            first = layer, form
        elif form != first[1]:
            raise _different(first[0], layer, len(outputs), placement)
        for kind, weight in slots.items():
            yield f"{layer}.{kind}", weight


def of_stack(name: Stacked, placement: Placement) -> Placement:
    """The placement of a matrix of all experts: without quantization where checkpoints leave such in floats."""
    within, quantization = placement.within(name.name), placement.quantization
    left = quantization is not None and quantization.leaves_stacks
    return replace(within, quantization=None) if left else within


def _has_stacks(scheme: Scheme, order: Stacked) -> bool:
    """Whether checkpoints have all experts' tensors in one for each of a matrix's."""
    if isinstance(scheme, QuantizationScheme) and scheme.on_load:
        return True
    return not (order.transposed or isinstance(scheme, BlockScheme))


def _different(first: str, other: str, num_parts: int, placement: Placement) -> ModelLoadError:
    """Of experts of a layer, which are computed as one."""
    schemes = {layer: placement.within(layer).scheme(num_parts) for layer in (first, other)}
    said = ", ".join(f"{name}: {'not quantized' if one is None else one.describe()}" for name, one in schemes.items())
    return ModelLoadError(f"{placement.path}: experts are quantized in different ways ({said}): quantize them alike")


class _Mxfp4Stack:
    """Codes and scales of all experts' matrices, in two tensors whose rows are outputs."""

    def __init__(self, experts: Shard, inputs: Shard, rows: Shard, order: Stacked, install: InstallExpert) -> None:
        self._experts, self._inputs, self._rows, self._order, self._install = experts, inputs, rows, order, install
        self._arrived: dict[str, Tensor] = {}
        self._native: Library | None = None

    def slots(self, scheme: QuantizationScheme, within: Placement) -> Iterator[tuple[str, Weight]]:
        """Raises ModelLoadError where the inputs are no whole blocks."""
        codes, blocks = mxfp4_columns(self._inputs, within.path)
        if form_of(scheme, self._inputs, within)[0] is Form.NATIVE:
            self._native = within.native
        kept_codes, kept_scales = mxfp4_kept(scheme, self._inputs.size, within)
        rows, count = (_of_experts(self._experts, self._rows),), self._experts.whole
        for kind, columns, kept, shape in (
            ("blocks", codes, kept_codes, (blocks.whole, codes.whole // blocks.whole)),
            ("scales", blocks, kept_scales, (blocks.whole,)),
        ):
            take = partial(self._take, within, kind)
            slot = Weight(rows, columns, within, take, dtype=scheme.storage, kept=kept)
            yield f"{self._order.name}_{kind}", slot.stored_as((count, self._rows.whole, *shape))

    def _take(self, within: Placement, kind: str, all_XY: Tensor) -> None:
        self._arrived[kind] = all_XY
        if len(self._arrived) < 2:
            return
        arrived, self._arrived = self._arrived, {}
        check_scales(arrived["scales"], within.path)
        parts = [torch.split(arrived[kind], self._rows.size) for kind in ("blocks", "scales")]
        for place, stored in enumerate(zip(*parts, strict=True)):
            codes_OJ, scales_OC = stored
            if self._order.in_turns:
                codes_OJ, scales_OC = map(_gate_over_up, stored)
            elif within.traceable:  # one that moves would leave the memory of all behind
                codes_OJ, scales_OC = codes_OJ.clone(), scales_OC.clone()
            self._install(place, Mxfp4Matrix(codes_OJ, scales_OC, within.dtype, self._native))


def bias_slots(
    name: str | Stacked,
    experts: Shard,
    outputs: tuple[int | Shard, ...],
    placement: Placement,
    install: Callable[[Tensor], None],
) -> Iterator[tuple[str, Weight]]:
    """Slots for the biases of all experts, [E, O] of a tensor, and their names; arguments as in `expert_slots`.

    One tensor has those of gate and up where one has their matrices.
    """
    if not isinstance(name, Stacked):
        yield from _bias_slots_apart(name, experts, outputs, placement, install)
        return
    in_turns = _order(outputs, name).in_turns

    def take(bias_EO: Tensor) -> None:
        install(_gate_over_up(bias_EO.t()).t().contiguous() if in_turns else bias_EO)

    kept = Kept(placement.dtype, is_copy=in_turns)
    yield f"{name.name}_bias", Weight((experts,), _joined(outputs, name), placement, take, kept=kept)


def _bias_slots_apart(
    name: str,
    experts: Shard,
    outputs: tuple[int | Shard, ...],
    placement: Placement,
    install: Callable[[Tensor], None],
) -> Iterator[tuple[str, Weight]]:
    block, _, layer = name.replace(".{}", "").rpartition(".")
    arrived: dict[int, Tensor] = {}

    def take(part: int, bias_EO: Tensor) -> None:
        arrived[part] = bias_EO.clone()  # the room that it came in is the next one's
        if len(arrived) == len(outputs):
            install(torch.cat([arrived.pop(one) for one in range(len(outputs))], 1))

    kept = Kept(placement.dtype, is_copy=True)
    for part, (own, rows) in enumerate(zip(parts_of(layer, len(outputs)), outputs, strict=True)):
        slot = Weight((experts,), shard_of(rows), placement, partial(take, part), kept=kept)
        yield f"{block}.{own}_bias", slot


def _order(outputs: tuple[int | Shard, ...], name: Stacked) -> Stacked:
    """The same; only two can take turns."""
    return replace(name, in_turns=name.in_turns and len(outputs) > 1)


def _joined(outputs: tuple[int | Shard, ...], name: Stacked) -> Shard:
    """Of a tensor that has all of them."""
    if _order(outputs, name).in_turns:
        return shard_of(outputs[0]).times(2)
    return stacked(map(shard_of, outputs))


def _gate_over_up(in_turns: Tensor) -> Tensor:
    """A new tensor with the rows that are gate's before those of up."""
    return torch.cat((in_turns[::2], in_turns[1::2]))


def _stacked_slot(slots: list[Weight], experts: Shard, order: Stacked, placement: Placement) -> Weight:
    """A slot for the tensor [E, ...] that fills the experts' own, which are all alike and of one part: of matrices, and
    of what belongs to them, as scales."""
    one = slots[0]
    ((rows, *columns),) = one.shards
    if order.transposed:
        rows, columns = columns[0], [rows]

    def divide(all_XY: Tensor) -> None:
        for weight, own in zip(slots, torch.split(all_XY, rows.size), strict=True):
            own_OI = own.t() if order.transposed else own
            weight.room(0).copy_(_gate_over_up(own_OI) if order.in_turns else own_OI)
            weight.arrived(0)

    own_rows, kept = (_of_experts(experts, rows),), replace(one.kept, is_copy=True)
    weight = Weight(own_rows, columns[0] if columns else None, placement, divide, dtype=one.dtype, kept=kept)
    if one.content is not None:
        weight.holding(_of_each(one.content, rows.size))
    return weight.stored_as((experts.whole, rows.whole, *(column.whole for column in columns)))


def _of_each(content: Content, num_rows: int) -> Content:
    """Of a stack of tensors that hold this, of so many rows each."""

    def check(all_XY: Tensor) -> None:
        for own in torch.split(all_XY, num_rows):
            content.check(own)

    return Content(check, lambda shape: torch.stack([content.stand_in(shape[1:]) for _ in range(shape[0])]))


def _of_experts(experts: Shard, rows: Shard) -> Shard:
    """These rows of each of a rank's experts, which lie one after another."""
    numbers = set(itertools.chain(*experts.ranges))
    return stacked(rows if number in numbers else Shard(rows.whole, ()) for number in range(experts.whole))
