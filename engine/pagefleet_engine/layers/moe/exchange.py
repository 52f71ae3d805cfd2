"""How rows get to the ranks whose experts they go to, and their results back.

Tensor ranks have all rows of their copy of the model: each has a part of the width of every expert, or with expert
parallelism some experts whole, and gives its part of the sums. Data ranks have rows of their own, which go to the
copies that have their experts.

Shapes: T tokens of the step, R rows that this rank's experts see, K experts of a row, D hidden size, N ranks that
exchange rows, S rows that this one sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_engine.layers.moe.expert_map import ExpertMap
from pagefleet_engine.layers.moe.expert_places import slot_ranges
from pagefleet_engine.layers.moe.routing import NOWHERE, Routes
from pagefleet_engine.layers.shard import Shard
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.ranks.group import RankGroup
from pagefleet_engine.ranks.turns import Turns


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
        """`own`: the slots of this rank."""
        self._own = own

    def prepare(self, x_TD: Tensor, routes: Routes) -> Delivery:
        """See Exchange."""
        return Delivery(x_TD, on_rank(routes, self._own), _as_they_are)


class GatherExchange:
    """Every rank gets the rows of all: its own experts compute theirs, and each rank gets the sums of its own rows.

    Ranks have as many rows as the one with the most, those behind their own go nowhere.
    """

    __slots__ = ("_own", "_ranks")

    def __init__(self, ranks: RankGroup, own: range) -> None:
        """`own`: the slots of this rank."""
        self._ranks, self._own = ranks, own

    def prepare(self, x_TD: Tensor, routes: Routes) -> Delivery:
        """See Exchange."""
        num_tokens = len(x_TD)
        most = int(self._ranks.all_reduce(torch.tensor([num_tokens]), "max"))
        if not most:
            return Delivery(x_TD, on_rank(routes, self._own), _as_they_are)
        missing = most - num_tokens
        # Weights of rows that go nowhere are no numbers, and nobody reads what becomes of them.
        packed = F.pad(_packed(routes), (0, 0, 0, missing), value=NOWHERE)
        x_RD = self._ranks.gather_rows(F.pad(x_TD, (0, 0, 0, missing)).contiguous())
        all_routes = on_rank(_unpacked(self._ranks.gather_rows(packed)), self._own)
        return Delivery(x_RD, all_routes, lambda sums_RD: self._ranks.reduce_scatter(sums_RD)[:num_tokens])


class AllToAllExchange:
    """A rank gets the rows that some of its experts are wanted for, and sends each back to where it came from, summed
    over these. How many there are the host has to know."""

    __slots__ = ("_own", "_ranges", "_ranks")

    def __init__(self, ranks: RankGroup, slots: Sequence[range], device: torch.device) -> None:
        """`slots`: of each rank."""
        self._ranks, self._own = ranks, slots[ranks.index]
        ranges = [(own.start, own.stop) for own in slots]
        self._ranges = torch.tensor(ranges, dtype=torch.int32, device=device)[..., None, None]

    def prepare(self, x_TD: Tensor, routes: Routes) -> Delivery:
        """See Exchange."""
        first, stop = self._ranges.unbind(1)
        wanted_NT = ((routes.experts_TK >= first) & (routes.experts_TK < stop)).any(-1)
        rank_S, token_S = wanted_NT.nonzero(as_tuple=True)
        counts_N = torch.bincount(rank_S.cpu(), minlength=self._ranks.size)
        rows = self._ranks.gather_rows(counts_N[None]).tolist()
        back = list(zip(*rows, strict=True))
        x_RD = self._ranks.all_to_all(x_TD[token_S], rows)
        came = _unpacked(self._ranks.all_to_all(_packed(routes)[token_S], rows))

        def finalize(sums_RD: Tensor) -> Tensor:
            parts_SD = self._ranks.all_to_all(sums_RD, back)
            sums_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
            return sums_TD.index_add_(0, token_S, parts_SD.float()).to(x_TD.dtype)

        return Delivery(x_RD, on_rank(came, self._own), finalize)


class ExchangeOfHalves:
    """A half of a step computes while rows of the other travel, each half's through ranks of their own: nothing says
    whose come first."""

    __slots__ = ("_of_halves", "_turns")

    def __init__(self, turns: Turns, of_halves: tuple[Exchange, Exchange]) -> None:
        """The first of these also for steps that are whole."""
        self._turns, self._of_halves = turns, of_halves

    def prepare(self, x_TD: Tensor, routes: Routes) -> Delivery:
        """See Exchange."""
        with self._turns.away():
            sent = self._of_halves[self._turns.half].prepare(x_TD, routes)

        def finalize(sums_RD: Tensor) -> Tensor:
            with self._turns.away():
                return sent.finalize(sums_RD)

        return replace(sent, finalize=finalize)


def _packed(routes: Routes) -> Tensor:
    """In one int32 tensor [T, 2K], for one message."""
    return torch.cat([routes.weights_TK.contiguous().view(torch.int32), routes.experts_TK], -1)


def _unpacked(packed: Tensor) -> Routes:
    weights_TK, experts_TK = packed.chunk(2, -1)
    return Routes(weights_TK.contiguous().view(torch.float32), experts_TK)


def on_rank(routes: Routes, own: range) -> Routes:
    """The same by the numbers of a rank's own experts; NOWHERE in the place of others."""
    local_TK = routes.experts_TK - own.start
    return Routes(routes.weights_TK, local_TK.masked_fill_((local_TK < 0) | (local_TK >= len(own)), NOWHERE))


def _as_they_are(sums_RD: Tensor) -> Tensor:
    return sums_RD


@dataclass(frozen=True, slots=True, eq=False)
class OwnExperts:
    """What a rank has of a layer's experts."""

    experts: Shard
    """Those that it reads."""
    num_slots: int
    """As many, or more where experts move."""
    exchange: Exchange
    """Between slots, which are numbered over all ranks."""
    map: ExpertMap | None = None
    """Where experts move; else an expert's slot is its number."""


def own_experts(num_experts: int, placement: Placement) -> OwnExperts:
    """Of the rank that is placed so."""
    if not placement.expert_parallel:
        return OwnExperts(Shard(num_experts, (range(num_experts),)), num_experts, WidthExchange())
    tensor, data, balance = placement.tensor, placement.data, placement.balance
    rank, size = data.index * tensor.size + tensor.index, data.size * tensor.size
    slots = slot_ranges(num_experts, 0 if balance is None else balance.num_redundant, size)
    own, of_copies = slots[rank], slots[tensor.index :: tensor.size]
    exchange: Exchange = TensorExchange(own)
    if data.size > 1:
        exchange = _between_copies(data, own, of_copies, placement)
        if (halves := placement.halves) is not None:
            of_second = _between_copies(halves.data, own, of_copies, placement)
            exchange = ExchangeOfHalves(halves.turns, (exchange, of_second))
    experts = Shard(num_experts, (slot_ranges(num_experts, 0, size)[rank],))
    moving = None if balance is None else ExpertMap(num_experts, slots, placement.device)
    return OwnExperts(experts, len(own), exchange, moving)


def _between_copies(data: RankGroup, own: range, of_copies: Sequence[range], placement: Placement) -> Exchange:
    if placement.all2all_backend == "allgather_reducescatter":
        return GatherExchange(data, own)
    return AllToAllExchange(data, of_copies, placement.device)
