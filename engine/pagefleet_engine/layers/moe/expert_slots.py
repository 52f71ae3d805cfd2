"""The slots of all experts' matrices: one by one, or stacked in one tensor, as checkpoints have them.

Shapes: E experts, I inputs, O outputs of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pagefleet_engine.layers.matrix import Matrix, matrix_slots
from pagefleet_engine.layers.shard import Shard, shard_of, stacked
from pagefleet_engine.layers.weight import Kept, Placement, Weight

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
        ModelLoadError: the matrices cannot be divided as they are quantized.
    """
    if isinstance(name, Stacked):
        rows, within = (_joined(outputs, name),), placement.within(name.name)
        stack = [matrix_slots(inputs, rows, within, partial(install, place)) for place in range(experts.size)]
        slot = _stacked_slot([slots["weight"] for slots in stack], experts, _order(outputs, name), placement)
        yield (name.name if name.transposed else f"{name.name}.weight"), slot
        return
    for place, number in enumerate(itertools.chain(*experts.ranges)):
        layer = name.format(number)
        slots = matrix_slots(inputs, outputs, placement.within(layer), partial(install, place))
        for kind, weight in slots.items():
            yield f"{layer}.{kind}", weight


def bias_slot(
    name: str | Stacked,
    experts: Shard,
    outputs: tuple[int | Shard, ...],
    placement: Placement,
    install: Callable[[Tensor], None],
) -> tuple[str, Weight]:
    """A slot for the tensor [E, O] of all experts' biases, and its name; arguments as in `expert_slots`."""
    assert isinstance(name, Stacked), "biases are stacked as matrices are"
    in_turns = _order(outputs, name).in_turns

    def take(bias_EO: Tensor) -> None:
        install(_gate_over_up(bias_EO.t()).t().contiguous() if in_turns else bias_EO)

    kept = Kept(placement.dtype, is_copy=in_turns)
    return f"{name.name}_bias", Weight((experts,), _joined(outputs, name), placement, take, kept=kept)


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
    """A slot for the tensor [E, O, I], or [E, I, O], that fills the experts' own, which are all alike and of one
    part."""
    one = slots[0]
    ((rows, columns),) = one.shards
    if order.transposed:
        rows, columns = columns, rows

    def divide(all_XY: Tensor) -> None:
        for weight, own in zip(slots, torch.split(all_XY, rows.size), strict=True):
            own_OI = own.t() if order.transposed else own
            weight.room(0).copy_(_gate_over_up(own_OI) if order.in_turns else own_OI)
            weight.arrived(0)

    kept = Kept(one.kept.dtype, is_copy=True)
    numbers = set(itertools.chain(*experts.ranges))
    own = stacked(rows if number in numbers else Shard(rows.whole, ()) for number in range(experts.whole))
    weight = Weight((own,), columns, placement, divide, dtype=one.dtype, kept=kept)
    return weight.stored_as((experts.whole, rows.whole, columns.whole))
