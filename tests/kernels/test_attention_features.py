"""Everything beyond plain softmax: the twin against a dense oracle, and the Triton kernels against the twin."""

from __future__ import annotations

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
from pagefleet_kernels.tuning import AttentionTile

from tests.example_counts import examples

MIXED = [(1, 70), (14, 37)]
DECODE = [(1, 70), (1, 1)]
VERIFY = [(3, 60), (1, 17)]
BATCHES = {"mixed": MIXED, "decode": DECODE, "few queries": VERIFY}

PER_HEAD = torch.tensor([0.7, -1.3, 2.5, 0.05])
FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.9},
    "sinks": {"sinks_N": PER_HEAD},
    "alibi": {"alibi_slopes_N": PER_HEAD.abs()},
    "chunk": {"chunk": 24},
    "chunk of one": {"chunk": 1},
    "sinks in a window": {"sinks_N": PER_HEAD, "window": 20},
    "capped in a window": {"softcap": 0.9, "window": 33},
    "window over chunks": {"chunk": 40, "window": 20},
    "all": {"softcap": 0.9, "sinks_N": PER_HEAD, "alibi_slopes_N": PER_HEAD.abs(), "chunk": 50, "window": 30},
}
MakeBatch = Callable[..., Any]
Close = Callable[[torch.Tensor, torch.Tensor], None]


def attend(batch: Any, backend: Backend, features: dict[str, Any]) -> torch.Tensor:
    features = {
        name: value.to(batch.q_TNH.device) if isinstance(value, torch.Tensor) else value
        for name, value in features.items()
    }
    return paged_attention(
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale, **features),
        batch.max_query_len,
        backend=backend,
    )


def attend_densely(batch: Any, features: dict[str, Any]) -> torch.Tensor:
    """Each head of each query by itself, in float64, from the keys in order."""
    heads = batch.q_TNH.shape[1]
    group = heads // batch.keys[0].shape[1]
    softcap, window, chunk = (features.get(name) for name in ("softcap", "window", "chunk"))
    sinks, slopes = features.get("sinks_N"), features.get("alibi_slopes_N")
    rows = []
    for seq, (query_len, seq_len) in enumerate(batch.lens):
        for query in range(query_len):
            token, at = int(batch.query_start_loc_S1[seq]) + query, seq_len - query_len + query
            first = max(0, at - window + 1 if window else 0, at // chunk * chunk if chunk else 0)
            for head in range(heads):
                k = batch.keys[seq][first : at + 1, head // group].double()
                v = batch.values[seq][first : at + 1, head // group].double()
                scores = k @ batch.q_TNH[token, head].double() * batch.scale
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                if slopes is not None:
                    scores = scores - float(slopes[head]) * (at - torch.arange(first, at + 1, device=k.device))
                weights = scores.exp()
                total = weights.sum() + (float(sinks[head].exp()) if sinks is not None else 0.0)
                rows.append(weights @ v / total)
    return torch.stack(rows).view(-1, heads, rows[0].shape[0]).to(batch.q_TNH.dtype)


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_twin_matches_the_dense_oracle(
    features: dict[str, Any], lens: list[tuple[int, int]], make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch(lens, head_dim=32)
    assert_close(attend(batch, "torch", features), attend_densely(batch, features))


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_kernels_match_the_twin(
    features: dict[str, Any], lens: list[tuple[int, int]], make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch(lens, (4, 1), 32)
    assert_close(attend(batch, "triton", features), attend(batch, "torch", features))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 8), (128, 16), (256, 32), (64, 128)])
def test_all_features_over_shapes_and_dtypes(
    dtype: torch.dtype, head_dim: int, block_size: int, make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch([(1, 40), (9, 30)], (4, 2), head_dim, block_size, dtype)
    assert_close(attend(batch, "triton", FEATURES["all"]), attend(batch, "torch", FEATURES["all"]))


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("features", [{}, FEATURES["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pages_with_scales(
    fp8: torch.dtype,
    features: dict[str, Any],
    lens: list[tuple[int, int]],
    make_batch: MakeBatch,
    assert_close: Close,
) -> None:
    scales = (0.5, 3.0)
    batch = make_batch(lens, (4, 1), 16, dtype=torch.bfloat16, fp8_scales=scales, fp8=fp8)
    scaled = features | {"k_scale": scales[0], "v_scale": scales[1]}
    twin = attend(batch, "torch", scaled)
    assert_close(twin, attend_densely(batch, features))
    assert_close(attend(batch, "triton", scaled), twin)
    assert not torch.allclose(attend(batch, "torch", features), twin, rtol=0.1), "the scales make no difference"


def test_scales_are_of_no_matter_to_other_pages(make_batch: MakeBatch) -> None:
    batch = make_batch([(2, 20)])
    for backend in ("torch", "triton"):
        scaled = attend(batch, backend, {"k_scale": 7.0, "v_scale": 7.0})
        assert torch.equal(scaled, attend(batch, backend, {}))


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_a_sink_counts_once_however_the_context_is_cut(
    num_splits: int, make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch(DECODE)
    pages = batch.kv_cache, batch.block_tables_SB, batch.seq_lens_S
    rule = ScoreRule(scale=batch.scale, sinks_N=PER_HEAD.to(batch.q_TNH.device))
    out = decode_attention(batch.q_TNH, *pages, rule, num_splits=num_splits, backend="triton")
    assert_close(out, attend_densely(batch, FEATURES["sinks"]))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("features", [{"window": 20}, {"chunk": 32}], ids=["window", "chunk"])
def test_pages_out_of_sight_may_be_gone(backend: Backend, features: dict[str, Any], make_batch: MakeBatch) -> None:
    batch = make_batch([(1, 60), (12, 50)], block_size=8)
    expected = attend(batch, backend, features)
    nan_block = next(b for b in range(batch.kv_cache.shape[0]) if b not in batch.block_tables_SB)
    for seq, (query_len, seq_len) in enumerate(batch.lens):
        first_query = seq_len - query_len
        window, chunk = features.get("window"), features.get("chunk")
        first = max(0, first_query - window + 1) if window else first_query // chunk * chunk
        batch.block_tables_SB[seq, : first // 8] = nan_block
    assert torch.equal(attend(batch, backend, features), expected)


@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("features", [{}, FEATURES["window over chunks"]], ids=["plain", "local"])
def test_any_tile_gives_the_same(
    block_m: int, block_n: int, features: dict[str, Any], make_batch: MakeBatch, assert_close: Close
) -> None:
    batch = make_batch([(20, 70), (7, 7)], (2, 1), 32)
    tile = AttentionTile(256, block_m, block_n, 4, 1)
    out = varlen_attention(
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale, **features),
        batch.max_query_len,
        tile=tile,
        backend="triton",
    )
    assert_close(out, attend(batch, "torch", features))


@settings(deadline=None, max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(st.tuples(st.integers(1, 15), st.integers(0, 20)), min_size=1, max_size=3),
    padding_rows=st.integers(0, 3),
    padding_tokens=st.integers(0, 9),
    features=st.fixed_dictionaries({"window": st.none() | st.integers(1, 40), "chunk": st.none() | st.integers(1, 40)}),
    heads=st.sampled_from([(2, 1), (3, 1)]),
    block_size=st.sampled_from([4, 12, 16, 64]),
)
def test_any_padded_batch(
    lens: list[tuple[int, int]],
    padding_rows: int,
    padding_tokens: int,
    features: dict[str, Any],
    heads: tuple[int, int],
    block_size: int,
    make_batch: MakeBatch,
) -> None:
    batch = make_batch([(query, query + context) for query, context in lens], heads, 16, block_size)
    rows, tokens = len(lens), batch.q_TNH.shape[0]
    starts, tables = batch.query_start_loc_S1, batch.block_tables_SB
    out = varlen_attention(
        torch.cat((batch.q_TNH, batch.q_TNH[:1].expand(padding_rows + padding_tokens, -1, -1))),
        batch.kv_cache,
        torch.cat((tables, tables[:1].expand(padding_rows, -1))),
        torch.cat((starts, starts[-1] + 1 + torch.arange(padding_rows, dtype=torch.int32, device=starts.device))),
        torch.cat((batch.seq_lens_S, batch.seq_lens_S.new_zeros(padding_rows))),
        ScoreRule(scale=batch.scale, **features),
        batch.max_query_len,
        backend="triton",
    )
    assert out.shape[0] == tokens + padding_rows + padding_tokens
    torch.testing.assert_close(out[:tokens], attend(batch, "torch", features), rtol=1e-4, atol=1e-5)
    assert not out[tokens:].any(), f"padding after {rows} rows"


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # numpy's, in the interpreter: infinity is right
def test_huge_scores_are_capped(make_batch: MakeBatch, assert_close: Close) -> None:
    batch = make_batch(MIXED)
    batch.q_TNH.mul_(1e6)
    out = attend(batch, "triton", {"softcap": 30.0})
    assert out.isfinite().all()
    assert_close(out, attend(batch, "torch", {"softcap": 30.0}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("window", 0, "at least 1 key"),
        ("chunk", 0, "None is no chunks"),
        ("softcap", 0.0, "softcap of attention must be a positive number"),
        ("softcap", float("inf"), "positive"),
        ("scale", -1.0, "scale of attention"),
        ("k_scale", 0.0, "k_scale"),
        ("v_scale", float("nan"), "v_scale"),
    ],
)
def test_rules_that_make_no_sense_are_refused(field: str, value: float, message: str) -> None:
    fields: dict[str, Any] = {"scale": 1.0, field: value}
    with pytest.raises(UnsupportedShapeError, match=message):
        ScoreRule(**fields)


def test_sinks_and_pools_that_do_not_fit_are_refused(make_batch: MakeBatch) -> None:
    batch = make_batch([(1, 9)])
    with pytest.raises(UnsupportedShapeError, match=r"sinks_N must be contiguous float32 \[4\]"):
        attend(batch, "torch", {"sinks_N": torch.zeros(3)})
    with pytest.raises(UnsupportedShapeError, match="alibi_slopes_N"):
        attend(batch, "torch", {"alibi_slopes_N": torch.zeros(4, dtype=torch.float16)})
    pages = batch.kv_cache.to(torch.float64), batch.block_tables_SB, batch.seq_lens_S
    with pytest.raises(UnsupportedShapeError, match=r"float64 is not supported.*bfloat16.*float8_e4m3fn"):
        decode_attention(batch.q_TNH, *pages, ScoreRule(scale=1.0))
