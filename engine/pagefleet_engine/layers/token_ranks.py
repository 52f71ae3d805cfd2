"""Which of a step's tokens a rank adds up and normalises: all of them, or with sequence parallelism its own alone
(Korthikanti et al., arXiv 2205.05198). Products need all tokens, so there what is normalised is gathered before them.

Shapes: T tokens of the step, U those that a rank has of the residual stream, D hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from pagefleet_kernels.quantize import Activations, QuantizeSpec
from torch import Tensor

from pagefleet_engine.layers.norm import Norm, Residual
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.ranks.group import RankGroup, own_rows, rows_each


class TokenRanks(Protocol):
    """Ranks that share a residual stream."""

    @property
    def have_all(self) -> bool:
        """Whether each has all tokens, so U is T."""
        ...

    def sum(self, parts_TD: Tensor) -> Tensor:
        """From each rank's part of a sum to the sum of the rank's tokens, [U, D]; the part may be overwritten."""
        ...

    def own(self, hidden_TD: Tensor) -> Tensor:
        """The rank's tokens of all, [U, D]; may be a view."""
        ...

    def gather(self, own_UD: Tensor, num_tokens: int) -> Tensor:
        """All tokens of all ranks' own, [T, D]."""
        ...

    def read(
        self, norm: Norm, stream: Residual, num_tokens: int, rounding: QuantizeSpec | None = None
    ) -> tuple[Tensor, Activations]:
        """`norm.read`: the total of the rank's tokens [U, D], and the norm of all [T, D]."""
        ...


class AllTokens:
    """Implements `TokenRanks`: each has the whole stream, with the same bits."""

    __slots__ = ("_ranks",)
    have_all = True

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def sum(self, parts_TD: Tensor) -> Tensor:
        """See TokenRanks."""
        return self._ranks.all_reduce(parts_TD)

    def own(self, hidden_TD: Tensor) -> Tensor:
        """See TokenRanks."""
        return hidden_TD

    def gather(self, own_UD: Tensor, num_tokens: int) -> Tensor:
        """See TokenRanks."""
        return own_UD

    def read(
        self, norm: Norm, stream: Residual, num_tokens: int, rounding: QuantizeSpec | None = None
    ) -> tuple[Tensor, Activations]:
        """See TokenRanks."""
        return norm.read(stream, rounding)


class OwnTokens:
    """Implements `TokenRanks`: each has consecutive tokens; the last ones zeros behind them, up to as many as others.

    A product rounds its inputs itself, once they are gathered.
    """

    __slots__ = ("_ranks",)
    have_all = False

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def sum(self, parts_TD: Tensor) -> Tensor:
        """See TokenRanks."""
        return self._ranks.reduce_scatter(parts_TD)

    def own(self, hidden_TD: Tensor) -> Tensor:
        """See TokenRanks."""
        num_tokens, size = len(hidden_TD), self._ranks.size
        own = own_rows(num_tokens, size, self._ranks.index)
        missing = rows_each(num_tokens, size) - len(own)
        own_UD = hidden_TD[own.start : own.stop]
        return F.pad(own_UD, (0, 0, 0, missing)) if missing else own_UD

    def gather(self, own_UD: Tensor, num_tokens: int) -> Tensor:
        """See TokenRanks."""
        return self._ranks.gather_rows(own_UD)[:num_tokens]

    def read(
        self, norm: Norm, stream: Residual, num_tokens: int, rounding: QuantizeSpec | None = None
    ) -> tuple[Tensor, Activations]:
        """See TokenRanks."""
        total_UD, normed_UD = norm.read(stream)
        assert isinstance(normed_UD, Tensor), "nothing is rounded unless asked for"
        return total_UD, self.gather(normed_UD, num_tokens)


def token_ranks(placement: Placement) -> TokenRanks:
    """Of ranks that are placed so."""
    return OwnTokens(placement.tensor) if placement.sequence_parallel else AllTokens(placement.tensor)
