"""Tuning without a GPU: candidates fit, the clock decides, and the table that comes of it is one that can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pagefleet_kernels.attention_tuning import (
    AttentionWorkload,
    Family,
    RandomPages,
    attention_candidates,
    milliseconds,
    prepare_attention,
    tune_attention,
    with_tile,
)
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.tuning import (
    AttentionTile,
    attention_tile,
    launch_table,
    padded_head_dim,
    table_from_json,
    table_to_json,
)

KIB = 1024
DECODE = AttentionWorkload(num_seqs=2, query_len=1, seq_len=40, num_heads=4, num_kv_heads=2, head_dim=32, num_layers=3)
PREFILL = AttentionWorkload(
    num_seqs=1, query_len=20, seq_len=40, num_heads=4, num_kv_heads=2, head_dim=32, num_layers=3
)


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_candidates_hold_the_head_and_the_guess_of_the_table(family: Family, head_dim: int) -> None:
    tiles = attention_candidates(family, head_dim, torch.bfloat16, 227 * KIB)
    assert len(set(tiles)) == len(tiles) > 5
    assert {tile.max_head_dim for tile in tiles} == {padded_head_dim(head_dim)}
    guess = attention_tile(getattr(launch_table("sm_90"), family), head_dim, torch.bfloat16)
    assert replace(guess, max_head_dim=padded_head_dim(head_dim)) in tiles


def test_less_shared_memory_leaves_smaller_tiles() -> None:
    large = attention_candidates("prefill", 128, torch.bfloat16, 227 * KIB)
    small = attention_candidates("prefill", 128, torch.bfloat16, 99 * KIB)
    assert set(small) < set(large)
    assert small


def test_a_workloads_pool_is_laid_out_like_one_that_serves() -> None:
    workload, device = DECODE, torch.device("cpu")
    pages = RandomPages(workload, device)
    assert len(pages) == 3
    assert pages.layer(1).stride() == torch.empty(workload.layout.shape)[:, 1].stride()
    assert RandomPages(replace(workload, order="layers"), device).layer(1).is_contiguous()
    assert torch.equal(pages.layer(4), pages.layer(1))
    assert not torch.equal(pages.layer(1), pages.layer(2))
    assert sorted(pages.tables_SB.flatten().tolist()) == list(range(workload.layout.num_blocks))


def test_a_pool_has_as_many_layers_as_there_is_room_for() -> None:
    layer_bytes = 2 * 3 * 2 * 2 * 16 * 32 * 2
    assert [DECODE.within(room * layer_bytes).num_layers for room in (0, 1, 2.9, 99)] == [1, 1, 2, 3]


def test_every_timed_call_reads_another_layer() -> None:
    layers: list[int] = []

    def attend(tile: AttentionTile | None, layer: int) -> torch.Tensor:
        layers.append(layer)
        return torch.zeros(1)

    def clock(call: Callable[[], object]) -> float:
        for _ in range(4):
            call()
        return 1.0

    assert milliseconds(attend, None, clock) == 1.0
    assert layers == [0, 1, 2, 3]


@pytest.mark.parametrize("workload", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_kernels_read_a_pool_with_layers_outside(workload: AttentionWorkload) -> None:
    found = []
    backends: tuple[Backend, ...] = ("triton", "torch")
    for backend in backends:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            found.append(prepare_attention(replace(workload, order="layers"), torch.device("cpu"), backend=backend))
    torch.testing.assert_close(found[0](None, 2), found[1](None, 2), atol=2e-2, rtol=2e-2)


def test_one_query_each_is_a_decode_step() -> None:
    assert (DECODE.family, PREFILL.family) == ("decode", "prefill")


@pytest.mark.parametrize("workload", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_the_fastest_tile_comes_first(workload: AttentionWorkload) -> None:
    attend = prepare_attention(workload, torch.device("cpu"), backend="triton")
    tiles = [AttentionTile(256, 16, block_n, 4, 1) for block_n in (16, 32, 64)]
    seconds = iter((3.0, 1.0, 2.0))
    timings = tune_attention(attend, tiles, lambda call: next(seconds))
    assert [timing.tile.block_n for timing in timings] == [32, 64, 16]
    assert [timing.milliseconds for timing in timings] == [1.0, 2.0, 3.0]


def attend_wrongly(tile: Any, layer: int) -> torch.Tensor:
    if tile is not None and tile.block_n == 64:
        raise MemoryError
    return torch.full((1,), 0.0 if tile is None or tile.block_n == 16 else 1.0)


def test_what_does_not_fit_comes_last_and_what_is_wrong_is_refused() -> None:
    fits, too_large, wrong = (AttentionTile(256, 16, block_n, 4, 1) for block_n in (16, 64, 32))
    timings = tune_attention(attend_wrongly, [too_large, fits], lambda call: 1.0, does_not_fit=(MemoryError,))
    assert [(timing.tile, timing.milliseconds) for timing in timings] == [(fits, 1.0), (too_large, None)]
    with pytest.raises(ArithmeticError, match="block_n=32"):
        tune_attention(attend_wrongly, [wrong], lambda call: 1.0)


def test_a_measured_tile_goes_into_the_table() -> None:
    table = with_tile(launch_table("sm_80"), "sm_80", "decode", AttentionTile(64, 16, 128, 8, 4))
    assert (table.architecture, table.measured) == ("sm_80", True)
    assert attention_tile(table.decode, 64, torch.float16).block_n == 128
    assert attention_tile(table.decode, 128, torch.float16) == attention_tile(
        launch_table("sm_80").decode, 128, torch.float16
    )
    replaced = with_tile(table, "sm_80", "decode", AttentionTile(64, 16, 32, 8, 4))
    assert len(replaced.decode) == len(table.decode)
    assert table_from_json(table_to_json(replaced)) == replaced
