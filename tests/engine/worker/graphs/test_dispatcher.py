"""Which steps run as which graph, and modes and sizes as the configuration gives them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.worker.graphs.dispatcher import (
    BatchDescriptor,
    GraphDispatcher,
    coarser,
    default_sizes,
    resolve_sizes,
)
from pagefleet_engine.worker.graphs.modes import GraphMode, resolve_graph_mode

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
DECODE_ONLY, BOTH = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE
SIZES = (1, 2, 4, 8, 16)
MAX_NUM_SEQS = 6


def decode(size: int) -> BatchDescriptor:
    return BatchDescriptor(size, size, uniform=True)


def mixed(size: int) -> BatchDescriptor:
    return BatchDescriptor(size, min(size, MAX_NUM_SEQS), uniform=False)


def pieces(size: int) -> BatchDescriptor:
    return BatchDescriptor(size, None, uniform=False)


CASES = [
    # mode, tokens, rows, longest query, runs as, padded to
    (NONE, 1, 1, 1, NONE, BatchDescriptor(1, 1, uniform=True)),
    (NONE, 9, 3, 7, NONE, BatchDescriptor(9, 3, uniform=False)),
    (PIECEWISE, 1, 1, 1, PIECEWISE, pieces(1)),
    (PIECEWISE, 5, 5, 1, PIECEWISE, pieces(8)),
    (PIECEWISE, 9, 2, 8, PIECEWISE, pieces(16)),
    (PIECEWISE, 17, 2, 9, NONE, BatchDescriptor(17, 2, uniform=False)),
    (FULL, 3, 3, 1, FULL, decode(4)),
    (FULL, 5, 5, 1, FULL, decode(6)),
    (FULL, 6, 6, 1, FULL, decode(6)),
    (FULL, 3, 1, 3, FULL, mixed(4)),
    (FULL, 3, 2, 2, FULL, mixed(4)),
    (FULL, 16, 6, 11, FULL, mixed(16)),
    (FULL, 17, 6, 12, NONE, BatchDescriptor(17, 6, uniform=False)),
    (DECODE_ONLY, 2, 2, 1, FULL, decode(2)),
    (DECODE_ONLY, 2, 1, 2, NONE, BatchDescriptor(2, 1, uniform=False)),
    (BOTH, 4, 4, 1, FULL, decode(4)),
    (BOTH, 4, 3, 2, PIECEWISE, pieces(4)),
    (BOTH, 40, 3, 30, NONE, BatchDescriptor(40, 3, uniform=False)),
]


@pytest.mark.parametrize(("mode", "tokens", "rows", "longest", "runs_as", "padded"), CASES)
def test_a_step_finds_its_graph(
    mode: GraphMode, tokens: int, rows: int, longest: int, runs_as: GraphMode, padded: BatchDescriptor
) -> None:
    dispatcher = GraphDispatcher(mode, SIZES, MAX_NUM_SEQS)
    assert dispatcher.dispatch(tokens, rows, longest) == (runs_as, padded)


@pytest.mark.parametrize(
    ("mode", "runs_as"), [(NONE, NONE), (PIECEWISE, PIECEWISE), (FULL, NONE), (DECODE_ONLY, NONE), (BOTH, PIECEWISE)]
)
def test_with_a_shared_prefix_attention_is_in_no_graph(mode: GraphMode, runs_as: GraphMode) -> None:
    dispatcher = GraphDispatcher(mode, SIZES, MAX_NUM_SEQS)
    padded = pieces(4) if runs_as is PIECEWISE else BatchDescriptor(3, 3, uniform=True)
    assert dispatcher.dispatch(3, 3, 1, cascade=True) == (runs_as, padded)


@given(
    mode=st.sampled_from(GraphMode),
    sizes=st.sets(st.integers(1, 60), min_size=1),
    max_num_seqs=st.integers(1, 40),
    query_lens=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_padding_is_the_least_there_is(
    mode: GraphMode, sizes: set[int], max_num_seqs: int, query_lens: list[int]
) -> None:
    query_lens = query_lens[:max_num_seqs]
    tokens, rows = sum(query_lens), len(query_lens)
    dispatcher = GraphDispatcher(mode, sorted(sizes), max_num_seqs)
    runs_as, padded = dispatcher.dispatch(tokens, rows, max(query_lens))
    if runs_as is NONE:
        assert padded == BatchDescriptor(tokens, rows, uniform=tokens == rows)
        return
    assert (runs_as, padded) in dispatcher.keys
    assert padded.num_tokens >= tokens
    assert padded.rows_for(rows) >= rows
    assert padded.max_query_len >= max(query_lens)
    smaller = {min(size, max_num_seqs) for size in sizes} if padded.uniform else sizes
    assert padded.num_tokens == min(size for size in smaller if size >= tokens)


def test_graphs_are_captured_from_the_largest_down() -> None:
    keys = GraphDispatcher(BOTH, SIZES, MAX_NUM_SEQS).keys
    counts = [key.num_tokens for _, key in keys]
    assert counts == sorted(counts, reverse=True)
    assert set(keys) == {(PIECEWISE, pieces(size)) for size in SIZES} | {(FULL, decode(n)) for n in (1, 2, 4, 6)}
    assert GraphDispatcher(NONE, SIZES, MAX_NUM_SEQS).keys == ()


def test_steps_that_compute_prompts_may_be_padded_further() -> None:
    dispatcher = GraphDispatcher(BOTH, SIZES, MAX_NUM_SEQS, mixed_sizes=(4, 16))
    assert dispatcher.dispatch(2, 1, 2) == (PIECEWISE, pieces(4))
    assert dispatcher.dispatch(7, 2, 6) == (PIECEWISE, pieces(16))
    assert dispatcher.dispatch(2, 2, 1) == (FULL, decode(2))
    assert dispatcher.dispatch(2, 2, 1, cascade=True) == (PIECEWISE, pieces(4))
    assert {key for mode, key in dispatcher.keys if mode is PIECEWISE} == {pieces(4), pieces(16)}


@given(sizes=st.sets(st.integers(1, 600), min_size=1))
def test_coarser_sizes_lie_apart_and_leave_no_gap(sizes: set[int]) -> None:
    kept = coarser(sorted(sizes))
    assert set(kept) <= sizes
    assert kept[-1] == max(sizes)
    assert all(5 * small <= 4 * large for small, large in pairwise(kept))
    for size in sizes - set(kept):
        assert any(size < larger < 1.25 * size for larger in kept)


def test_coarser_sizes_of_the_default() -> None:
    assert len(default_sizes(256, 2048)) == 51
    assert coarser(default_sizes(256, 2048)) == (
        1, 2, 4, 8, 16, 24, 32, 40, 56, 72, 96, 128, 160, 200, 256, 320, 400, 512,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "device", "mode"),
    [
        ("auto", "cuda", BOTH),
        ("auto", "cpu", NONE),
        ("none", "cpu", NONE),
        ("none", "cuda", NONE),
        ("full", "cuda", FULL),
        ("full_decode_only", "cuda", DECODE_ONLY),
        ("piecewise", "cuda", PIECEWISE),
        ("full_and_piecewise", "cuda", BOTH),
    ],
)
def test_a_setting_means_a_mode(setting: str, device: str, mode: GraphMode) -> None:
    assert resolve_graph_mode(setting, device) is mode


@pytest.mark.parametrize(
    ("setting", "device", "message"),
    [
        ("fast", "cuda", "cuda_graphs is 'fast': give one of auto, none, piecewise, full"),
        ("full", "cpu", "the device is cpu: leave --cuda-graphs out"),
    ],
)
def test_a_mode_that_cannot_be_says_what_can(setting: str, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_graph_mode(setting, device)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "last"),
    [
        (1, 2048, [1, 2]),
        (3, 2048, [1, 2, 3, 4, 6]),
        (6, 8, [1, 2, 4, 6, 8]),
        (256, 2048, [*range(432, 513, 16)]),
        (200, 2048, [368, 384, 400]),
        (700, 8192, [512, 576, 640, 700]),
        (1024, 8192, [*range(512, 1025, 64)]),
        (256, 256, [240, 248, 256]),
        (1000, 1000, [896, 960, 1000]),
    ],
)
def test_default_sizes_follow_the_limits(max_num_seqs: int, max_num_batched_tokens: int, last: list[int]) -> None:
    assert list(default_sizes(max_num_seqs, max_num_batched_tokens))[-len(last) :] == last


@given(max_num_seqs=st.integers(1, 3000), more=st.integers(0, 9000))
def test_default_sizes_ascend_and_cover_every_step_of_decoding(max_num_seqs: int, more: int) -> None:
    sizes = default_sizes(max_num_seqs, max_num_seqs + more)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert max_num_seqs <= sizes[-1] <= max_num_seqs + more
    assert all(after - before <= 64 for before, after in pairwise(sizes))
    assert max_num_seqs in sizes


def test_sizes_as_the_configuration_gives_them() -> None:
    assert resolve_sizes(" 8, 1,2 ,8", 256, 64) == (1, 2, 8)
    assert resolve_sizes(None, 256, 2048) == default_sizes(256, 2048)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("", "has '': give token counts with commas between"),
        ("1,,2", "has '': give token counts"),
        ("1;2", "has '1;2'"),
        ("0", "has 0: a step has 1 to 64 tokens"),
        ("-4", "has '-4'"),
        ("65", r"has 65: a step has 1 to 64 tokens \(max_num_batched_tokens\)"),
        ("٣", "give token counts"),
    ],
)
def test_sizes_that_cannot_be_are_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_sizes(setting, 256, 64)
