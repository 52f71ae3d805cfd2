"""The slots of all experts' matrices: one by one, or stacked in one tensor, as checkpoints have them.

Shapes: E experts, I inputs, O outputs of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagefleet_engine.layers.matrix import Matrix, matrix_slots
from pagefleet_engine.layers.shard import Shard, shard_of, stacked
from pagefleet_engine.layers.weight import Kept, Placement, Weight

InstallExpert = Callable[[int, Matrix], None]
"""Gets each expert's matrix, with the expert's number, once."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the parts of a layer of experts."""

    block: str = "mlp"
    router: str = "gate"
    gate_up: str = "experts.{}.gate_up_proj"
    """Without `{}` one tensor holds those of all experts."""
    down: str = "experts.{}.down_proj"
    shared: str = "shared_experts"


EXPERT_NAMES = ExpertNames()
"""The names in most families."""


def expert_slots(
    name: str,
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
    if "{}" not in name:
        if len(outputs) > 1:
            outputs = (stacked(map(shard_of, outputs)),)
        within = placement.within(name)
        stack = [matrix_slots(inputs, outputs, within, partial(install, place)) for place in range(experts.size)]
        yield f"{name}.weight", _stacked_slot([slots["weight"] for slots in stack], experts, placement)
        return
    for place, number in enumerate(itertools.chain(*experts.ranges)):
        layer = name.format(number)
        slots = matrix_slots(inputs, outputs, placement.within(layer), partial(install, place))
        for kind, weight in slots.items():
            yield f"{layer}.{kind}", weight


def _stacked_slot(slots: list[Weight], experts: Shard, placement: Placement) -> Weight:
    """A slot for the tensor [E, O, I] that fills the experts' own, which are all alike and of one part."""
    one = slots[0]
    ((rows, columns),) = one.shards

    def divide(all_XI: Tensor) -> None:
        for weight, own_OI in zip(slots, torch.split(all_XI, rows.size), strict=True):
            weight.room(0).copy_(own_OI)
            weight.arrived(0)

    kept = Kept(one.kept.dtype, is_copy=True)
    numbers = set(itertools.chain(*experts.ranges))
    own = stacked(rows if number in numbers else Shard(rows.whole, ()) for number in range(experts.whole))
    weight = Weight((own,), columns, placement, divide, dtype=one.dtype, kept=kept)
    return weight.stored_as((experts.whole, rows.whole, columns.whole))
