"""A step's rows as padded batches, for attention on the CPU: which pages to gather, and what each query sees of them.

Rows of like length form a group, where the padding saved is worth one more launch. Long queries are cut into blocks
that fit the cache and see only the context up to their end. Lengths are rounded up where kernels are made for each.
Worked out once per step and shared by all layers that see as far.

Shapes: T tokens, S rows of a group, Q queries of a row (padded), C context (padded), K key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pagefleet_kernels.layout import KVLayout
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, BatchGeometry

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

LAUNCH_COST = 4000.0
"""What one more group costs, in gathered context tokens. Measured on 32 mixed requests: 1,000 was 5 % slower."""

QUERY_COST = 0.25
"""What one query-key pair costs, in gathered context tokens."""


def group_rows(query_lens: Int64Array, context_lens: Int64Array) -> list[Int64Array]:
    """Split rows into groups of like shape.

    Splits where the padding saved is worth more than a launch, best split first, until none is.

    Args:
        query_lens: [S] new tokens per row, at least 1.
        context_lens: [S] tokens that each row attends to, its new ones included.

    Returns:
        Row indices per group; every row is in exactly one group, longest queries first.
    """
    order = np.lexsort((-context_lens, -query_lens))
    groups: list[Int64Array] = []
    open_groups = [order]
    while open_groups:
        rows = open_groups.pop()
        at = _best_split(query_lens[rows], context_lens[rows])
        if at is None:
            groups.append(rows)
        else:
            open_groups.append(rows[at:])
            open_groups.append(rows[:at])
    return groups


def _best_split(query_lens: Int64Array, context_lens: Int64Array) -> int | None:
    """Index of the first row of the second part, or None when one padded batch is cheapest. Rows are sorted."""
    n = len(query_lens)
    if n == 1:
        return None
    first_rows = np.arange(1, n)
    longest_head = np.maximum.accumulate(context_lens)[:-1]
    longest_tail = np.maximum.accumulate(context_lens[::-1])[::-1][1:]
    head = first_rows * _cost(query_lens[0], longest_head)
    tail = (n - first_rows) * _cost(query_lens[1:], longest_tail)
    whole = n * _cost(query_lens[0], context_lens.max())
    saved = whole - head - tail
    best = int(saved.argmax())
    return best + 1 if saved[best] > LAUNCH_COST else None


def _cost(query_len: Int64Array | np.int64, context_len: Int64Array | np.int64) -> NDArray[np.float64]:
    return np.asarray(context_len * (1.0 + QUERY_COST * query_len), dtype=np.float64)


# Few lengths instead of all: the CPU's matrix kernels are compiled for each shape that they meet, and kept. In 16-bit
# types a new shape takes oneDNN some milliseconds and most of a megabyte, often more than the product itself, and as
# contexts grow there would be one in nearly every step. float32 goes to another library, and stays exact. Rows and
# queries stay exact, too: rounding them up cost as much as it saved (measured: half the shapes, no more tokens).

STEPS = 8
"""Lengths between one power of two and the next. At most an eighth of a context is gathered for nothing."""


def are_compiled(dtype: torch.dtype) -> bool:
    """Whether products of this type take kernels that are compiled for their shape."""
    return dtype.itemsize == 2


def rounded_up(count: int) -> int:
    """The next of the counts in use: all up to 2 * STEPS, then STEPS in each doubling."""
    grain = 1 << max(0, (count - 1).bit_length() - STEPS.bit_length())
    return -(-count // grain) * grain


QUERY_BLOCK = 128
"""Queries per block: scores of a block stay within a core's cache share (measured best of 64 to 512)."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries `start:stop` of a group's rows, against the columns `first:end` of their gathered context."""

    start: int
    stop: int
    first: int
    end: int
    masked_from: int
    """Columns `first:masked_from` are visible to every query of the block."""
    bias_SQC: Tensor | None
    """[S, 1, 1, stop - start, end - masked_from] of 0 and -inf; None when nothing is hidden."""
    query_columns_SQ: Tensor
    """int64 [S, stop - start], the column of each query's own key."""


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Rows that are computed as one padded batch."""

    num_rows: int
    query_len: int
    page_index: Tensor
    """int64 [2 * S * K * blocks], into a layer's page view: keys first, then values; of latents [S * blocks]."""
    token_index: Tensor | None
    """int64 [S * Q], the step's token for each padded query; None when the tokens are the batch in order."""
    kept: Tensor | None
    """int64, which of the S * Q results are real; None for all."""
    kept_tokens: Tensor | None
    """int64, the tokens those results belong to."""
    blocks: list[QueryBlock]


def _pages_per_block(layout: KVLayout) -> int:
    return layout.num_layers * layout.vectors * layout.num_kv_heads


def write_index(layout: KVLayout, slot_mapping_T: Tensor) -> Tensor:
    """int64 [T * K]: where each token's heads go in a view that starts at the layer's keys (or values)."""
    block = torch.div(slot_mapping_T, layout.block_size, rounding_mode="floor")
    offset = slot_mapping_T - block * layout.block_size
    first_head = block * (_pages_per_block(layout) * layout.block_size) + offset
    heads = torch.arange(layout.num_kv_heads) * layout.block_size
    return (first_head[:, None] + heads).view(-1)


def make_groups(
    layout: KVLayout, batch: BatchGeometry, tables: Int32Array, spec: AttentionSpec, dtype: torch.dtype
) -> list[PaddedGroup]:
    """The rows of `batch` in groups, for layers that see as far as `spec` says; `tables` are those of their KV group,
    `dtype` that of the scores."""
    query_lens = np.asarray(batch.query_lens, dtype=np.int64)
    seq_lens = np.asarray(batch.seq_lens, dtype=np.int64)
    # A row's context starts at the block that holds the first token its first query sees.
    first_block = first_seen(seq_lens - query_lens, spec) // layout.block_size
    context_lens = seq_lens - first_block * layout.block_size
    starts = batch.query_start_loc_S1.numpy()
    lengths = _Lengths(query_lens, seq_lens, first_block, context_lens, spec)
    groups = group_rows(query_lens, context_lens)
    return [_make_group(layout, lengths, rows, starts, tables, dtype) for rows in groups]


def first_seen(positions: Int64Array, spec: AttentionSpec) -> Int64Array:
    """The first position that a query at each of these sees."""
    first = np.zeros_like(positions)
    if spec.window is not None:
        first = np.maximum(first, positions - spec.window + 1)
    if spec.chunk is not None:
        first = np.maximum(first, positions // spec.chunk * spec.chunk)
    return first


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Per row of the batch, in tokens (`first_block` in blocks)."""

    query: Int64Array
    seq: Int64Array
    first_block: Int64Array
    context: Int64Array
    spec: AttentionSpec


def _make_group(
    layout: KVLayout, lengths: _Lengths, rows: Int64Array, starts: Int64Array, tables: Int32Array, dtype: torch.dtype
) -> PaddedGroup:
    query_lens = lengths.query[rows]
    query_len, context = int(query_lens.max()), int(lengths.context[rows].max())
    num_blocks = -(-context // layout.block_size)
    if are_compiled(dtype) and len(rows) * query_len > 1:  # one query of one row has a kernel for all lengths
        num_blocks = rounded_up(num_blocks)
    # Padding repeats a row's own last block: what another request has may be no numbers, and is not masked by a zero.
    last_block = (lengths.seq[rows, None] - 1) // layout.block_size
    columns = np.minimum(lengths.first_block[rows, None] + np.arange(num_blocks), last_block)
    blocks_SB = tables[rows[:, None], columns].astype(np.int64)
    head = np.arange(layout.vectors * layout.num_kv_heads).reshape(layout.vectors, 1, layout.num_kv_heads, 1)
    page_index = (blocks_SB[None, :, None, :] * _pages_per_block(layout) + head).reshape(-1)

    padded = np.arange(query_len)
    real_SQ = padded < query_lens[:, None]
    # A padded query repeats its row's last one: it costs the same and its softmax is never empty.
    tokens_SQ = starts[rows, None] + np.minimum(padded, query_lens[:, None] - 1)
    in_order = len(rows) * query_len == starts[-1] and bool((tokens_SQ.reshape(-1) == np.arange(starts[-1])).all())
    all_real = bool(real_SQ.all())
    return PaddedGroup(
        num_rows=len(rows),
        query_len=query_len,
        page_index=torch.from_numpy(page_index),
        token_index=None if in_order else torch.from_numpy(tokens_SQ.reshape(-1)),
        kept=None if all_real else torch.from_numpy(np.flatnonzero(real_SQ)),
        kept_tokens=None if in_order and all_real else torch.from_numpy(tokens_SQ[real_SQ]),
        blocks=_query_blocks(lengths, rows, query_len, num_blocks, layout.block_size, dtype),
    )


def _query_blocks(
    lengths: _Lengths, rows: Int64Array, query_len: int, num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[QueryBlock]:
    """Cut the group's `query_len` queries into blocks, each with the columns it can see.

    Columns count from a row's first gathered block; those of `num_blocks` are gathered.
    """
    width = num_blocks * block_size
    last_query = lengths.query[rows, None] - 1
    first_column = lengths.context[rows, None] - lengths.query[rows, None]
    column_SQ = first_column + np.minimum(np.arange(query_len), last_query)
    seen_SQ = None
    if lengths.spec.is_local:
        skipped = lengths.first_block[rows, None] * block_size
        seen_SQ = first_seen(column_SQ + skipped, lengths.spec) - skipped
    if query_len <= QUERY_BLOCK and column_SQ.size > 1:
        # Whole pages, masked: a matrix product over part of the gathered columns would copy them first.
        return [_query_block(column_SQ, seen_SQ, 0, range(width), dtype)]
    blocks = []
    for start in range(0, query_len, QUERY_BLOCK):
        queries = slice(start, start + QUERY_BLOCK)
        own_SQ, first_SQ = column_SQ[:, queries], None if seen_SQ is None else seen_SQ[:, queries]
        blocks.append(_query_block(own_SQ, first_SQ, start, _seen_columns(own_SQ, first_SQ, width, dtype), dtype))
    return blocks


def _seen_columns(own_SQ: Int64Array, first_SQ: Int64Array | None, width: int, dtype: torch.dtype) -> range:
    """Columns of the `width` that any of these queries sees, and some to either side where their number matters."""
    first = 0 if first_SQ is None else max(int(first_SQ.min()), 0)
    end = int(own_SQ.max()) + 1
    if are_compiled(dtype) and own_SQ.size > 1:
        first -= first % QUERY_BLOCK
        end = min(-(-end // QUERY_BLOCK) * QUERY_BLOCK, width)
    return range(first, end)


def _query_block(
    own_SQ: Int64Array, first_SQ: Int64Array | None, start: int, context: range, dtype: torch.dtype
) -> QueryBlock:
    """The queries at columns `own_SQ`, of which the first is the group's query number `start`; each sees the columns
    from its own of `first_SQ`, or all."""
    stop = start + own_SQ.shape[1]
    masked_from = int(own_SQ.min()) + 1 if first_SQ is None else context.start
    columns = np.arange(masked_from, context.stop)
    visible = columns <= own_SQ[..., None]
    if first_SQ is not None:
        visible &= columns >= first_SQ[..., None]
    if visible.all():
        return QueryBlock(start, stop, context.start, context.stop, context.stop, None, torch.from_numpy(own_SQ))
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    own = torch.from_numpy(own_SQ)
    return QueryBlock(start, stop, context.start, context.stop, masked_from, bias[:, None, None], own)
