"""Moves experts between ranks while they serve, so that none has more to compute than others (EPLB).

Every so many steps ranks add up what each expert was wanted in a window of steps, and each works out by itself, from
the same numbers, what all should hold. Then before each step one layer's experts move, until all have: no step waits
for more than one. Ranks of an expert group compute the same steps, so they do all this at the same one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagefleet_engine.core.step import ExpertLoad
from pagefleet_engine.layers.moe.balanced import BalancedExperts
from pagefleet_engine.layers.moe.expert_places import busiest_over_mean, place_experts, rank_loads
from pagefleet_engine.ranks.group import RankGroup

_PARTS = 8
"""Of a window: what is older than it goes in these."""
_log = logging.getLogger(__name__)


class ExpertBalancer:
    """One rank's side; `before_step` is called before every step by all ranks.

    Args:
        layers: with experts, of this rank's stage.
        ranks: that share them out.
        copies: of the model, among which ranks count rows of their own; all of a copy count the same.
        window: steps whose load counts.
        interval: steps from one plan to the next; more where there are more layers.

    Attributes:
        load: what ranks were wanted; None before it was counted, and in all copies but the first.
    """

    def __init__(
        self, layers: Sequence[BalancedExperts], ranks: RankGroup, copies: RankGroup, *, window: int, interval: int
    ) -> None:
        self._layers, self._ranks, self._copies = layers, ranks, copies
        self._part, self._interval = max(1, window // _PARTS), max(interval, len(layers) + 1)
        self.load: ExpertLoad | None = None
        self._rank_tokens = [0.0] * ranks.size
        self._seen: deque[Tensor] = deque(maxlen=max(1, window // self._part))
        self._steps = 0
        self._moves: Iterator[None] = iter(())

    @property
    def needed_bytes(self) -> int:
        """What empty slots of this rank will take, and for a while what moves."""
        rank = self._ranks.index
        spare = sum(layer.spare_bytes(rank) for layer in self._layers)
        return spare + max(layer.move_bytes(rank) for layer in self._layers)

    @torch.inference_mode()
    def start(self) -> None:
        """Forget what no request wanted: rehearsals have counted."""
        for layer in self._layers:
            layer.map.wanted_E.zero_()

    @torch.inference_mode()
    def before_step(self) -> None:
        """Count a step, and do what is due."""
        self._steps += 1
        if self._steps % self._part == 0:
            self._count()
        if self._steps % self._interval == 0:
            self._moves = self._rebalance()
        next(self._moves, None)

    def _count(self) -> None:
        """Take in what all copies wanted in a part of the window."""
        part_LE = self._copies.all_reduce(torch.stack([layer.map.wanted_E for layer in self._layers])).cpu()
        self._seen.append(part_LE)
        for layer in self._layers:
            layer.map.wanted_E.zero_()
        if self._copies.index > 0:
            return
        ratios = []
        for layer, part_E, load_E in zip(self._layers, part_LE.tolist(), self._window().tolist(), strict=True):
            slots, held = layer.map.slots, layer.map.held
            ratios.append(busiest_over_mean(load_E, slots, held))
            for rank, tokens in enumerate(rank_loads(part_E, slots, held)):
                self._rank_tokens[rank] += tokens
        self.load = ExpertLoad(tuple(self._rank_tokens), sum(ratios) / len(ratios))

    def _window(self) -> Tensor:
        return torch.stack(list(self._seen)).sum(0)

    def _rebalance(self) -> Iterator[None]:
        """A layer at a time."""
        if not self._seen:
            return
        load_LE = self._window()
        before, after, moved = [], [], 0
        for layer, load_E in zip(self._layers, load_LE.tolist(), strict=True):
            slots, held = layer.map.slots, layer.map.held
            found = place_experts(load_E, slots, held)
            before.append(busiest_over_mean(load_E, slots, held))
            after.append(busiest_over_mean(load_E, slots, found))
            changed = sum(one != other for one, other in zip(held, found, strict=True))
            if changed:
                layer.move(found, self._ranks)
                moved += changed
            yield
        _log.info(
            "experts: the busiest rank had %.2f of the mean (%.2f in the worst layer), %.2f after %d of %d slots "
            "changed",
            sum(before) / len(before),
            max(before),
            sum(after) / len(after),
            moved,
            sum(len(layer.map.held) for layer in self._layers),
        )
