"""The Triton attention kernels against their twin: shapes, dtypes, windows, ragged batches and padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagefleet_kernels.attention import paged_attention, varlen_attention
from pagefleet_kernels.decode_attention import decode_attention
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.score_rule import ScoreRule

from tests.example_counts import examples
from tests.grids import each_once

MIXED = [(1, 133), (5, 18), (29, 63)]
DECODE = [(1, 133), (1, 1), (1, 63)]
SHAPES = [(64, 16), (80, 8), (96, 32), (128, 16), (256, 16), (64, 128)]
"""Head dimension and block size."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WINDOWS = [None, 1, 7, 40]
Close = Callable[[torch.Tensor, torch.Tensor], None]
PLAIN = ScoreRule(scale=1.0)
MakeBatch = Callable[..., Any]


def run_varlen(batch: Any, backend: Backend, sliding_window: int | None = None) -> torch.Tensor:
    return varlen_attention(
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale, window=sliding_window),
        batch.max_query_len,
        backend=backend,
    )


def run_decode(
    batch: Any, backend: Backend, sliding_window: int | None = None, num_splits: int | None = None
) -> torch.Tensor:
    return decode_attention(
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale, window=sliding_window),
        num_splits=num_splits,
        backend=backend,
    )


@pytest.mark.parametrize(("heads", "shape"), each_once([(4, 4), (8, 2), (5, 1)], SHAPES))
def test_varlen_over_shapes(
    heads: tuple[int, int], shape: tuple[int, int], make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch(MIXED, heads, *shape)
    assert_close(run_varlen(batch, "triton"), run_varlen(batch, "torch"))


@pytest.mark.parametrize(("dtype", "sliding_window"), each_once(DTYPES, WINDOWS))
def test_varlen_over_dtypes_and_windows(
    dtype: torch.dtype, sliding_window: int | None, make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch(MIXED, dtype=dtype)
    assert_close(run_varlen(batch, "triton", sliding_window), run_varlen(batch, "torch", sliding_window))


@pytest.mark.parametrize(("heads", "shape"), each_once([(4, 4), (8, 2), (5, 1), (20, 1)], SHAPES))
def test_decode_over_shapes(
    heads: tuple[int, int], shape: tuple[int, int], make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch(DECODE, heads, *shape)
    assert_close(run_decode(batch, "triton"), run_decode(batch, "torch"))


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(("dtype", "sliding_window"), each_once(DTYPES, WINDOWS))
def test_decode_over_dtypes_windows_and_splits(
    dtype: torch.dtype, sliding_window: int | None, num_splits: int, make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch(DECODE[:2], dtype=dtype)
    out = run_decode(batch, "triton", sliding_window, num_splits)
    assert_close(out, run_decode(batch, "torch", sliding_window))


def test_more_splits_than_tiles(make_batch: MakeBatch, assert_close: Close) -> None:
    batch = make_batch([(1, 70), (1, 3)])
    assert_close(run_decode(batch, "triton", None, 32), run_decode(batch, "torch"))


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_paged_attention_serves_both_kinds_of_batch(
    lens: list[tuple[int, int]], make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch(lens)
    out = paged_attention(
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale),
        batch.max_query_len,
        backend="triton",
    )
    assert_close(out, run_varlen(batch, "torch"))


def test_decode_and_varlen_agree_on_a_decode_batch(make_batch: MakeBatch, assert_close: Close) -> None:
    batch = make_batch(DECODE)
    assert_close(run_varlen(batch, "triton"), run_decode(batch, "triton"))


@settings(deadline=None, max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=5),
    sliding_window=st.none() | st.integers(1, 40),
    heads=st.sampled_from([(2, 2), (6, 2), (3, 1)]),
)
def test_varlen_on_any_batch(
    lens: list[tuple[int, int]], sliding_window: int | None, heads: tuple[int, int], make_batch: MakeBatch
) -> None:
    batch = make_batch([(query, query + context) for query, context in lens], heads, 16, 8)
    torch.testing.assert_close(
        run_varlen(batch, "triton", sliding_window), run_varlen(batch, "torch", sliding_window), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_padded_batches_keep_the_real_rows(
    index_dtype: torch.dtype, device: torch.device, make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch([(2, 9), (20, 30)])
    padded = varlen_attention(
        torch.cat((batch.q_TNH, batch.q_TNH[:3])),
        batch.kv_cache,
        torch.cat((batch.block_tables_SB, batch.block_tables_SB)).to(index_dtype),
        torch.tensor([0, 2, 22, 22, 22], dtype=index_dtype, device=device),
        torch.tensor([9, 30, 0, 0], dtype=index_dtype, device=device),
        ScoreRule(scale=batch.scale),
        20,
        backend="triton",
    )
    assert_close(padded[:22], run_varlen(batch, "torch"))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_an_empty_sequence_decodes_to_zeros(
    num_splits: int, device: torch.device, make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch([(1, 40), (1, 20)])
    out = decode_attention(
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        torch.tensor([40, 0], dtype=torch.int32, device=device),
        ScoreRule(scale=batch.scale),
        num_splits=num_splits,
        backend="triton",
    )
    assert_close(out[:1], run_decode(batch, "torch")[:1])
    assert out[1].count_nonzero() == 0


def test_huge_scores_do_not_overflow(make_batch: MakeBatch, assert_close: Close) -> None:
    batch = make_batch(MIXED)
    batch.q_TNH.mul_(1e4)
    assert_close(run_varlen(batch, "triton"), run_varlen(batch, "torch"))


def test_nothing_to_attend_to(device: torch.device, make_batch: MakeBatch) -> None:
    batch = make_batch([(1, 4)])
    no_index = torch.empty(0, dtype=torch.int32, device=device)
    empty = batch.q_TNH[:0], batch.kv_cache, batch.block_tables_SB[:0]
    start = torch.zeros(1, dtype=torch.int32, device=device)
    assert varlen_attention(*empty, start, no_index, PLAIN, 1, backend="triton").shape == (0, 4, 64)
    only_padding = batch.q_TNH, batch.kv_cache, batch.block_tables_SB[:0]
    assert varlen_attention(*only_padding, start, no_index, PLAIN, 1, backend="triton").shape == (1, 4, 64)
    assert decode_attention(*empty, no_index, PLAIN, backend="triton").shape == (0, 4, 64)


def test_misfits_are_refused(make_batch: MakeBatch) -> None:
    batch = make_batch([(1, 9), (1, 20)])
    pages = batch.kv_cache, batch.block_tables_SB
    with pytest.raises(UnsupportedShapeError, match="multiple of the 2 key heads"):
        decode_attention(batch.q_TNH[:, :3], *pages, batch.seq_lens_S, PLAIN)
    with pytest.raises(UnsupportedShapeError, match="one query per sequence"):
        decode_attention(batch.q_TNH[:1], *pages, batch.seq_lens_S, PLAIN)
    with pytest.raises(UnsupportedShapeError, match="power of two"):
        decode_attention(batch.q_TNH, *pages, batch.seq_lens_S, PLAIN, num_splits=3)
    with pytest.raises(UnsupportedShapeError, match="at least 1 key"):
        decode_attention(batch.q_TNH, *pages, batch.seq_lens_S, ScoreRule(scale=1.0, window=0))
    with pytest.raises(UnsupportedShapeError, match="one row"):
        decode_attention(batch.q_TNH, batch.kv_cache, batch.block_tables_SB[:1], batch.seq_lens_S, PLAIN)
    with pytest.raises(UnsupportedShapeError, match="3 query starts"):
        varlen_attention(batch.q_TNH, *pages, batch.query_start_loc_S1[:2], batch.seq_lens_S, PLAIN, 1)
    with pytest.raises(UnsupportedShapeError, match="contiguous"):
        decode_attention(batch.q_TNH.mT.contiguous().mT, *pages, batch.seq_lens_S, PLAIN)
    with pytest.raises(UnsupportedShapeError, match=r"1 to 256"):
        decode_attention(
            batch.q_TNH.new_zeros(1, 1, 512),
            batch.q_TNH.new_zeros(1, 2, 1, 8, 512),
            batch.block_tables_SB[:1],
            batch.seq_lens_S[:1],
            PLAIN,
            backend="triton",
        )
