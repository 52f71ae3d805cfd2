"""The twin of the attention kernels against two independent oracles: one sequence at a time, and torch's own SDPA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagefleet_kernels.attention import paged_attention
from pagefleet_kernels.score_rule import ScoreRule

from tests.example_counts import examples

MIXED = [(1, 133), (5, 18), (29, 63)]


def attend_one_by_one(batch: Any, sliding_window: int | None) -> torch.Tensor:
    """Each sequence from its own keys in order, in float32: no pages, no padding, no batch."""
    outputs = []
    group = batch.q_TNH.shape[1] // batch.keys[0].shape[1]
    for seq, (query_len, seq_len) in enumerate(batch.lens):
        start = int(batch.query_start_loc_S1[seq])
        q = batch.q_TNH[start : start + query_len].float()
        k = batch.keys[seq].float().repeat_interleave(group, dim=1)
        v = batch.values[seq].float().repeat_interleave(group, dim=1)
        distance = torch.arange(seq_len - query_len, seq_len)[:, None] - torch.arange(seq_len)
        hidden = distance < 0
        if sliding_window is not None:
            hidden |= distance >= sliding_window
        scores = torch.einsum("qnh,knh->nqk", q, k) * batch.scale
        weights = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(-1)
        outputs.append(torch.einsum("nqk,knh->qnh", weights, v))
    return torch.cat(outputs).to(batch.q_TNH.dtype)


def twin(batch: Any, sliding_window: int | None = None) -> torch.Tensor:
    return paged_attention(
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale, window=sliding_window),
        batch.max_query_len,
        backend="torch",
    )


@pytest.mark.parametrize("lens", [MIXED, [(1, 1), (1, 47), (1, 16)], [(40, 40)]], ids=["mixed", "decode", "prompt"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("sliding_window", [None, 1, 20])
def test_twin_matches_one_by_one(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    sliding_window: int | None,
    make_batch: Callable[..., Any],
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    batch = make_batch(lens, heads, head_dim, block_size)
    assert_close(twin(batch, sliding_window), attend_one_by_one(batch, sliding_window))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_twin_rounds_once(
    dtype: torch.dtype, make_batch: Callable[..., Any], assert_close: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    batch = make_batch(MIXED, dtype=dtype)
    assert_close(twin(batch), attend_one_by_one(batch, None))


def test_twin_matches_sdpa(make_batch: Callable[..., Any]) -> None:
    batch = make_batch([(50, 50)], heads=(8, 2), head_dim=80)
    q, k, v = (x.transpose(0, 1)[None] for x in (batch.q_TNH, batch.keys[0], batch.values[0]))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(twin(batch), expected, rtol=1e-5, atol=1e-5)


def test_a_prompt_in_chunks_is_the_prompt_at_once(make_batch: Callable[..., Any]) -> None:
    whole = make_batch([(45, 45)])
    expected = twin(whole)
    for start, end in [(0, 7), (7, 8), (8, 40), (40, 45)]:
        chunk = paged_attention(
            whole.q_TNH[start:end],
            whole.kv_cache,
            whole.block_tables_SB,
            torch.tensor([0, end - start]),
            torch.tensor([end]),
            ScoreRule(scale=whole.scale),
            end - start,
        )
        torch.testing.assert_close(chunk, expected[start:end], rtol=1e-5, atol=1e-5)


def test_padding_of_the_batch_gives_zeros(make_batch: Callable[..., Any]) -> None:
    batch = make_batch([(2, 9), (3, 30)])
    padded = paged_attention(
        torch.cat((batch.q_TNH, batch.q_TNH[:2])),
        batch.kv_cache,
        torch.cat((batch.block_tables_SB, batch.block_tables_SB[:1])),
        torch.tensor([0, 2, 5, 5]),
        torch.tensor([9, 30, 0]),
        ScoreRule(scale=batch.scale),
        3,
    )
    torch.testing.assert_close(padded[:5], twin(batch))
    assert padded[5:].count_nonzero() == 0


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=5),
    sliding_window=st.none() | st.integers(1, 50),
    block_size=st.sampled_from([1, 8, 24]),
)
def test_twin_matches_one_by_one_on_any_batch(
    lens: list[tuple[int, int]], sliding_window: int | None, block_size: int, make_batch: Callable[..., Any]
) -> None:
    batch = make_batch([(query, query + context) for query, context in lens], block_size=block_size, head_dim=16)
    torch.testing.assert_close(
        twin(batch, sliding_window), attend_one_by_one(batch, sliding_window), rtol=1e-4, atol=1e-5
    )
