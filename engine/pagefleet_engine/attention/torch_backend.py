"""Paged attention in torch, made for the CPU: gather pages, then batched matrix products over padded groups.

No loop over requests: rows of like length form a group (`grouping`), and long queries are cut into blocks that fit the
cache and see only the context up to their end. What all layers share (indices, masks) is worked out once per step.

Shapes: T tokens, S rows of a group, Q queries of a row (padded), C context (padded), N query heads, K key/value heads,
G = N // K, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pagefleet_kernels.layout import KVLayout
from torch import Tensor
from torch.nn import functional as F

from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry, Pages
from pagefleet_engine.attention.grouping import Int64Array, group_rows
from pagefleet_engine.core.kv_groups import KVGroups

Int32Array = NDArray[np.int32]

QUERY_BLOCK = 128
"""Queries per block: scores of a block stay within a core's cache share (measured best of 64 to 512)."""


@dataclass(frozen=True, slots=True)
class _PoolViews:
    """The pool as the gathers and scatters of its layers see it."""

    whole: Tensor
    places: list[tuple[int, int]]
    """Per layer of the model: its KV group, and its index within a block."""
    pages: list[Tensor]
    """Per index: [., block_size * H]."""
    k_tokens: list[Tensor]
    """Per index: [., H]."""
    v_tokens: list[Tensor]


class TorchBackend:
    """Attention over a pool of `layout.shape` in host memory. The pool must start out finite: masked pages are read."""

    def __init__(self, pool: Tensor, layout: KVLayout, groups: KVGroups) -> None:
        """`groups` place each layer of the model in a block of the pool."""
        self._layout = layout
        heads, block_size = layout.num_kv_heads, layout.block_size
        # One row per (block, layer, k or v, head): a page of one head, contiguous, so that a gather copies whole pages.
        pages = pool.view(-1, block_size * layout.head_dim)
        tokens = pool.view(-1, layout.head_dim)
        # Per layer a view that starts at the layer's own pages: indices then serve every layer unchanged.
        layers = range(layout.num_layers)
        num_layers = sum(len(group.layers) for group in groups.groups)
        self._pool = _PoolViews(
            whole=pool,
            places=[groups.place(layer) for layer in range(num_layers)],
            pages=[pages[2 * layer * heads :] for layer in layers],
            k_tokens=[tokens[2 * layer * heads * block_size :] for layer in layers],
            v_tokens=[tokens[(2 * layer + 1) * heads * block_size :] for layer in layers],
        )

    def begin(self, batch: BatchGeometry) -> TorchAttentionStep:
        """Prepare the step's write positions; reading is prepared per window on first use."""
        return TorchAttentionStep(self._layout, batch, self._pool)


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """Queries `start:stop` of a group's rows, against the columns `first:end` of their gathered context."""

    start: int
    stop: int
    first: int
    end: int
    masked_from: int
    """Columns `first:masked_from` are visible to every query of the block."""
    bias_SQC: Tensor | None
    """[S, 1, 1, stop - start, end - masked_from] of 0 and -inf; None when nothing is hidden."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are computed as one padded batch."""

    num_rows: int
    query_len: int
    page_index: Tensor
    """int64 [2 * S * K * blocks], into a layer's page view: keys first, then values."""
    token_index: Tensor | None
    """int64 [S * Q], the step's token for each padded query; None when the tokens are the batch in order."""
    kept: Tensor | None
    """int64, which of the S * Q results are real; None for all."""
    kept_tokens: Tensor | None
    """int64, the tokens those results belong to."""
    blocks: list[_QueryBlock]


class TorchAttentionStep:
    """One step's attention; implements `AttentionStep`."""

    def __init__(
        self,
        layout: KVLayout,
        batch: BatchGeometry,
        pool: _PoolViews,
    ) -> None:
        self._layout = layout
        self._batch = batch
        self._pool = pool
        self._write_indices = [_write_index(layout, mapping_T) for mapping_T in batch.slot_mappings]
        self._groups: dict[tuple[int, int | None], list[_Group]] = {}

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """See `AttentionStep.write`."""
        head_dim = self._layout.head_dim
        group, index = self._pool.places[spec.layer]
        self._pool.k_tokens[index].index_copy_(0, self._write_indices[group], k_TKH.reshape(-1, head_dim))
        self._pool.v_tokens[index].index_copy_(0, self._write_indices[group], v_TKH.reshape(-1, head_dim))

    def pages(self, spec: AttentionSpec) -> Pages:
        """See `AttentionStep.pages`."""
        group, index = self._pool.places[spec.layer]
        return Pages(self._layout.layer_view(self._pool.whole, index), self._batch.slot_mappings[group])

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See `AttentionStep.attend`."""
        kv_group, layer = self._pool.places[spec.layer]
        scale = spec.scale
        groups = self._groups_for(kv_group, spec.window, q_TNH.dtype)
        if len(groups) == 1 and groups[0].kept is None and groups[0].token_index is None:
            return self._attend_group(groups[0], layer, q_TNH, scale).view(q_TNH.shape)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for group in groups:
            q = q_TNH if group.token_index is None else q_TNH.index_select(0, group.token_index)
            result = self._attend_group(group, layer, q, scale)
            if group.kept is not None:
                result = result.index_select(0, group.kept)
            if group.kept_tokens is None:
                out_TNH.copy_(result)
            else:
                out_TNH.index_copy_(0, group.kept_tokens, result)
        return out_TNH

    def _attend_group(self, group: _Group, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attend the group's padded queries [S * Q, N, H]; returns the same shape, contiguous."""
        layout, rows, num_heads = self._layout, group.num_rows, q.shape[1]
        kv = self._pool.pages[layer].index_select(0, group.page_index)
        k, v = kv.view(2, rows * layout.num_kv_heads, -1, layout.head_dim).unbind(0)
        per_kv_head = num_heads // layout.num_kv_heads
        q_SQKGH = q.view(rows, group.query_len, layout.num_kv_heads, per_kv_head, layout.head_dim)
        if rows == 1 and group.query_len == 1:
            return _attend_one(q_SQKGH, k, v, group.blocks[0], scale).view(1, num_heads, -1)
        if group.query_len == 1:
            out = _attend_block(q_SQKGH, k, v, group.blocks[0], scale)
            return out.reshape(rows, num_heads, layout.head_dim)
        parts = [_attend_block(q_SQKGH[:, block.start : block.stop], k, v, block, scale) for block in group.blocks]
        return torch.cat(parts, dim=1).view(rows * group.query_len, num_heads, layout.head_dim)

    def _groups_for(self, kv_group: int, window: int | None, dtype: torch.dtype) -> list[_Group]:
        groups = self._groups.get((kv_group, window))
        if groups is None:
            tables = self._batch.block_tables[kv_group]
            groups = _make_groups(self._layout, self._batch, tables.numpy(), window, dtype)
            self._groups[kv_group, window] = groups
        return groups


def _attend_one(q_SQKGH: Tensor, k: Tensor, v: Tensor, block: _QueryBlock, scale: float) -> Tensor:
    """One query of one row: nothing to mask, so the fused kernel is quickest."""
    q = q_SQKGH[0, 0].unsqueeze(0)  # [1, K, G, H]: the heads of a group stand as queries
    k, v = k[:, block.first : block.end].unsqueeze(0), v[:, block.first : block.end].unsqueeze(0)
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def _attend_block(q_SQKGH: Tensor, k: Tensor, v: Tensor, block: _QueryBlock, scale: float) -> Tensor:
    """Attend [S, Q, K, G, H] queries to the block's context; returns [S, Q, K, G, H] (a view for one query a row)."""
    rows, queries, kv_heads, per_kv_head, head_dim = q_SQKGH.shape
    q = q_SQKGH.permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, per_kv_head * queries, head_dim)
    k, v = k[:, block.first : block.end], v[:, block.first : block.end]
    unused = q.new_empty(1).expand(rows * kv_heads, per_kv_head * queries, k.shape[1])
    scores = torch.baddbmm(unused, q, k.transpose(1, 2), beta=0.0, alpha=scale)
    if block.bias_SQC is not None:
        shaped = scores.view(rows, kv_heads, per_kv_head, queries, k.shape[1])
        shaped[..., block.masked_from - block.first :] += block.bias_SQC
    out = torch.bmm(torch.softmax(scores, dim=-1), v)
    return out.view(rows, kv_heads, per_kv_head, queries, head_dim).permute(0, 3, 1, 2, 4)


def _pages_per_block(layout: KVLayout) -> int:
    return layout.num_layers * 2 * layout.num_kv_heads


def _write_index(layout: KVLayout, slot_mapping_T: Tensor) -> Tensor:
    """int64 [T * K]: where each token's heads go in a view that starts at the layer's keys (or values)."""
    block = torch.div(slot_mapping_T, layout.block_size, rounding_mode="floor")
    offset = slot_mapping_T - block * layout.block_size
    first_head = block * (_pages_per_block(layout) * layout.block_size) + offset
    heads = torch.arange(layout.num_kv_heads) * layout.block_size
    return (first_head[:, None] + heads).view(-1)


def _make_groups(
    layout: KVLayout, batch: BatchGeometry, tables: Int32Array, window: int | None, dtype: torch.dtype
) -> list[_Group]:
    query_lens = np.asarray(batch.query_lens, dtype=np.int64)
    seq_lens = np.asarray(batch.seq_lens, dtype=np.int64)
    # With a window a row's context starts at the block that holds the first token its first query sees.
    first_seen = np.maximum(seq_lens - query_lens - window + 1, 0) if window is not None else np.zeros_like(seq_lens)
    first_block = first_seen // layout.block_size
    context_lens = seq_lens - first_block * layout.block_size
    starts = batch.query_start_loc_S1.numpy()
    lengths = _Lengths(query_lens, seq_lens, first_block, context_lens, window)
    groups = group_rows(query_lens, context_lens)
    return [_make_group(layout, lengths, rows, starts, tables, dtype) for rows in groups]


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Per row of the batch, in tokens (`first_block` in blocks)."""

    query: Int64Array
    seq: Int64Array
    first_block: Int64Array
    context: Int64Array
    window: int | None


def _make_group(
    layout: KVLayout, lengths: _Lengths, rows: Int64Array, starts: Int64Array, tables: Int32Array, dtype: torch.dtype
) -> _Group:
    query_lens = lengths.query[rows]
    query_len, context = int(query_lens.max()), int(lengths.context[rows].max())
    num_blocks = -(-context // layout.block_size)
    columns = np.minimum(lengths.first_block[rows, None] + np.arange(num_blocks), tables.shape[1] - 1)
    blocks_SB = tables[rows[:, None], columns].astype(np.int64)
    head = np.arange(2 * layout.num_kv_heads).reshape(2, 1, layout.num_kv_heads, 1)
    page_index = (blocks_SB[None, :, None, :] * _pages_per_block(layout) + head).reshape(-1)

    padded = np.arange(query_len)
    real_SQ = padded < query_lens[:, None]
    # A padded query repeats its row's last one: it costs the same and its softmax is never empty.
    tokens_SQ = starts[rows, None] + np.minimum(padded, query_lens[:, None] - 1)
    in_order = len(rows) * query_len == starts[-1] and bool((tokens_SQ.reshape(-1) == np.arange(starts[-1])).all())
    all_real = bool(real_SQ.all())
    return _Group(
        num_rows=len(rows),
        query_len=query_len,
        page_index=torch.from_numpy(page_index),
        token_index=None if in_order else torch.from_numpy(tokens_SQ.reshape(-1)),
        kept=None if all_real else torch.from_numpy(np.flatnonzero(real_SQ)),
        kept_tokens=None if in_order and all_real else torch.from_numpy(tokens_SQ[real_SQ]),
        blocks=_query_blocks(lengths, rows, num_blocks * layout.block_size, dtype),
    )


def _query_blocks(lengths: _Lengths, rows: Int64Array, width: int, dtype: torch.dtype) -> list[_QueryBlock]:
    """Cut the group's queries into blocks, each with the columns it can see.

    Columns count from a row's first gathered block; `width` of them are gathered.
    """
    query_len = int(lengths.query[rows].max())
    last_query = lengths.query[rows, None] - 1
    first_column = lengths.context[rows, None] - lengths.query[rows, None]
    column_SQ = first_column + np.minimum(np.arange(query_len), last_query)
    if query_len <= QUERY_BLOCK and column_SQ.size > 1:
        # Whole pages, masked: a matrix product over part of the gathered columns would copy them first.
        return [_query_block(column_SQ, 0, range(width), lengths.window, dtype)]
    return [
        _query_block(own_SQ, start, _seen_columns(own_SQ, lengths.window), lengths.window, dtype)
        for start in range(0, query_len, QUERY_BLOCK)
        for own_SQ in (column_SQ[:, start : start + QUERY_BLOCK],)
    ]


def _seen_columns(own_SQ: Int64Array, window: int | None) -> range:
    """Columns that any of these queries sees."""
    return range(0 if window is None else max(int(own_SQ.min()) - window + 1, 0), int(own_SQ.max()) + 1)


def _query_block(own_SQ: Int64Array, start: int, context: range, window: int | None, dtype: torch.dtype) -> _QueryBlock:
    """The queries at columns `own_SQ`, of which the first is the group's query number `start`."""
    stop = start + own_SQ.shape[1]
    masked_from = int(own_SQ.min()) + 1 if window is None else context.start
    columns = np.arange(masked_from, context.stop)
    visible = columns <= own_SQ[..., None]
    if window is not None:
        visible &= columns > own_SQ[..., None] - window
    if visible.all():
        return _QueryBlock(start, stop, context.start, context.stop, context.stop, None)
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    return _QueryBlock(start, stop, context.start, context.stop, masked_from, bias[:, None, None])
