"""Attention over a plain list of keys and values per sequence: nothing paged, nothing shared, easy to believe.

Shapes: T tokens of the step, N query heads, K key/value heads, H head size, C context.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DenseSequence:
    """All keys and values of one sequence, by layer."""

    def __init__(self) -> None:
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Append, then attend from the last T positions."""
        if layer in self._kv:
            k_TKH = torch.cat((self._kv[layer][0], k_TKH))
            v_TKH = torch.cat((self._kv[layer][1], v_TKH))
        self._kv[layer] = (k_TKH, v_TKH)
        group = q_TNH.shape[1] // k_TKH.shape[1]
        k_CNH, v_CNH = k_TKH.repeat_interleave(group, 1), v_TKH.repeat_interleave(group, 1)
        scores_NTC = torch.einsum("tnh,cnh->ntc", q_TNH.float(), k_CNH.float()) * scale
        column = torch.arange(k_CNH.shape[0])
        row = column[-q_TNH.shape[0] :, None]
        hidden = column > row
        if window is not None:
            hidden |= column <= row - window
        weights_NTC = scores_NTC.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("ntc,cnh->tnh", weights_NTC, v_CNH.float()).to(q_TNH.dtype)


class DenseStep:
    """One step over several sequences; implements `AttentionStep`."""

    def __init__(self, rows: list[tuple[DenseSequence, int]]) -> None:
        """Each sequence with the number of its tokens in the step, in batch order."""
        self._rows: list[tuple[DenseSequence, slice]] = []
        start = 0
        for sequence, length in rows:
            self._rows.append((sequence, slice(start, start + length)))
            start += length

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `AttentionStep.attend`."""
        return torch.cat(
            [
                sequence.attend(layer, q_TNH[tokens], k_TKH[tokens], v_TKH[tokens], scale, window)
                for sequence, tokens in self._rows
            ]
        )
