"""Finding the attention tiles of a GPU: the candidates, a workload to time them on, and the table that comes of it.

A workload's pool is laid out as a serving one is, with many layers, and each timed call reads another layer: pages lie
as far apart as in serving, and no call finds what the one before has left in a cache. The clock is the caller's
(`triton.testing.do_bench` on a GPU), so that all of this runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Literal

import torch

from pagefleet_kernels.attention import varlen_attention
from pagefleet_kernels.decode_attention import decode_attention
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.layout import KVLayout, Order
from pagefleet_kernels.score_rule import ScoreRule
from pagefleet_kernels.tuning import AttentionTile, LaunchTable, padded_head_dim

Family = Literal["prefill", "decode"]
Clock = Callable[[Callable[[], object]], float]
"""Milliseconds of a call."""
Attend = Callable[[AttentionTile | None, int], torch.Tensor]
"""Attention with a tile (None: the table's) in the layer of a number, which may count on and on."""

SERVING_LAYERS = 32

_BLOCK_M = {"prefill": (64, 128), "decode": (16,)}
_BLOCK_N = {"prefill": (32, 64, 128), "decode": (16, 32, 64, 128)}
_STAGES = {"prefill": (2, 3, 4), "decode": (2, 3, 4, 5)}
_WARPS = (4, 8)
_REGISTERS_PER_THREAD = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWorkload:
    """Sequences of one length over pages in random order; `query_len` 1 is a decode step."""

    num_seqs: int
    query_len: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    num_layers: int = SERVING_LAYERS
    order: Order = "blocks"

    @property
    def layout(self) -> KVLayout:
        """Of a pool that these sequences fill."""
        num_blocks = self.num_seqs * -(-self.seq_len // self.block_size)
        return KVLayout(num_blocks, self.num_layers, self.num_kv_heads, self.block_size, self.head_dim, self.order)

    def within(self, num_bytes: float) -> AttentionWorkload:
        """The same with as many layers as such a pool may have in `num_bytes`, at least one."""
        one = replace(self, num_layers=1).layout
        fitting = int(num_bytes // (one.num_blocks * one.bytes_per_block(self.dtype)))
        return replace(self, num_layers=max(1, min(self.num_layers, fitting)))

    @property
    def family(self) -> Family:
        """Which tiles serve it."""
        return "decode" if self.query_len == 1 else "prefill"


@dataclass(frozen=True, slots=True)
class TileTiming:
    """What one tile took; None where it does not fit the device."""

    tile: AttentionTile
    milliseconds: float | None


def attention_candidates(
    family: Family, head_dim: int, dtype: torch.dtype, shared_bytes: int
) -> tuple[AttentionTile, ...]:
    """Tiles worth timing for heads of `head_dim` on a device with `shared_bytes` per program, best guesses included.

    Left out is what cannot do well: buffers beyond shared memory, or sums beyond the registers.
    """
    padded = padded_head_dim(head_dim)
    return tuple(
        AttentionTile(padded, block_m, block_n, num_warps, num_stages)
        for block_m in _BLOCK_M[family]
        for block_n in _BLOCK_N[family]
        for num_warps in _WARPS
        for num_stages in _STAGES[family]
        if _shared_bytes(family, padded, dtype, block_m, block_n, num_stages) <= shared_bytes
        and block_m * (padded + block_n) <= num_warps * 32 * _REGISTERS_PER_THREAD
    )


def _shared_bytes(
    family: Family, padded_dim: int, dtype: torch.dtype, block_m: int, block_n: int, num_stages: int
) -> int:
    """Buffers of queries, and of as many tiles of keys and values as the pipeline holds (as seen in compiled code)."""
    tiles = num_stages if family == "prefill" else num_stages - 1
    return (block_m + 2 * block_n * tiles) * padded_dim * dtype.itemsize


class RandomPages:
    """The pages of a workload's sequences, in random order over a pool of random numbers."""

    def __init__(self, workload: AttentionWorkload, device: torch.device, *, seed: int = 0) -> None:
        layout = workload.layout
        pool = layout.as_pool(torch.empty(prod(layout.shape), dtype=workload.dtype, device=device).normal_())
        self._layers = [layout.layer_view(pool, layer) for layer in range(layout.num_layers)]
        order = torch.randperm(layout.num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables_SB = order.to(torch.int32).view(workload.num_seqs, -1).to(device)
        self.seq_lens_S = torch.full((workload.num_seqs,), workload.seq_len, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        """Layers."""
        return len(self._layers)

    def layer(self, number: int) -> torch.Tensor:
        """The `kv_cache` of a layer; numbers past the last begin anew."""
        return self._layers[number % len(self._layers)]


def prepare_attention(
    workload: AttentionWorkload, device: torch.device, *, seed: int = 0, backend: Backend | None = None
) -> Attend:
    """Random inputs of a workload, and the attention over them."""
    pages = RandomPages(workload, device, seed=seed)
    shape = workload.num_seqs * workload.query_len, workload.num_heads, workload.head_dim
    q_TNH = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, workload.dtype)
    starts_S1 = torch.arange(workload.num_seqs + 1, dtype=torch.int32, device=device) * workload.query_len
    tables_SB, lens_S, rule = pages.tables_SB, pages.seq_lens_S, ScoreRule(scale=workload.head_dim**-0.5)

    def attend(tile: AttentionTile | None, layer: int) -> torch.Tensor:
        kv_cache = pages.layer(layer)
        if workload.family == "decode":
            return decode_attention(q_TNH, kv_cache, tables_SB, lens_S, rule, tile=tile, backend=backend)
        return varlen_attention(
            q_TNH, kv_cache, tables_SB, starts_S1, lens_S, rule, workload.query_len, tile=tile, backend=backend
        )

    return attend


def milliseconds(attend: Attend, tile: AttentionTile | None, clock: Clock) -> float:
    """What a call takes, each in another layer."""
    layers = count()
    return clock(lambda: attend(tile, next(layers)))


def tune_attention(
    attend: Attend,
    tiles: Sequence[AttentionTile],
    clock: Clock,
    *,
    does_not_fit: tuple[type[Exception], ...] = (),
) -> list[TileTiming]:
    """Time every tile, fastest first.

    `does_not_fit` are the errors of a tile that the device refuses (`triton.runtime.errors.OutOfResources`); such
    tiles come last. Raises ArithmeticError for a tile whose result differs from that of the table's own.
    """
    expected = attend(None, 0)
    timings = [_time_tile(attend, tile, expected, clock, does_not_fit) for tile in tiles]
    return sorted(timings, key=lambda timing: float("inf") if timing.milliseconds is None else timing.milliseconds)


def _time_tile(
    attend: Attend,
    tile: AttentionTile,
    expected: torch.Tensor,
    clock: Clock,
    does_not_fit: tuple[type[Exception], ...],
) -> TileTiming:
    try:
        actual = attend(tile, 0)
    except does_not_fit:
        return TileTiming(tile, None)
    if not torch.allclose(actual.float(), expected.float(), rtol=2e-2, atol=2e-2):
        raise ArithmeticError(f"{tile} computes something else than the tile of the launch table")
    return TileTiming(tile, milliseconds(attend, tile, clock))


def with_tile(table: LaunchTable, architecture: str, family: Family, tile: AttentionTile) -> LaunchTable:
    """The table, as measured on `architecture`, with `tile` for heads up to its `max_head_dim`.

    It serves the heads between the next smaller tile's and its own; other tiles stay.
    """
    others = [old for old in getattr(table, family) if old.max_head_dim != tile.max_head_dim]
    tiles = tuple(sorted([*others, tile], key=lambda each: each.max_head_dim))
    table = replace(table, architecture=architecture, measured=True)
    return replace(table, prefill=tiles) if family == "prefill" else replace(table, decode=tiles)
