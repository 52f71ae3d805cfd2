"""Cascade attention: the same as attention over each whole context, whoever shares how much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels import cascade_attention as cascade
from pagefleet_kernels.attention import varlen_attention
from pagefleet_kernels.attention_kernel import SHARED
from pagefleet_kernels.cascade_attention import cascade_attention
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.score_rule import ScoreRule

from tests.example_counts import examples

BLOCK_SIZE = 8
HEADS = (4, 2)


def shared_batch(
    lens: list[tuple[int, int]],
    common: int,
    padding: int = 0,
    fp8: bool = False,
    seed: int = 0,
    **features: Any,
) -> tuple[Any, ...]:
    """Arguments of `cascade_attention`: (query_len, seq_len) pairs that share `common` blocks, then padding rows."""
    torch.manual_seed(seed)
    blocks_each = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lens]
    order = torch.randperm(sum(blocks_each) + 2).to(torch.int32)
    kv_cache = torch.randn(len(order), 2, HEADS[1], BLOCK_SIZE, 16)
    tables = torch.zeros(len(lens) + padding, max(blocks_each) + 1, dtype=torch.int32)
    used = common
    for seq, num_blocks in enumerate(blocks_each):
        tables[seq, :common] = order[:common]
        tables[seq, common:num_blocks] = order[used : used + num_blocks - common]
        used += num_blocks - common
    query_lens = [query_len for query_len, _ in lens] + [1] * padding
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([seq_len for _, seq_len in lens] + [0] * padding, dtype=torch.int32)
    q = torch.randn(int(starts[-1]), HEADS[0], 16)
    rule = ScoreRule(scale=0.25, **features)
    return q, kv_cache.to(FP8) if fp8 else kv_cache, tables, starts, seq_lens, rule, max(query_lens), common


def check(batch: tuple[Any, ...]) -> torch.Tensor:
    out = cascade_attention(*batch, backend="triton")
    expected = varlen_attention(*batch[:-1], backend="torch")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    return out


@pytest.mark.parametrize("lens", [[(1, 50), (1, 41), (1, 70)], [(1, 50), (5, 46), (20, 60)]], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    "features",
    [{}, {"softcap": 2.0, "sinks_N": torch.randn(4)}, {"alibi_slopes_N": torch.rand(4)}, {"window": 30}],
    ids=["plain", "capped with sinks", "alibi", "window"],
)
def test_it_is_attention_over_whole_contexts(lens: list[tuple[int, int]], features: dict[str, Any]) -> None:
    check(shared_batch(lens, common=5, **features))


def test_an_fp8_pool_with_scales() -> None:
    check(shared_batch([(1, 30), (3, 29)], common=3, fp8=True, k_scale=0.5, v_scale=2.0))


@pytest.mark.parametrize("lens", [[(1, 30), (1, 41)], [(1, 30), (9, 41)]], ids=["decode", "mixed"])
def test_padding_comes_out_as_zeros(lens: list[tuple[int, int]]) -> None:
    out = check(shared_batch(lens, common=3, padding=2))
    assert not out[-2:].any()
    assert out[:-2].all()


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which rows each launch of the kernel serves, from now on."""
    seen: list[int] = []
    run = vars(cascade)["run"]

    def note(launch: Any, *args: Any) -> None:
        seen.append(launch.rows)
        run(launch, *args)

    monkeypatch.setattr(cascade, "run", note)
    return seen


def test_the_prefix_is_attended_by_all_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = launches(monkeypatch)
    check(shared_batch([(1, 30), (1, 41)], common=3))
    assert seen.count(SHARED) == 1


@pytest.mark.parametrize(
    ("common", "lens", "features"),
    [
        (0, [(1, 30), (1, 41)], {}),
        (3, [(1, 41)], {}),
        (3, [(1, 30), (1, 41)], {"chunk": 20}),
    ],
    ids=["no prefix", "one sequence", "chunks"],
)
def test_where_it_cannot_pay_it_is_plain_attention(
    common: int, lens: list[tuple[int, int]], features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = launches(monkeypatch)
    check(shared_batch(lens, common, **features))
    assert not seen


def test_parts_of_too_many_queries_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = launches(monkeypatch)
    monkeypatch.setattr(cascade, "MAX_PART_BYTES", 1000)
    check(shared_batch([(1, 30), (1, 41)], common=3))
    assert not seen


@settings(deadline=None, max_examples=examples(5))
@given(
    common=st.integers(1, 6),
    rows=st.lists(st.tuples(st.integers(1, 10), st.integers(0, 20)), min_size=2, max_size=3),
    padding=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_any_batch(common: int, rows: list[tuple[int, int]], padding: int, seed: int) -> None:
    lens = [(query, common * BLOCK_SIZE + context + query) for query, context in rows]
    check(shared_batch(lens, common, padding, seed=seed))


def test_more_common_blocks_than_a_table_holds_are_refused() -> None:
    batch = shared_batch([(1, 30), (1, 41)], common=3)
    for wrong in (-1, batch[2].shape[1] + 1):
        with pytest.raises(UnsupportedShapeError, match="num_common_blocks must be 0 to 7"):
            cascade_attention(*(*batch[:-1], wrong))


@pytest.mark.parametrize("features", [{}, {"softcap": 1.0}])
def test_its_twin_needs_no_triton(features: dict[str, Any], assert_close: Callable[..., None]) -> None:
    batch = shared_batch([(1, 30), (4, 41)], common=3, **features)
    twin = cascade_attention(*batch)
    assert_close(twin, varlen_attention(*batch[:-1]))
