"""From tensors to launches of the attention kernels: what fits together, and the arguments that follow from shapes.

Shapes: T query tokens, S sequences, N query heads, K key heads, H head dim, B blocks per table, P parts, R their rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagefleet_kernels._triton import COMPILE_OPTIONS, next_power_of_2
from pagefleet_kernels.attention_kernel import LONG, SHARED, SHORT, merge_parts_kernel, paged_attention_kernel
from pagefleet_kernels.early_launch import early_launch
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import E5M2, FP8, as_bytes, fp8_form, has_native_fp8
from pagefleet_kernels.layout import split_kv
from pagefleet_kernels.paged_softmax import LOG2_E, needs_upcast
from pagefleet_kernels.score_rule import ScoreRule
from pagefleet_kernels.tuning import MIN_DOT_SIDE, WHOLE, AttentionTile, Splits, padded_head_dim

MERGED_AT_ONCE = 16
"""Parts that a program of the merge holds; more take further rounds of it."""
MOST_ROWS_OF_CODES = 32
"""Of a tile over e4m3 that is decoded by arithmetic: that takes registers, and of 64 rows some forms spill."""
_ALL_REGISTERS = 255
"""That a thread may have."""
_TALL = 128
"""Rows of a tile."""
_LARGE_HEAD = 128
"""Elements; of larger ones a tall tile's sums take half of all registers."""
KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8, E5M2)


@dataclass(frozen=True, slots=True, eq=False)
class PagedQueries:
    """Queries and the pages that hold their keys and values, as the public functions take them."""

    q_TNH: torch.Tensor
    kv_cache: torch.Tensor
    block_tables_SB: torch.Tensor
    query_start_loc_S1: torch.Tensor | None
    """None: one query per sequence."""
    seq_lens_S: torch.Tensor

    @property
    def num_seqs(self) -> int:
        """S."""
        return self.seq_lens_S.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.kv_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q_TNH.shape[1] // self.kv_cache.shape[2]

    def check(self, rule: ScoreRule) -> None:
        """Raise UnsupportedShapeError unless queries, pages, tables and rule fit each other."""
        keys, _ = split_kv(self.kv_cache)
        num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
        q_TNH, tables = self.q_TNH, self.block_tables_SB
        if q_TNH.dim() != 3 or q_TNH.shape[2] != head_dim or q_TNH.shape[1] % num_kv_heads:
            raise UnsupportedShapeError(
                f"queries must be [T, N, {head_dim}] with N a multiple of the {num_kv_heads} key heads, "
                f"not {list(q_TNH.shape)}"
            )
        if q_TNH.stride(2) != 1 or self.kv_cache.stride(4) != 1:
            raise UnsupportedShapeError("the last axis of queries and kv_cache must be contiguous")
        if self.kv_cache.dtype not in KV_DTYPES:
            raise UnsupportedShapeError(
                f"a kv_cache in {self.kv_cache.dtype} is not supported: one of "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in KV_DTYPES)} is"
            )
        if tables.dim() != 2 or tables.shape[:1] != self.seq_lens_S.shape or tables.stride(1) != 1:
            raise UnsupportedShapeError(
                f"block tables {list(tables.shape)} must have one row, contiguous, for each of the "
                f"{list(self.seq_lens_S.shape)} sequences"
            )
        starts = self.query_start_loc_S1
        if starts is None and q_TNH.shape[0] != self.num_seqs:
            raise UnsupportedShapeError(f"decode takes one query per sequence: {q_TNH.shape[0]} for {self.num_seqs}")
        if starts is not None and starts.shape != (self.num_seqs + 1,):
            raise UnsupportedShapeError(
                f"{self.num_seqs} sequences need {self.num_seqs + 1} query starts, not {list(starts.shape)}"
            )
        rule.check_heads(q_TNH.shape[1], q_TNH.device)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Attention over parts of each context, to be merged."""

    values_RNPH: torch.Tensor
    """float32."""
    log_sums_RNP: torch.Tensor
    """float32, base 2; -inf where a part holds no key, whose values are then not written."""
    by_token: bool
    """Rows are tokens, else `block_q` rows of each sequence."""

    @classmethod
    def allocate(cls, queries: PagedQueries, num_rows: int, num_parts: int, *, by_token: bool) -> Parts:
        """Room for parts of all heads; not initialised."""
        _, num_heads, head_dim = queries.q_TNH.shape
        make = queries.q_TNH.new_empty
        return cls(
            make((num_rows, num_heads, num_parts, head_dim), dtype=torch.float32),
            make((num_rows, num_heads, num_parts), dtype=torch.float32),
            by_token,
        )

    @staticmethod
    def num_bytes(queries: PagedQueries, num_rows: int, num_parts: int) -> int:
        """Bytes that `allocate` takes."""
        _, num_heads, head_dim = queries.q_TNH.shape
        return num_rows * num_heads * num_parts * (head_dim + 1) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch: which queries it serves (see `attention_kernel`), and in which tiles."""

    rows: int
    tile: AttentionTile
    block_q: int
    """Queries of a tile; with their heads they fit into `tile.block_m` rows."""
    splits: Splits = WHOLE
    first_part: int = 0
    short_len: int = 0
    """LONG: leave sequences of up to that many queries to another launch."""
    prefix_len: int = 0

    def grid(self, queries: PagedQueries) -> tuple[int, int, int]:
        """Programs: blocks of queries, key heads, parts."""
        num_tokens = queries.q_TNH.shape[0]
        blocks = {
            LONG: num_tokens // self.block_q + queries.num_seqs + 1,
            SHORT: queries.num_seqs,
            SHARED: -(-num_tokens // self.block_q),
        }[self.rows]
        return blocks, queries.num_kv_heads, self.splits.parts


def long_launch(
    queries: PagedQueries, tile: AttentionTile, max_query_len: int, *, short_len: int = 0, prefix_len: int = 0
) -> Launch:
    """LONG rows, in tiles no taller than the queries are long."""
    wanted = min(tile.block_m, next_power_of_2(max_query_len * queries.group))
    if queries.kv_cache.dtype == FP8 and not has_native_fp8(queries.q_TNH.device):
        wanted = min(wanted, MOST_ROWS_OF_CODES)
    if prefix_len and _is_uneven(queries.group) and padded_head_dim(queries.q_TNH.shape[2]) > _LARGE_HEAD:
        wanted = min(wanted, _TALL // 2)  # parts are float32, and rows' addresses fill what registers they leave
    tile = tile.with_rows(max(wanted, queries.group))
    if tile.block_m >= _TALL and _takes_all_registers(queries):
        tile = replace(tile, block_n=max(MIN_DOT_SIDE, tile.block_n // 2))
    block_q = tile.block_m // queries.group
    return Launch(rows=LONG, tile=tile, block_q=block_q, short_len=short_len, prefix_len=prefix_len)


def _takes_all_registers(queries: PagedQueries) -> bool:
    """Of tall tiles: masked heads do whose 8 bits become float16, so these have fewer keys."""
    is_float16 = queries.q_TNH.dtype == torch.float16
    return is_float16 and _is_masked(queries.q_TNH.shape[2]) and queries.kv_cache.dtype in (FP8, E5M2)


def short_launch(queries: PagedQueries, tile: AttentionTile, splits: Splits, *, prefix_len: int = 0) -> Launch:
    """SHORT rows: as many queries as fit beside each other into the rows that one query's heads need anyway.

    However long the longest query is: a kernel of its own for every length would be compiled while serving.
    """
    tile = tile.with_rows(queries.group)
    block_q = 1 if queries.query_start_loc_S1 is None else tile.block_m // queries.group
    return Launch(rows=SHORT, tile=tile, block_q=block_q, splits=splits, prefix_len=prefix_len)


def run(
    launch: Launch, out_TNH: torch.Tensor, queries: PagedQueries, rule: ScoreRule, parts: Parts | None = None
) -> None:
    """Start the attention kernel; with `parts` it leaves `out` alone."""
    num_tokens, num_heads, head_dim = queries.q_TNH.shape
    if num_tokens == 0:
        return
    keys, values = split_kv(as_bytes(queries.kv_cache))
    tables, starts, seq_lens = queries.block_tables_SB, queries.query_start_loc_S1, queries.seq_lens_S
    k_scale, v_scale = rule.kv_scales(queries.kv_cache.dtype)
    score_scale = rule.scale * k_scale * LOG2_E
    softcap = 0.0
    if rule.softcap is not None:
        score_scale, softcap = 2.0 * score_scale / rule.softcap, rule.softcap * LOG2_E
    tile = launch.tile
    paged_attention_kernel[launch.grid(queries)](
        out_TNH,
        out_TNH if parts is None else parts.values_RNPH,
        out_TNH if parts is None else parts.log_sums_RNP,
        queries.q_TNH,
        keys,
        values,
        tables,
        seq_lens if starts is None else starts,
        seq_lens,
        seq_lens if rule.sinks_N is None else rule.sinks_N,
        seq_lens if rule.alibi_slopes_N is None else rule.alibi_slopes_N,
        queries.num_seqs,
        num_tokens,
        launch.prefix_len,
        launch.short_len,
        launch.splits.min_keys,
        launch.first_part,
        0 if parts is None else parts.log_sums_RNP.shape[2],
        score_scale,
        softcap,
        v_scale,
        queries.q_TNH.stride(0),
        queries.q_TNH.stride(1),
        tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        HEADS=num_heads,
        GROUP=queries.group,
        HEAD_DIM=head_dim,
        DIM_PADDED=padded_head_dim(head_dim),
        BLOCK_SIZE=keys.shape[2],
        BLOCK_M=tile.block_m,
        BLOCK_Q=launch.block_q,
        BLOCK_N=tile.block_n,
        ROWS=launch.rows,
        UNIFORM=starts is None,
        IN_PARTS=parts is not None,
        PARTS_BY_TOKEN=parts is not None and parts.by_token,
        WINDOW=rule.window or 0,
        CHUNK=rule.chunk or 0,
        SOFTCAP=rule.softcap is not None,
        SINKS=rule.sinks_N is not None,
        ALIBI=rule.alibi_slopes_N is not None,
        FP8=fp8_form(queries.kv_cache.dtype),
        NATIVE_FP8=has_native_fp8(queries.q_TNH.device),
        UPCAST=needs_upcast(queries.q_TNH.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_registers(head_dim, tile.block_m, is_crowded=_is_crowded(launch, queries)),
        **early_launch(queries.q_TNH.device),
        **COMPILE_OPTIONS,
    )


def _registers(head_dim: int, num_rows: int = 1, *, is_crowded: bool = False) -> dict[str, int]:
    """Options of the launch. Heads that fill no power of two are masked, which takes registers: by itself the assembler
    puts some values down then, to have one program more on a multiprocessor. Tall tiles have but one there anyway.
    `is_crowded`: something else takes as many."""
    is_wanted = is_crowded or (_is_masked(head_dim) and num_rows < _TALL)
    return {"maxnreg": _ALL_REGISTERS} if is_wanted and torch.version.hip is None else {}


def _is_crowded(launch: Launch, queries: PagedQueries) -> bool:
    """Of SHORT rows of several queries: groups that fill no power of two, and codes that arithmetic makes numbers."""
    if launch.rows != SHORT or queries.query_start_loc_S1 is None or not _is_uneven(queries.group):
        return False
    return queries.kv_cache.dtype == FP8 and not has_native_fp8(queries.q_TNH.device)


def _is_uneven(group: int) -> bool:
    """Whether it fills no power of two."""
    return bool(group & (group - 1))


def _is_masked(head_dim: int) -> bool:
    return head_dim != padded_head_dim(head_dim)


def run_short(launch: Launch, out_TNH: torch.Tensor, queries: PagedQueries, rule: ScoreRule) -> None:
    """Serve SHORT rows, in parts that are then merged if the launch has more than one."""
    if launch.splits.parts == 1:
        run(launch, out_TNH, queries, rule)
        return
    parts = Parts.allocate(queries, queries.num_seqs * launch.block_q, launch.splits.parts, by_token=False)
    run(launch, out_TNH, queries, rule, parts)
    merge(parts, out_TNH, queries, launch.block_q)


def merge(parts: Parts, out_TNH: torch.Tensor, queries: PagedQueries, block_q: int = 1) -> None:
    """Start the kernel that writes `out` from its parts; of each sequence of up to `block_q` queries, or of all."""
    num_rows, num_heads, num_parts = parts.log_sums_RNP.shape
    if num_rows == 0:
        return
    starts = queries.query_start_loc_S1
    head_dim = out_TNH.shape[2]
    merge_parts_kernel[(num_rows, num_heads)](
        out_TNH,
        parts.values_RNPH,
        parts.log_sums_RNP,
        queries.seq_lens_S if starts is None else starts,
        num_parts,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_PADDED=padded_head_dim(head_dim),
        BLOCK_P=MERGED_AT_ONCE,
        BLOCK_Q=block_q,
        BY_TOKEN=parts.by_token or starts is None,
        **_registers(head_dim),
        **early_launch(out_TNH.device),
        **COMPILE_OPTIONS,
    )
