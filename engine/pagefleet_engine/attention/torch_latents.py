"""Attention over gathered latents (MLA) on a CPU, in the form that costs a group of rows least.

Absorbed: queries are taken to the latents' space, and what comes out of it to values: nothing is made for the context,
and each pair of query and token costs more. Made: keys and values are made from the context's latents, a part of it at
a time, and attended to as if they had been kept.

Shapes: S rows of a group, Q queries of a row (padded), q those of a block, C context (padded), c a part of it, N heads,
H size of a query, R rank, V size of a value, W width of what is kept of a token; X for products of these.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, LatentMaps
from pagefleet_engine.attention.padded_groups import QUERY_BLOCK, PaddedGroup, QueryBlock
from pagefleet_engine.attention.torch_block import attend_block

MADE_NUMBERS = 2**24
"""Of keys and values that are made at a time: so much stays in the caches, and long contexts take little memory."""


def attend_latents(
    group: PaddedGroup, latents_SCW: Tensor, q_XNH: Tensor, spec: AttentionSpec, maps: LatentMaps
) -> Tensor:
    """Attend the group's padded queries [S * Q, N, H]; returns [S * Q, N, V], contiguous."""
    context = latents_SCW.shape[1]
    if is_absorbed(group.query_len, context, q_XNH.shape[2], maps):
        return _attend_absorbed(group, latents_SCW, q_XNH, spec, maps)
    return _attend_made(group, latents_SCW, q_XNH, spec, maps)


def is_absorbed(query_len: int, context: int, head_dim: int, maps: LatentMaps, most: float = 1.0) -> bool:
    """Whether a head's products in the latents' space are fewer than `most` times those with keys and values made."""
    widths = maps.rank * (maps.nope_dim + maps.value_dim)
    absorbed = query_len * (widths + context * (2 * maps.rank + head_dim - maps.nope_dim))
    return absorbed < most * context * (widths + query_len * (head_dim + maps.value_dim))


def _attend_absorbed(
    group: PaddedGroup, latents_SCW: Tensor, q_XNH: Tensor, spec: AttentionSpec, maps: LatentMaps
) -> Tensor:
    rows, queries, num_heads = group.num_rows, group.query_len, q_XNH.shape[1]
    q_NSQW = maps.absorb(q_XNH).view(num_heads, rows, queries, -1)
    q_SQ1NW = q_NSQW.permute(1, 2, 0, 3).unsqueeze(2)
    values_SCR = latents_SCW[..., : maps.rank]
    parts = [
        attend_block(q_SQ1NW[:, block.start : block.stop], latents_SCW, values_SCR, block, spec)
        for block in group.blocks
    ]
    sums_SQ1NR = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    sums_NXR = sums_SQ1NR.squeeze(2).permute(2, 0, 1, 3).reshape(num_heads, rows * queries, maps.rank)
    return _scaled(maps.values(sums_NXR), spec)


def _attend_made(
    group: PaddedGroup, latents_SCW: Tensor, q_XNH: Tensor, spec: AttentionSpec, maps: LatentMaps
) -> Tensor:
    rows, context, _ = latents_SCW.shape
    num_heads, head_dim = q_XNH.shape[1:]
    q_SNQH = q_XNH.view(rows, group.query_len, num_heads, head_dim).transpose(1, 2)
    scale = spec.scale * spec.k_scale
    sums = [_BlockSums(q_SNQH[:, :, block.start : block.stop], block, scale) for block in group.blocks]
    size = max(QUERY_BLOCK, MADE_NUMBERS // (rows * num_heads * (head_dim + maps.value_dim)))
    for first in range(0, context, size):
        keys_SNcH, values_SNcV = _make(latents_SCW[:, first : first + size], maps)
        for block in sums:
            block.add(keys_SNcH, values_SNcV, first)
    out_SNQV = torch.cat([block.out_SNqV for block in sums], dim=2)
    out_SQNV = out_SNQV.transpose(1, 2).contiguous()
    return _scaled(out_SQNV.view(-1, num_heads, maps.value_dim), spec)


def _make(latents_ScW: Tensor, maps: LatentMaps) -> tuple[Tensor, Tensor]:
    """Keys [S, N, c, H] and values [S, N, c, V] of a part of the context."""
    made_ScX = F.linear(latents_ScW[..., : maps.rank], maps.made_NXR.flatten(0, 1))
    made_SNcX = made_ScX.view(*made_ScX.shape[:2], *maps.made_NXR.shape[:2]).transpose(1, 2)
    shared_SNcR = latents_ScW[:, None, :, maps.rank :].expand(-1, made_SNcX.shape[1], -1, -1)
    keys_SNcH = torch.cat((made_SNcX[..., : maps.nope_dim], shared_SNcR), dim=-1)
    return keys_SNcH, made_SNcX[..., maps.nope_dim :]


class _BlockSums:
    """Attention of one block of queries, over parts of the context that come one after another."""

    __slots__ = ("_block", "_log_sums_SNq1", "_q_SNqH", "_scale", "out_SNqV")

    def __init__(self, q_SNqH: Tensor, block: QueryBlock, scale: float) -> None:
        self._q_SNqH, self._block, self._scale = q_SNqH, block, scale
        self._log_sums_SNq1: Tensor
        self.out_SNqV: Tensor
        """Over what has come; every block sees something of the first part."""

    def add(self, keys_SNcH: Tensor, values_SNcV: Tensor, first: int) -> None:
        """Take in the part of the context that begins at column `first`."""
        block = self._block
        start, end = max(first, block.first), min(first + keys_SNcH.shape[2], block.end)
        if start >= end:
            return
        own = slice(start - first, end - first)
        scores_SNqc = torch.matmul(self._q_SNqH, keys_SNcH[:, :, own].transpose(2, 3)).mul_(self._scale)
        masked = max(start, block.masked_from)
        if block.bias_SQC is not None and masked < end:
            hidden = slice(masked - block.masked_from, end - block.masked_from)
            scores_SNqc[..., masked - start :] += block.bias_SQC[:, 0, ..., hidden]
        values_SNcV = values_SNcV[:, :, own]
        if start == block.first and end == block.end:
            self.out_SNqV = torch.matmul(scores_SNqc.softmax(-1), values_SNcV)
            return
        log_sums_SNq1 = scores_SNqc.float().logsumexp(-1, keepdim=True)
        # A row that is shorter than others of its group may see nothing of this part.
        weights_SNqc = scores_SNqc.softmax(-1).masked_fill_(log_sums_SNq1 == -torch.inf, 0.0)
        self._merge(torch.matmul(weights_SNqc, values_SNcV), log_sums_SNq1, is_first=start == block.first)

    def _merge(self, out_SNqV: Tensor, log_sums_SNq1: Tensor, *, is_first: bool) -> None:
        if is_first:
            self.out_SNqV, self._log_sums_SNq1 = out_SNqV, log_sums_SNq1
            return
        share = torch.sigmoid(log_sums_SNq1 - self._log_sums_SNq1).to(out_SNqV.dtype)
        self.out_SNqV = torch.lerp(self.out_SNqV, out_SNqV, share)
        self._log_sums_SNq1 = torch.logaddexp(self._log_sums_SNq1, log_sums_SNq1)


def _scaled(out_XNV: Tensor, spec: AttentionSpec) -> Tensor:
    """Values of a pool in 8 bits, which were made from latents as they are stored."""
    return out_XNV if spec.k_scale == 1.0 else out_XNV.mul_(spec.k_scale)
