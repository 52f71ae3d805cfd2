"""Paged attention by the kernels of `pagefleet_kernels`: Triton on CUDA, in tests Triton's interpreter or the twins."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_kernels.attention import paged_attention
from pagefleet_kernels.cascade_attention import cascade_attention
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.fp8 import LARGEST_FP8
from pagefleet_kernels.kv_cache import write_kv
from pagefleet_kernels.latent_attention import latent_attention
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.quantize import Activations, QuantizeSpec
from pagefleet_kernels.rounded_attention import rounded_attention
from pagefleet_kernels.score_rule import ScoreRule
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry, LatentMaps, Pages
from pagefleet_engine.attention.support import check_kernels
from pagefleet_engine.core.kv_groups import KVGroups


class TritonBackend:
    """Attention over a pool of `layout.shape` on a GPU."""

    def __init__(self, pool: Tensor, layout: KVLayout, groups: KVGroups, kernels: Backend | None = None) -> None:
        """`kernels`: None takes Triton on CUDA and the torch twins elsewhere. Raises ConfigError."""
        check_kernels(pool, layout)
        self._layers = [layout.layer_view(pool, layer) for layer in range(layout.num_layers)]
        self._places = [groups.place(layer) for layer in range(sum(len(group.layers) for group in groups.groups))]
        self._kernels = kernels

    def begin(self, batch: BatchGeometry) -> TritonAttentionStep:
        """Nothing to prepare: the kernels read the batch's tensors."""
        return TritonAttentionStep(self._layers, self._places, batch, self._kernels)


@dataclass(frozen=True, slots=True)
class TritonAttentionStep:
    """One step's attention; implements `AttentionStep`."""

    layers: list[Tensor]
    places: list[tuple[int, int]]
    batch: BatchGeometry
    kernels: Backend | None

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See `AttentionStep.write`."""
        assert v_TKH is not None, "latents are written by the kernel that prepares them"
        pages = self.pages(spec)
        write_kv(
            k_TKH,
            v_TKH,
            pages.kv_cache,
            pages.slot_mapping_T,
            k_scale=spec.k_scale,
            v_scale=spec.v_scale,
            backend=self.kernels,
        )

    def pages(self, spec: AttentionSpec) -> Pages:
        """See `AttentionStep.pages`."""
        group, index = self.places[spec.layer]
        return Pages(self.layers[index], self.batch.slot_mappings[group])

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See `AttentionStep.attend`."""
        if spec.latent is not None:
            return self._attend_latents(spec, spec.latent, q_TNH)
        if self.batch.num_common_blocks > 0 and not spec.is_local:
            return self._attend_cascade(spec, q_TNH)
        return paged_attention(*self._paged(spec, q_TNH), backend=self.kernels)

    def _attend_latents(self, spec: AttentionSpec, maps: LatentMaps, q_TNH: Tensor) -> Tensor:
        """Compared with latents as they are kept: queries go to their space, and what comes out of it to values."""
        batch, pages = self.batch, self.pages(spec)
        group, _ = self.places[spec.layer]
        sums_TNR = latent_attention(
            maps.absorb(q_TNH).transpose(0, 1),
            pages.kv_cache[:, 0, 0],
            batch.block_tables[group],
            batch.query_start_loc_S1,
            batch.seq_lens_S,
            batch.max_query_len,
            rank=maps.rank,
            scale=spec.scale,
            stored_scale=spec.k_scale if pages.kv_cache.dtype in LARGEST_FP8 else 1.0,
            backend=self.kernels,
        )
        return maps.values(sums_TNR.transpose(0, 1))

    def attend_rounded(self, spec: AttentionSpec, q_TNH: Tensor, rounding: QuantizeSpec) -> Activations:
        """See `RoundingStep.attend_rounded`."""
        if self.batch.num_common_blocks > 0 and not spec.is_local:
            return self._attend_cascade(spec, q_TNH)
        rounded = rounded_attention(*self._paged(spec, q_TNH), rounding, backend=self.kernels)
        return self.attend(spec, q_TNH) if rounded is None else rounded

    def _attend_cascade(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """The blocks that all rows share, once for all of them."""
        return cascade_attention(*self._paged(spec, q_TNH), self.batch.num_common_blocks, backend=self.kernels)

    def _paged(
        self, spec: AttentionSpec, q_TNH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, ScoreRule, int]:
        """Queries, pages, tables, query starts, lengths, rule and longest query: what all of these kernels take."""
        batch = self.batch
        group, index = self.places[spec.layer]
        pages, tables = self.layers[index], batch.block_tables[group]
        return q_TNH, pages, tables, batch.query_start_loc_S1, batch.seq_lens_S, spec.rule, batch.max_query_len
