"""How rows get to the ranks whose experts they go to, and their results back.

Tensor ranks have all rows of their copy of the model: each has a part of the width of every expert, or with expert
parallelism some experts whole, and gives its part of the sums. Data ranks have rows of their own.

Shapes: T tokens of the step, R rows that this rank's experts see, K experts of a row, E experts, D hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pagefleet_engine.layers.moe.routing import NOWHERE, Routes
from pagefleet_engine.layers.weight import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """Rows where their experts are."""

    x_RD: Tensor
    routes: Routes
    """By the experts' numbers on this rank."""
    finalize: Callable[[Tensor], Tensor]
    """From this rank's sums [R, D], which may be overwritten, to what the tensor ranks of this copy have still to add
    up, [T, D]. Every rank of the exchange calls it."""


class Exchange(Protocol):
    """A way between ranks."""

    def prepare(self, x_TD: Tensor, routes: Routes) -> Delivery:
        """Rows for this rank's experts, from all ranks; every one of these calls it, if with no rows."""
        ...


class WidthExchange:
    """Every rank has a part of each expert's width, and sees all rows."""

    def prepare(self, x_TD: Tensor, routes: Routes) -> Delivery:
        """See Exchange."""
        return Delivery(x_TD, routes, _as_they_are)


class TensorExchange:
    """Tensor ranks have whole experts, and see all rows: other ranks' experts are skipped."""

    __slots__ = ("_own",)

    def __init__(self, own: range) -> None:
        """`own`: the experts of this rank."""
        self._own = own

    def prepare(self, x_TD: Tensor, routes: Routes) -> Delivery:
        """See Exchange."""
        return Delivery(x_TD, on_rank(routes, self._own), _as_they_are)


def on_rank(routes: Routes, own: range) -> Routes:
    """The same by the numbers of a rank's own experts; NOWHERE in the place of others."""
    local_TK = routes.experts_TK - own.start
    return Routes(routes.weights_TK, local_TK.masked_fill_((local_TK < 0) | (local_TK >= len(own)), NOWHERE))


def _as_they_are(sums_RD: Tensor) -> Tensor:
    return sums_RD


def expert_ranges(num_experts: int, num_ranks: int) -> list[range]:
    """Each rank's experts: as many, or one more for some."""
    ends = [num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def own_experts(num_experts: int, placement: Placement) -> tuple[range, Exchange]:
    """A rank's experts of a layer, and how rows get to them."""
    if not placement.expert_parallel:
        return range(num_experts), WidthExchange()
    own = expert_ranges(num_experts, placement.tensor.size)[placement.tensor.index]
    return own, TensorExchange(own)
