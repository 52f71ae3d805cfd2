"""Token embedding and language-model head, which may share one matrix.

Shapes: T tokens, S sampled rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_engine.layers.linear_kernel import LinearKernel
from pagefleet_engine.layers.matrix import Matrix, PlainMatrix, matrix_slots
from pagefleet_engine.layers.weight import Placement, Weight


class Embedding:
    """Rows of a table by token id, times a scale. The table itself, which a head may share, is not scaled."""

    __slots__ = ("_followers", "_scale", "_slot", "_table_VD")

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement, scale: float = 1.0) -> None:
        """`scale` is rounded to the model's type, as it was when the model was trained."""
        self._table_VD: Tensor
        self._scale = torch.tensor(scale, dtype=placement.dtype).item()
        self._followers: list[Callable[[Tensor], None]] = []
        self._slot = Weight((vocab_size,), hidden_size, placement, self._install)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield "weight", self._slot

    def share(self, follower: Callable[[Tensor], None]) -> None:
        """Also give the table to `follower` when it has arrived."""
        self._followers.append(follower)

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Integer [T] to a new tensor [T, D]."""
        rows_TD = F.embedding(token_ids_T, self._table_VD)
        return rows_TD if self._scale == 1.0 else rows_TD.mul_(self._scale)

    def _install(self, table_VD: Tensor) -> None:
        self._table_VD = table_VD
        for follower in self._followers:
            follower(table_VD)


class LMHead:
    """Logits over the vocabulary. Given `tied_to`, it has no slot of its own and uses that embedding's table.

    Where matrices are packed, a tied head is a second copy of the table: it is read whole for every step, the
    embedding only row by row.
    """

    __slots__ = ("_kernel", "_slots", "_softcap", "_vocab_size")

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        placement: Placement,
        *,
        tied_to: Embedding | None = None,
        softcap: float | None = None,
    ) -> None:
        """`placement.path` names the head; `softcap` bounds the logits: cap * tanh(logit / cap)."""
        self._kernel: LinearKernel
        self._softcap = softcap
        self._vocab_size = vocab_size
        self._slots: dict[str, Weight] = {}
        if tied_to is None:
            self._slots = matrix_slots(hidden_size, (vocab_size,), placement, self._install)
        else:
            tied_to.share(lambda table_VD: self._install(PlainMatrix(table_VD, placement.traceable)))

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def __call__(self, hidden_SD: Tensor) -> Tensor:
        """[S, D] to [S, V], in the model's dtype."""
        logits_SV = self._kernel.linear(hidden_SD, None)
        if self._softcap is None:
            return logits_SV
        return logits_SV.div_(self._softcap).tanh_().mul_(self._softcap)

    def _install(self, matrix: Matrix) -> None:
        self._kernel = matrix.kernel(0, self._vocab_size)
