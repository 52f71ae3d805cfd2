"""Experts that move between ranks: as bytes, each with all that is stored of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagefleet_engine.layers.moe.expert_map import ExpertMap
from pagefleet_engine.layers.moe.expert_places import EMPTY
from pagefleet_engine.layers.moe.experts import Experts
from pagefleet_engine.ranks.group import RankGroup

_Move = tuple[int, int, int, int]
"""Sender and receiver, and slot of each."""


@dataclass(frozen=True, slots=True, eq=False)
class BalancedExperts:
    """Experts of a layer, in slots of several ranks."""

    map: ExpertMap
    experts: Experts
    """This rank's, by the numbers of its own slots."""
    bytes_each: int
    """Of memory that an expert takes, with what its products make of it."""
    has_room: bool
    """Whether empty slots have their memory from the start."""

    def spare_bytes(self, rank: int) -> int:
        """What the empty slots of this rank will take."""
        if self.has_room:
            return 0
        return self.bytes_each * sum(self.map.held[slot] == EMPTY for slot in self.map.slots[rank])

    def move_bytes(self, rank: int) -> int:
        """The most that a move holds for a while: what comes, what a round sends, twice, and what is installed."""
        return (len(self.map.slots[rank]) + 2 * len(self.map.slots) + 1) * self.bytes_each

    def move(self, held: Sequence[int], ranks: RankGroup) -> None:
        """Have the slots of all ranks hold these; every rank calls it, with the same, and between steps.

        Nothing is installed before all has come: a slot may be the source of a later round.
        """
        moves, came = self._moves(held), list[tuple[int, Tensor]]()
        for start in range(0, len(moves), ranks.size):
            came += self._exchange(moves[start : start + ranks.size], ranks)
        for slot, packed in came:
            self._unpack(slot, packed)
        self.map.hold(held)

    def _exchange(self, moves: Sequence[_Move], ranks: RankGroup) -> Iterator[tuple[int, Tensor]]:
        """Send and receive the experts of some moves; gives each that came here, with its slot."""
        size, first = ranks.size, self.map.slots[ranks.index].start
        rows = [[0] * size for _ in range(size)]
        for sender, receiver, _, _ in moves:
            rows[sender][receiver] += 1
        own = [self._packed(source - first) for sender, _, source, _ in moves if sender == ranks.index]
        came = ranks.all_to_all(torch.stack(own) if own else self._nothing(), rows)
        into = [target - first for _, receiver, _, target in moves if receiver == ranks.index]
        return zip(into, came, strict=True)

    def _moves(self, held: Sequence[int]) -> list[_Move]:
        """Sender and receiver, and slot of each, in their order: from a slot of the same rank where there is one, else
        slots of the expert take turns."""
        rank_of = {slot: rank for rank, own in enumerate(self.map.slots) for slot in own}
        sources: dict[int, list[int]] = {}
        for slot, expert in enumerate(self.map.held):
            sources.setdefault(expert, []).append(slot)
        moves = []
        for target, expert in enumerate(held):
            if expert in (EMPTY, self.map.held[target]):
                continue
            near = [slot for slot in sources[expert] if rank_of[slot] == rank_of[target]]
            source = near[0] if near else sources[expert][target % len(sources[expert])]
            moves.append((rank_of[source], rank_of[target], source, target))
        return sorted(moves)

    def _packed(self, slot: int) -> Tensor:
        """All that is stored of the expert in a slot of this rank, uint8."""
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in self.experts.stored(slot)])

    def _nothing(self) -> Tensor:
        """No expert, of as many bytes as any."""
        stored = self.experts.stored(0)
        return stored[0].new_empty(0, sum(part.nbytes for part in stored), dtype=torch.uint8)

    def _unpack(self, slot: int, packed: Tensor) -> None:
        """Install an expert, of the forms of the one that the rank's first slot was loaded with."""
        self.experts.take(slot, list(_parts(packed, self.experts.stored(0))))


def _parts(packed: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors of the same shapes and types; each a copy, as types have to lie at multiples of their size."""
    sizes = [one.numel() * one.itemsize for one in like]
    for one, part in zip(like, packed.split_with_sizes(sizes), strict=True):
        yield part.clone().view(one.dtype).view(one.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Balance:
    """Implements `MovingExperts`: all of a rank's."""

    num_redundant: int
    layers: list[BalancedExperts] = field(default_factory=list)

    def add(self, layer: object) -> None:
        """See MovingExperts."""
        assert isinstance(layer, BalancedExperts), "there is no other kind"
        self.layers.append(layer)
