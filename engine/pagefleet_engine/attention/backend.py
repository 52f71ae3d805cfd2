"""The interface between a model and the paged KV cache.

A backend is made once per worker; `begin` turns a step's batch into an object that every layer calls once.

Shapes: T tokens of the step, S sequences, B blocks per table; N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """Where the tokens of one step stand: ragged queries over paged context. Tensors live on the worker's device.

    Rows are in batch order. A sequence's queries are its last `query_len` positions: token j of sequence s stands at
    position `seq_lens[s] - query_len[s] + j`.
    """

    query_start_loc_S1: Tensor
    """int32 [S+1], running sum of query lengths."""
    seq_lens_S: Tensor
    """int32 [S], computed plus new tokens."""
    block_tables_SB: Tensor
    """int32 [S, B]; entries past a sequence's blocks are 0 and never read."""
    slot_mapping_T: Tensor
    """int64 [T], block_id * block_size + offset where each token's K/V is written."""
    query_lens: list[int]
    """The same lengths on the host; decides the launch without waiting for the device."""
    seq_lens: list[int]

    @property
    def max_query_len(self) -> int:
        """Longest query of the step."""
        return max(self.query_lens)

    @property
    def max_seq_len(self) -> int:
        """Longest context of the step."""
        return max(self.seq_lens)


class AttentionStep(Protocol):
    """Attention of one step, for all layers."""

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Write k and v to the layer's pages, then attend causally over each sequence's context.

        `window`: each token sees itself and the `window - 1` tokens before it; None: all.
        Returns [T, N, H] in q's dtype.
        """
        ...


class AttentionBackend(Protocol):
    """Makes the steps; owns the KV pool."""

    def begin(self, batch: BatchGeometry) -> AttentionStep:
        """Prepare what all layers of this step share."""
        ...


KVPool = torch.Tensor
"""[num_blocks, layers, 2, kv_heads, block_size, head_dim], see `pagefleet_kernels.layout`."""
