"""Paged attention by the kernels of `pagefleet_kernels`: Triton on CUDA, in tests Triton's interpreter or the twins."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_kernels.attention import paged_attention
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.kv_cache import write_kv
from pagefleet_kernels.layout import KVLayout
from torch import Tensor

from pagefleet_engine.attention.backend import BatchGeometry


class TritonBackend:
    """Attention over a pool of `layout.shape` on a GPU."""

    def __init__(self, pool: Tensor, layout: KVLayout, kernels: Backend | None = None) -> None:
        """`kernels`: None takes Triton on CUDA and the torch twins elsewhere."""
        self._layers = [layout.layer_view(pool, layer) for layer in range(layout.num_layers)]
        self._kernels = kernels

    def begin(self, batch: BatchGeometry) -> TritonAttentionStep:
        """Nothing to prepare: the kernels read the batch's tensors."""
        return TritonAttentionStep(self._layers, batch, self._kernels)


@dataclass(frozen=True, slots=True)
class TritonAttentionStep:
    """One step's attention; implements `AttentionStep`."""

    layers: list[Tensor]
    batch: BatchGeometry
    kernels: Backend | None

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `AttentionStep.attend`."""
        batch, kv_cache = self.batch, self.layers[layer]
        write_kv(k_TKH, v_TKH, kv_cache, batch.slot_mapping_T, backend=self.kernels)
        return paged_attention(
            q_TNH,
            kv_cache,
            batch.block_tables_SB,
            batch.query_start_loc_S1,
            batch.seq_lens_S,
            scale,
            batch.max_query_len,
            window,
            backend=self.kernels,
        )
