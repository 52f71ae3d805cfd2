"""The search for a GPU's launch table: attention tiles, how far contexts are cut, and tiles of quantized products.

One step fills one place of the table, with the others as found so far; each is timed by the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from pagefleet_kernels.attention_tuning import (
    SERVING_LAYERS,
    AttentionWorkload,
    Clock,
    RandomPages,
    attention_candidates,
    milliseconds,
    prepare_attention,
    tune_attention,
    with_tile,
)
from pagefleet_kernels.decode_attention import decode_attention
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.packed_matmul import PackedWeights, packed_matmul
from pagefleet_kernels.quantize import quantize_fp8
from pagefleet_kernels.scaled_matmul import scaled_matmul
from pagefleet_kernels.score_rule import ScoreRule
from pagefleet_kernels.tuning import AttentionTile, LaunchTable, MatmulTile, Splits, attention_tile, decode_splits

_WARPS = (4, 8)
_REGISTERS_PER_THREAD = 255
_PROGRAMS_PER_PROCESSOR = (1, 2, 3, 4, 6)

Candidate = TypeVar("Candidate")


@dataclass(frozen=True, slots=True)
class _Sides:
    """Tiles of a product that are worth a try."""

    block_m: tuple[int, ...]
    block_n: tuple[int, ...]
    block_k: tuple[int, ...]
    num_stages: tuple[int, ...]


_FEW_ROWS = _Sides((16,), (32, 64, 128), (128, 256), (3, 5, 8))  # weights stream from memory: deep pipelines
_SOME_ROWS = _Sides((32, 64), (64, 128), (128, 256), (3, 4))
_MANY_ROWS = _Sides((64, 128), (64, 128, 256), (64, 128), (3, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedDevice:
    """What is tuned, and how it is timed."""

    device: torch.device
    architecture: str
    """As the table is named: sm_90."""
    shared_bytes: int
    """Shared memory that one program may have."""
    num_processors: int
    free_bytes: int
    """Of memory; a workload's pool takes up to half."""
    clock: Clock
    does_not_fit: tuple[type[Exception], ...] = ()
    """What launching a tile raises that the device has no room for."""
    backend: Backend | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSizes:
    """The work that tiles are timed on: sizes of serving."""

    head_dims: tuple[int, ...] = (64, 128, 256)
    num_heads: int = 32
    num_kv_heads: int = 8
    prefill_len: int = 8192
    decode_batch: int = 64
    decode_context: int = 4096
    num_layers: int = SERVING_LAYERS
    """Of the pool, where they fit."""
    small_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Of decode steps that leave a device idle unless their contexts are cut."""
    longest_parts: tuple[int, ...] = (2048, 4096, 8192, 16384)
    """Where the device is full."""
    long_context: int = 32768
    """Of one sequence among `decode_batch` others."""
    inputs: int = 4096
    outputs: int = 14336
    rows: int = 4096
    """Of the tallest product."""
    matrices: int = 4
    """Different ones in turn, more than a cache holds."""


@dataclass(frozen=True, slots=True)
class TuningStep:
    """Fills one place of the table."""

    name: str
    search: Callable[[LaunchTable], tuple[LaunchTable, dict[str, Any]]]
    """Returns the better table and the figures behind it."""


def tuning_steps(tuned: TunedDevice, sizes: TuningSizes) -> Iterator[TuningStep]:
    """All, in the order in which they build on each other."""
    for head_dim in sizes.head_dims:
        for name, workload in (
            ("prefill", _workload(sizes, head_dim, 1, sizes.prefill_len, sizes.prefill_len)),
            ("decode", _workload(sizes, head_dim, sizes.decode_batch, 1, sizes.decode_context)),
        ):
            yield TuningStep(
                f"{name} attention, heads of {head_dim}",
                partial(_search_tile, workload.within(tuned.free_bytes / 2), tuned),
            )
    yield TuningStep("decode attention, parts", partial(_search_parts, sizes, tuned))
    yield TuningStep("decode attention, longest part", partial(_search_longest_part, sizes, tuned))
    for field, kind, make in (("matmul", "fp8", _fp8_product), ("packed", "int4", _int4_product)):
        for place, rows in enumerate(("few", "some", "many")):
            yield TuningStep(f"{kind} product, {rows} rows", partial(_search_product, field, place, make, sizes, tuned))


def run_steps(
    table: LaunchTable, steps: Sequence[TuningStep], found: Callable[[str, LaunchTable, dict[str, Any]], None]
) -> tuple[LaunchTable, dict[str, dict[str, Any]]]:
    """The table after all steps, and their figures by name; `found` hears of each as it ends."""
    figures = {}
    for step in steps:
        table, figures[step.name] = step.search(table)
        found(step.name, table, figures[step.name])
    return table, figures


def product_candidates(max_rows: int, shared_bytes: int) -> tuple[MatmulTile, ...]:
    """Tiles worth timing for up to `max_rows` rows; activations may have two bytes, weights have one.

    Left out is what cannot do well: buffers beyond shared memory, or sums beyond the registers.
    """
    sides = _FEW_ROWS if max_rows <= 16 else _SOME_ROWS if max_rows <= 64 else _MANY_ROWS
    return tuple(
        MatmulTile(max_rows, block_m, block_n, block_k, num_warps, num_stages)
        for block_m in sides.block_m
        for block_n in sides.block_n
        for block_k in sides.block_k
        for num_warps in _WARPS
        for num_stages in sides.num_stages
        if num_stages * block_k * (2 * block_m + block_n) <= shared_bytes
        and block_m * block_n <= num_warps * 32 * _REGISTERS_PER_THREAD // 2
    )


def fastest(
    candidates: Sequence[Candidate],
    milliseconds: Callable[[Candidate], float],
    does_not_fit: tuple[type[Exception], ...],
) -> tuple[Candidate, float] | None:
    """The candidate of the least time; None if the device refuses them all."""
    best = None
    for candidate in candidates:
        try:
            taken = milliseconds(candidate)
        except does_not_fit:
            continue
        if best is None or taken < best[1]:
            best = candidate, taken
    return best


def _workload(sizes: TuningSizes, head_dim: int, num_seqs: int, query_len: int, seq_len: int) -> AttentionWorkload:
    return AttentionWorkload(
        num_seqs=num_seqs,
        query_len=query_len,
        seq_len=seq_len,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=head_dim,
        num_layers=sizes.num_layers,
    )


def _search_tile(
    workload: AttentionWorkload, tuned: TunedDevice, table: LaunchTable
) -> tuple[LaunchTable, dict[str, Any]]:
    attend = prepare_attention(workload, tuned.device, backend=tuned.backend)
    tiles = attention_candidates(workload.family, workload.head_dim, workload.dtype, tuned.shared_bytes)
    before = milliseconds(attend, None, tuned.clock)
    best = tune_attention(attend, tiles, tuned.clock, does_not_fit=tuned.does_not_fit)[0]
    if best.milliseconds is None:
        return table, _figures(len(tiles), before, before, {})
    table = with_tile(table, tuned.architecture, workload.family, best.tile)
    return table, _figures(len(tiles), before, best.milliseconds, asdict(best.tile))


def _search_parts(sizes: TuningSizes, tuned: TunedDevice, table: LaunchTable) -> tuple[LaunchTable, dict[str, Any]]:
    """How many programs fill the device: the least sum of times, each relative to the best of its batch size."""
    head_dim, context = sizes.head_dims[len(sizes.head_dims) // 2], sizes.decode_context
    tile = attention_tile(table.decode, head_dim, torch.bfloat16)
    candidates = [tuned.num_processors * each for each in _PROGRAMS_PER_PROCESSOR]
    scores = dict.fromkeys([table.decode_programs, *candidates], 0.0)
    totals = dict.fromkeys(scores, 0.0)
    for batch in sizes.small_batches:
        workload = _workload(sizes, head_dim, batch, 1, context).within(tuned.free_bytes / 2)
        decode = _DecodeStep(workload, tuned)
        parts = {
            programs: decode_splits(
                replace(table, decode_programs=programs), batch * sizes.num_kv_heads, context, tile.block_n
            ).parts
            for programs in scores
        }
        taken = {number: decode.milliseconds(tile, Splits(number)) for number in sorted(set(parts.values()))}
        for programs, number in parts.items():
            scores[programs] += taken[number] / min(taken.values())
            totals[programs] += taken[number]
    best = min(scores, key=lambda programs: scores[programs])
    figures = _figures(len(scores), totals[table.decode_programs], totals[best], {"decode_programs": best})
    return replace(table, architecture=tuned.architecture, measured=True, decode_programs=best), figures


def _search_longest_part(
    sizes: TuningSizes, tuned: TunedDevice, table: LaunchTable
) -> tuple[LaunchTable, dict[str, Any]]:
    """On a full device: one long context among many of a thirty-second of it."""
    head_dim, batch = sizes.head_dims[len(sizes.head_dims) // 2], sizes.decode_batch
    workload = _workload(sizes, head_dim, batch, 1, sizes.long_context).within(tuned.free_bytes / 2)
    decode = _DecodeStep(workload, tuned)
    decode.lens_S[1:] //= 32
    tile = attention_tile(table.decode, head_dim, torch.bfloat16)

    def taken(longest_part: int) -> float:
        full = replace(table, longest_part=longest_part, decode_programs=0)
        splits = decode_splits(full, batch * sizes.num_kv_heads, sizes.long_context, tile.block_n)
        return decode.milliseconds(tile, splits)

    times = {longest: taken(longest) for longest in dict.fromkeys((table.longest_part, *sizes.longest_parts))}
    best = min(times, key=lambda longest: times[longest])
    figures = _figures(len(times), times[table.longest_part], times[best], {"longest_part": best})
    return replace(table, architecture=tuned.architecture, measured=True, longest_part=best), figures


class _DecodeStep:
    """Decode attention whose contexts are cut as the caller says."""

    def __init__(self, workload: AttentionWorkload, tuned: TunedDevice) -> None:
        self._pages = RandomPages(workload, tuned.device)
        self._clock, self._backend = tuned.clock, tuned.backend
        shape = workload.num_seqs, workload.num_heads, workload.head_dim
        self._q_SNH = torch.randn(shape, device=tuned.device).to(workload.dtype)
        self._layers = count()
        self.lens_S = self._pages.seq_lens_S

    def milliseconds(self, tile: AttentionTile, splits: Splits) -> float:
        """What a step takes with such parts."""
        return self._clock(partial(self._attend, tile, splits))

    def _attend(self, tile: AttentionTile, splits: Splits) -> torch.Tensor:
        kv_cache, rule = self._pages.layer(next(self._layers)), ScoreRule(scale=self._q_SNH.shape[2] ** -0.5)
        return decode_attention(
            self._q_SNH,
            kv_cache,
            self._pages.tables_SB,
            self.lens_S,
            rule,
            num_splits=splits,
            tile=tile,
            backend=self._backend,
        )


Product = Callable[[MatmulTile], None]
"""One by every matrix."""


def _search_product(
    field: str,
    place: int,
    make: Callable[[int, TuningSizes, TunedDevice], Product],
    sizes: TuningSizes,
    tuned: TunedDevice,
    table: LaunchTable,
) -> tuple[LaunchTable, dict[str, Any]]:
    """`field`: of the table, with the tiles of the products that `make` makes for so many rows."""
    tiles: tuple[MatmulTile, ...] = getattr(table, field)
    old = tiles[place]
    product = make(min(old.max_rows, sizes.rows), sizes, tuned)

    def each(tile: MatmulTile) -> float:
        return tuned.clock(partial(product, tile)) / sizes.matrices

    before = each(old)
    candidates = product_candidates(old.max_rows, tuned.shared_bytes)
    best = fastest(candidates, each, tuned.does_not_fit)
    if best is None:
        return table, _figures(len(candidates), before, before, {})
    tile, taken = best
    better: dict[str, Any] = {field: (*tiles[:place], tile, *tiles[place + 1 :])}
    table = replace(table, architecture=tuned.architecture, measured=True, **better)
    return table, _figures(len(candidates), before, taken, asdict(tile))


def _fp8_product(rows: int, sizes: TuningSizes, tuned: TunedDevice) -> Product:
    x_q, x_scale = quantize_fp8(_normal(rows, sizes.inputs, tuned.device))
    weights = [quantize_fp8(_normal(sizes.outputs, sizes.inputs, tuned.device)) for _ in range(sizes.matrices)]

    def product(tile: MatmulTile) -> None:
        for weight_OI, weight_scale in weights:
            scaled_matmul(x_q, x_scale, weight_OI, weight_scale, None, torch.bfloat16, tile=tile, backend=tuned.backend)

    return product


def _int4_product(rows: int, sizes: TuningSizes, tuned: TunedDevice) -> Product:
    x_TI = _normal(rows, sizes.inputs, tuned.device)
    weights = [random_packed(sizes.outputs, sizes.inputs, tuned.device) for _ in range(sizes.matrices)]

    def product(tile: MatmulTile) -> None:
        for one in weights:
            packed_matmul(x_TI, one, tile=tile, backend=tuned.backend)

    return product


def random_packed(outputs: int, inputs: int, device: torch.device) -> PackedWeights:
    """4 bits with zero points, in groups of up to 128 inputs."""
    group = min(128, inputs)
    numbers = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    zeros = torch.randint(0, 16, (outputs, inputs // group), dtype=torch.uint8, device=device)
    return PackedWeights(numbers, torch.full(zeros.shape, inputs**-0.5 / 4, device=device), zeros, 4, group)


def _normal(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device).bfloat16()


def _figures(candidates: int, before_ms: float, best_ms: float, chosen: dict[str, Any]) -> dict[str, Any]:
    return {
        "candidates": candidates,
        "before_microseconds": before_ms * 1e3,
        "best_microseconds": best_ms * 1e3,
        "chosen": chosen,
    }
