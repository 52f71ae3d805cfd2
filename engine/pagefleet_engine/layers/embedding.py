"""Embeddings of tokens and positions, and the language-model head, which may share the tokens' matrix.

Shapes: T tokens, S sampled rows, D hidden size, V vocabulary, W the part of it that a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.sampling_rows import VocabularyPart
from torch import Tensor

from pagefleet_engine.gguf.blocks import BY_NAME, BlockType
from pagefleet_engine.layers.linear_kernel import LinearKernel
from pagefleet_engine.layers.matrix import Matrix, PlainMatrix, kernels_of, matrix_slots
from pagefleet_engine.layers.quantization.block_slots import ZEROS
from pagefleet_engine.layers.quantization.form import Form, form_of
from pagefleet_engine.layers.quantization_scheme import BlockScheme
from pagefleet_engine.layers.shard import own_share, shares
from pagefleet_engine.layers.token_ranks import token_ranks
from pagefleet_engine.layers.weight import Placement, Weight

_WHAT = "a vocabulary"


class Embedding:
    """Rows of a table by token id, times a scale. The table itself, which a head may share, is not scaled.

    Ranks divide the table; each looks up what is in its part, and gets the sum of its tokens.
    """

    __slots__ = ("_decode", "_followers", "_own", "_ranks", "_scale", "_slot", "_table_VD", "_tokens")

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement, scale: float = 1.0) -> None:
        """`placement.path` names the table; `scale` is rounded to the model's type, as it was when the model was
        trained."""
        self._table_VD: Tensor
        self._scale = torch.tensor(scale, dtype=placement.dtype).item()
        self._followers: list[Callable[[Tensor], None]] = []
        self._ranks, self._tokens = placement.tensor, token_ranks(placement)
        rows = own_share(vocab_size, self._ranks, _WHAT)
        (self._own,) = rows.ranges
        self._decode: Callable[[Tensor], Tensor] | None = None
        if (kind := _kept_blocks(hidden_size, placement)) is None:
            self._slot = Weight((rows,), hidden_size, placement, self._install)
        else:
            self._decode = partial(_decoded, kind=kind, dtype=placement.dtype, native=placement.native)
            num_bytes = hidden_size // kind.numbers * kind.num_bytes
            self._slot = Weight((rows,), num_bytes, placement, self._install, dtype=torch.uint8).holding(ZEROS)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield "weight", self._slot

    def share(self, follower: Callable[[Tensor], None]) -> None:
        """Also give the table to `follower` when it has arrived."""
        assert self._decode is None, "a head has the same blocks in a slot of its own"
        self._followers.append(follower)

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Integer [T] to a new tensor [T, D], or of this rank's tokens."""
        if self._ranks.size == 1:
            rows_TD = self._rows(token_ids_T)
        else:
            own_T = token_ids_T - self._own.start
            missing_T = (own_T < 0) | (own_T >= len(self._own))
            rows_TD = self._rows(own_T.masked_fill_(missing_T, 0))
            rows_TD = self._tokens.sum(rows_TD.masked_fill_(missing_T[:, None], 0.0))
        return rows_TD if self._scale == 1.0 else rows_TD.mul_(self._scale)

    def _rows(self, ids_T: Tensor) -> Tensor:
        rows_TD = F.embedding(ids_T, self._table_VD)
        return rows_TD if self._decode is None else self._decode(rows_TD)

    def _install(self, table_VD: Tensor) -> None:
        self._table_VD = table_VD
        for follower in self._followers:
            follower(table_VD)


def _kept_blocks(hidden_size: int, placement: Placement) -> BlockType | None:
    """The type of GGUF's blocks that the table at `placement.path` stays in; None: it is in numbers."""
    scheme = placement.scheme(1)
    if not isinstance(scheme, BlockScheme) or form_of(scheme, hidden_size, placement)[0] is not Form.NATIVE:
        return None
    return BY_NAME[scheme.types[0]]


def _decoded(bytes_TJ: Tensor, kind: BlockType, dtype: torch.dtype, native: Library | None) -> Tensor:
    """[T, D] of rows in blocks, uint8 [T, J]."""
    out_TD = torch.empty((len(bytes_TJ), bytes_TJ.shape[1] // kind.num_bytes * kind.numbers), dtype=dtype)
    kind.decode_into(out_TD, bytes_TJ.view(-1, kind.num_bytes), native)
    return out_TD


class PositionTable:
    """Learned vectors of positions; every rank has the table."""

    __slots__ = ("_offset", "_slot", "_table_PD")

    def __init__(self, num_rows: int, hidden_size: int, placement: Placement, offset: int = 0) -> None:
        """Position 0 is row `offset`."""
        self._table_PD: Tensor
        self._offset = offset
        self._slot = Weight((num_rows,), hidden_size, placement, self._install)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield "weight", self._slot

    def __call__(self, positions_T: Tensor) -> Tensor:
        """Integer [T] to a new tensor [T, D]."""
        return F.embedding(positions_T + self._offset if self._offset else positions_T, self._table_PD)

    def _install(self, table_PD: Tensor) -> None:
        self._table_PD = table_PD


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """What stands around a head's product."""

    bias: bool = False
    scale: float = 1.0
    """Multiplies the logits."""
    softcap: float | None = None
    """Then bounds them: cap * tanh(logit / cap)."""


PLAIN_HEAD = HeadForm()


class LMHead:
    """Logits over the vocabulary: each rank computes those of its tokens, and gets all of them.

    Given `tied_to`, it has no slot of its own and uses that embedding's table. Where matrices are packed, a tied head
    is a second copy of the table: it is read whole for every step, the embedding only row by row.
    """

    __slots__ = ("_bias_W", "_form", "_inputs", "_kernel", "_num_rows", "_slots", "part")

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        placement: Placement,
        *,
        tied_to: Embedding | None = None,
        form: HeadForm = PLAIN_HEAD,
        inputs: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`placement.path` names the head; `inputs` makes of hidden states what the matrix takes."""
        self._kernel: LinearKernel
        self._bias_W: Tensor | None = None
        self._inputs = inputs
        self._form = form
        ranks = placement.tensor
        widths = tuple(map(len, shares(vocab_size, ranks.size, _WHAT)))
        self._num_rows = widths[ranks.index]
        self.part = VocabularyPart(widths, ranks.index, ranks.all_gather) if ranks.size > 1 else None
        """The tokens that this rank has; None: all."""
        self._slots: dict[str, Weight] = {}
        if tied_to is None:
            rows = own_share(vocab_size, ranks, _WHAT)
            self._slots = matrix_slots(hidden_size, (rows,), placement, self._install)
        else:
            tied_to.share(lambda table_VD: self._install(PlainMatrix(table_VD, kernels_of(placement))))
        if form.bias:
            self._slots["bias"] = Weight((own_share(vocab_size, ranks, _WHAT),), None, placement, self._install_bias)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def __call__(self, hidden_SD: Tensor) -> Tensor:
        """[S, D] to [S, V], in the model's dtype."""
        logits_SW = self.own(hidden_SD)
        return logits_SW if self.part is None else self.part.gather(logits_SW, self.part.widths)

    def own(self, hidden_SD: Tensor) -> Tensor:
        """[S, W]: of this rank's tokens alone."""
        inputs_SD = hidden_SD if self._inputs is None else self._inputs(hidden_SD)
        logits_SW = self._kernel.linear(inputs_SD, self._bias_W)
        if self._form.scale != 1.0:
            logits_SW = logits_SW.mul_(self._form.scale)
        if (softcap := self._form.softcap) is None:
            return logits_SW
        return logits_SW.div_(softcap).tanh_().mul_(softcap)

    def _install(self, matrix: Matrix) -> None:
        self._kernel = matrix.kernel(0, self._num_rows)

    def _install_bias(self, bias_W: Tensor) -> None:
        self._bias_W = bias_W
