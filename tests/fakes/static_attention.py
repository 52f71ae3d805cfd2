"""Paged attention that a graph can hold: every shape follows from the batch's sizes, nothing is read by the host.

Slow and plain. What it returns for padding is not a number, so that a test sees whom padding reaches.

Shapes: T tokens, S sequences, C context, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry, Pages
from pagefleet_engine.core.kv_groups import KVGroups
from torch import Tensor


class StaticAttention:
    """Implements `AttentionBackend`. One slot more than there are takes what padding writes."""

    def __init__(self, groups: KVGroups, num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> None:
        num_slots = num_blocks * block_size
        generator = torch.Generator().manual_seed(num_slots)
        shape = (2, groups.layers_per_block, num_slots + 1, kv_heads, head_dim)
        self.pool = torch.randn(shape, generator=generator)
        self.groups = groups
        self.block_size = block_size

    def begin(self, batch: BatchGeometry) -> StaticStep:
        """See AttentionBackend."""
        # As a backend may: work on the device that the whole step shares. -1 becomes the last slot.
        return StaticStep(self, batch, [slots_T % self.pool.shape[2] for slots_T in batch.slot_mappings])


@dataclass(frozen=True)
class StaticStep:
    """Implements `AttentionStep`."""

    backend: StaticAttention
    batch: BatchGeometry
    slot_mappings: list[Tensor]

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See AttentionStep."""
        assert v_TKH is not None, "there are no latents here"
        group, layer = self.backend.groups.place(spec.layer)
        pool = self.backend.pool
        slots_T = self.slot_mappings[group]
        pool[0, layer].index_copy_(0, slots_T, k_TKH)
        pool[1, layer].index_copy_(0, slots_T, v_TKH)

    def pages(self, spec: AttentionSpec) -> Pages:
        """No kernel writes here."""
        raise AssertionError("this attention has no pages")

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See AttentionStep."""
        group, layer = self.backend.groups.place(spec.layer)
        batch, block_size = self.batch, self.backend.block_size
        tables_SB, starts_S1 = batch.block_tables[group].long(), batch.query_start_loc_S1.long()
        slots_SC = (tables_SB[:, :, None] * block_size + torch.arange(block_size)).flatten(1)
        k_SCKH, v_SCKH = self.backend.pool[0, layer][slots_SC], self.backend.pool[1, layer][slots_SC]

        token_T = torch.arange(len(q_TNH))
        row_T = torch.searchsorted(starts_S1[1:].contiguous(), token_T, right=True)
        row_T = row_T.clamp(max=len(tables_SB) - 1)  # tokens past the last row: hidden from everything below
        lens_S = batch.seq_lens_S.long()
        position_T = lens_S[row_T] - starts_S1[row_T + 1] + token_T
        column_C = torch.arange(slots_SC.shape[1])
        seen_TC = (column_C <= position_T[:, None]) & (column_C < lens_S[row_T, None])
        seen_TC &= (token_T < starts_S1[-1])[:, None]
        if spec.window is not None:
            seen_TC &= column_C > position_T[:, None] - spec.window
        if spec.chunk is not None:
            seen_TC &= column_C >= position_T[:, None] // spec.chunk * spec.chunk

        per_kv_head = q_TNH.shape[1] // k_SCKH.shape[2]
        q_TKGH = q_TNH.view(len(q_TNH), -1, per_kv_head, q_TNH.shape[2])
        scores = torch.einsum("tkgh,tckh->tkgc", q_TKGH, k_SCKH[row_T]) * spec.scale
        weights = scores.masked_fill(~seen_TC[:, None, None], -torch.inf).softmax(-1)  # NaN where all is hidden
        return torch.einsum("tkgc,tckh->tkgh", weights, v_SCKH[row_T]).flatten(1, 2)
