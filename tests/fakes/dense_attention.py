"""Attention over a plain list of keys and values per sequence: nothing paged, nothing shared, easy to believe.

Shapes: T tokens of the step, N query heads, K key/value heads, H head size, C context.
"""

from __future__ import annotations

import torch
from pagefleet_engine.attention.backend import AttentionSpec, Pages
from pagefleet_engine.models.model import Model
from torch import Tensor


class DenseSequence:
    """All keys and values of one sequence, by layer."""

    def __init__(self) -> None:
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """Put keys and values after those that are there; those of latents are made at once."""
        layer, latent = spec.layer, spec.latent
        if latent is not None:
            made_TNX = torch.einsum("tr,nxr->tnx", k_TKH[:, 0, : latent.rank], latent.made_NXR)
            shared_TNR = k_TKH[..., latent.rank :].expand(-1, made_TNX.shape[1], -1)
            k_TKH = torch.cat((made_TNX[..., : latent.nope_dim], shared_TNR), -1)
            v_TKH = made_TNX[..., latent.nope_dim :]
        assert v_TKH is not None, "all but latents have values"
        if layer in self._kv:
            k_TKH = torch.cat((self._kv[layer][0], k_TKH))
            v_TKH = torch.cat((self._kv[layer][1], v_TKH))
        self._kv[layer] = (k_TKH, v_TKH)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """Attend from the last T positions."""
        k_CKH, v_CKH = self._kv[spec.layer]
        group = q_TNH.shape[1] // k_CKH.shape[1]
        k_CNH, v_CNH = k_CKH.repeat_interleave(group, 1), v_CKH.repeat_interleave(group, 1)
        scores_NTC = torch.einsum("tnh,cnh->ntc", q_TNH.float(), k_CNH.float()) * spec.scale
        if spec.softcap is not None:
            scores_NTC = spec.softcap * torch.tanh(scores_NTC / spec.softcap)
        column = torch.arange(k_CNH.shape[0])
        row = column[-q_TNH.shape[0] :, None]
        if spec.alibi_slopes_N is not None:
            scores_NTC -= spec.alibi_slopes_N[:, None, None] * (row - column)
        hidden = column > row
        if spec.window is not None:
            hidden |= column <= row - spec.window
        if spec.chunk is not None:
            hidden |= column < row // spec.chunk * spec.chunk
        scores_NTC = scores_NTC.masked_fill(hidden, -torch.inf)
        if spec.sinks_N is not None:
            sinks_NT1 = spec.sinks_N[:, None, None].expand(*scores_NTC.shape[:2], 1)
            scores_NTC = torch.cat((scores_NTC, sinks_NT1), -1)
        weights_NTC = scores_NTC.softmax(-1)[..., : len(column)]
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

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See `AttentionStep.write`."""
        for sequence, tokens in self._rows:
            sequence.append(spec, k_TKH[tokens], None if v_TKH is None else v_TKH[tokens])

    def pages(self, spec: AttentionSpec) -> Pages:
        """There are none."""
        raise AssertionError("this attention has no pages")

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See `AttentionStep.attend`."""
        return torch.cat([sequence.attend(spec, q_TNH[tokens]) for sequence, tokens in self._rows])


def logits(model: Model, length: int = 12) -> Tensor:
    """Of tokens 3, 4, 5 and so on, computed in one step."""
    with torch.inference_mode():
        tokens = torch.arange(3, 3 + length)
        return model.logits(model.forward(tokens, torch.arange(length), DenseStep([(DenseSequence(), length)])))
