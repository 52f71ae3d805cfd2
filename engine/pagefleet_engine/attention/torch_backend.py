"""Paged attention in torch, made for the CPU: gather pages, then batched matrix products over padded groups.

No loop over requests: see `padded_groups`. Nothing is padded for graphs here, and lengths are known on the host.

Shapes: T tokens, S rows of a group, Q queries of a row (padded), C context (padded), N query heads, K key/value heads,
G = N // K, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pagefleet_kernels.fp8 import LARGEST_FP8, as_bytes
from pagefleet_kernels.layout import KVLayout
from torch import Tensor
from torch.nn import functional as F

from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry, Pages
from pagefleet_engine.attention.padded_groups import PaddedGroup, QueryBlock, make_groups, write_index
from pagefleet_engine.attention.support import check_pool
from pagefleet_engine.attention.torch_block import attend_block
from pagefleet_engine.attention.torch_latents import attend_latents
from pagefleet_engine.core.kv_groups import KVGroups


@dataclass(frozen=True, slots=True)
class _PoolViews:
    """The pool as the gathers and scatters of its layers see it; a pool of 8 bits as bytes."""

    whole: Tensor
    places: list[tuple[int, int]]
    """Per layer of the model: its KV group, and its index within a block."""
    pages: list[Tensor]
    """Per index: [., block_size * H]."""
    k_tokens: list[Tensor]
    """Per index: [., H]."""
    v_tokens: list[Tensor]
    """The same; of no meaning where pages hold latents."""


class TorchBackend:
    """Attention over a pool of `layout.shape` in host memory. The pool must start out finite: masked pages are read."""

    def __init__(self, pool: Tensor, layout: KVLayout, groups: KVGroups) -> None:
        """`groups` place each layer of the model in a block of the pool. Raises ConfigError for an unsupported pool."""
        check_pool(pool, layout)
        self._layout = layout
        heads, block_size, vectors = layout.num_kv_heads, layout.block_size, layout.vectors
        # One row per (block, layer, k or v, head): a page of one head, contiguous, so that a gather copies whole pages.
        pages = as_bytes(pool).view(-1, block_size * layout.head_dim)
        tokens = as_bytes(pool).view(-1, layout.head_dim)
        # Per layer a view that starts at the layer's own pages: indices then serve every layer unchanged.
        layers = range(layout.num_layers)
        num_layers = sum(len(group.layers) for group in groups.groups)
        self._pool = _PoolViews(
            whole=pool,
            places=[groups.place(layer) for layer in range(num_layers)],
            pages=[pages[vectors * layer * heads :] for layer in layers],
            k_tokens=[tokens[vectors * layer * heads * block_size :] for layer in layers],
            v_tokens=[tokens[(vectors * layer + 1) * heads * block_size :] for layer in layers],
        )

    def begin(self, batch: BatchGeometry) -> TorchAttentionStep:
        """Prepare the step's write positions; reading is prepared per window on first use."""
        return TorchAttentionStep(self._layout, batch, self._pool)


class TorchAttentionStep:
    """One step's attention; implements `AttentionStep`."""

    def __init__(self, layout: KVLayout, batch: BatchGeometry, pool: _PoolViews) -> None:
        self._layout = layout
        self._batch = batch
        self._pool = pool
        self._write_indices = [write_index(layout, mapping_T) for mapping_T in batch.slot_mappings]
        self._groups: dict[tuple[int, int | None, int | None], list[PaddedGroup]] = {}

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See `AttentionStep.write`."""
        group, index = self._pool.places[spec.layer]
        pool, places = self._pool, self._write_indices[group]
        for tokens, x_TKH, scale in (
            (pool.k_tokens[index], k_TKH, spec.k_scale),
            (pool.v_tokens[index], v_TKH, spec.v_scale),
        ):
            if x_TKH is not None:
                stored = _to_codes(x_TKH, scale, pool.whole.dtype) if pool.whole.dtype in LARGEST_FP8 else x_TKH
                tokens.index_copy_(0, places, stored.reshape(-1, self._layout.head_dim))

    def pages(self, spec: AttentionSpec) -> Pages:
        """See `AttentionStep.pages`."""
        group, index = self._pool.places[spec.layer]
        return Pages(self._layout.layer_view(self._pool.whole, index), self._batch.slot_mappings[group])

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See `AttentionStep.attend`."""
        kv_group, index = self._pool.places[spec.layer]
        if self._pool.whole.dtype not in LARGEST_FP8 and (spec.k_scale != 1.0 or spec.v_scale != 1.0):
            spec = replace(spec, k_scale=1.0, v_scale=1.0)
        groups = self._groups_for(kv_group, spec, q_TNH.dtype)
        if len(groups) == 1 and groups[0].kept is None and groups[0].token_index is None:
            return self._attend_group(groups[0], index, q_TNH, spec)
        value_dim = q_TNH.shape[2] if spec.latent is None else spec.latent.value_dim
        out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], value_dim)
        for group in groups:
            q = q_TNH if group.token_index is None else q_TNH.index_select(0, group.token_index)
            result = self._attend_group(group, index, q, spec)
            if group.kept is not None:
                result = result.index_select(0, group.kept)
            if group.kept_tokens is None:
                out_TNH.copy_(result)
            else:
                out_TNH.index_copy_(0, group.kept_tokens, result)
        return out_TNH

    def _attend_group(self, group: PaddedGroup, index: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend the group's padded queries [S * Q, N, H]; returns as many outputs, contiguous."""
        layout, rows, num_heads = self._layout, group.num_rows, q.shape[1]
        kv = self._pool.pages[index].index_select(0, group.page_index)
        if self._pool.whole.dtype in LARGEST_FP8:
            kv = kv.view(self._pool.whole.dtype)
        kv = kv.to(q.dtype)
        if spec.latent is not None:
            return attend_latents(group, kv.view(rows, -1, layout.head_dim), q, spec, spec.latent)
        k, v = kv.view(2, rows * layout.num_kv_heads, -1, layout.head_dim).unbind(0)
        per_kv_head = num_heads // layout.num_kv_heads
        q_SQKGH = q.view(rows, group.query_len, layout.num_kv_heads, per_kv_head, layout.head_dim)
        if rows == 1 and group.query_len == 1 and _is_plain(spec):
            return _attend_one(q_SQKGH, k, v, group.blocks[0], spec).view(1, num_heads, -1)
        if group.query_len == 1:
            out = attend_block(q_SQKGH, k, v, group.blocks[0], spec)
            return out.reshape(rows, num_heads, layout.head_dim)
        parts = [attend_block(q_SQKGH[:, block.start : block.stop], k, v, block, spec) for block in group.blocks]
        return torch.cat(parts, dim=1).view(rows * group.query_len, num_heads, layout.head_dim)

    def _groups_for(self, kv_group: int, spec: AttentionSpec, dtype: torch.dtype) -> list[PaddedGroup]:
        key = (kv_group, spec.window, spec.chunk)
        groups = self._groups.get(key)
        if groups is None:
            tables = self._batch.block_tables[kv_group]
            groups = make_groups(self._layout, self._batch, tables.numpy(), spec, dtype)
            self._groups[key] = groups
        return groups


def _to_codes(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Values over `scale` in eight bits, as bytes; what is too large becomes the largest."""
    largest = LARGEST_FP8[dtype]
    return as_bytes((values / scale).clamp_(-largest, largest).to(dtype))


def _is_plain(spec: AttentionSpec) -> bool:
    """Whether scores go into the softmax as they are, and nothing follows it."""
    return spec.softcap is None and spec.sinks_N is None and spec.alibi_slopes_N is None and spec.v_scale == 1.0


def _attend_one(q_SQKGH: Tensor, k: Tensor, v: Tensor, block: QueryBlock, spec: AttentionSpec) -> Tensor:
    """One query of one row: nothing to mask, so the fused kernel is quickest."""
    q = q_SQKGH[0, 0].unsqueeze(0)  # [1, K, G, H]: the heads of a group stand as queries
    k, v = k[:, block.first : block.end].unsqueeze(0), v[:, block.first : block.end].unsqueeze(0)
    return F.scaled_dot_product_attention(q, k, v, scale=spec.scale * spec.k_scale)
