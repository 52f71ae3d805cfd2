"""The attention kernels at the sizes of serving, which only a GPU gets through. The other files run there too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pagefleet_kernels.attention import paged_attention
from pagefleet_kernels.attention_tuning import (
    AttentionWorkload,
    Family,
    attention_candidates,
    prepare_attention,
    tune_attention,
)
from pagefleet_kernels.cascade_attention import cascade_attention
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.score_rule import ScoreRule
from torch.nn.attention.bias import causal_lower_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PER_HEAD = torch.linspace(-1.0, 1.0, 16)
FEATURES: dict[str, dict[str, Any]] = {
    "capped": {"softcap": 20.0, "window": 1000},
    "sinks": {"sinks_N": PER_HEAD, "window": 128},
    "alibi": {"alibi_slopes_N": PER_HEAD.abs() / 100},
    "chunk": {"chunk": 700},
}
LENS = {
    "mixed": [(1, 1328), (5, 18), (129, 463)],
    "prompts": [(1024, 1024), (333, 4000)],
    "decode": [(1, length) for length in (1, 17, 512, 4096, 1023)],
    "long decode": [(1, 30_000)],
}


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "sliding_window"),
    [
        ((4, 4), 64, 16, torch.bfloat16, None),
        ((8, 2), 80, 32, torch.float16, None),
        ((5, 1), 128, 128, torch.bfloat16, 256),
        ((32, 8), 128, 16, torch.bfloat16, None),
        ((8, 2), 128, 64, torch.float32, 64),
        ((16, 8), 256, 16, torch.bfloat16, 128),
        ((4, 4), 256, 8, torch.float32, None),
    ],
)
def test_paged_attention_at_the_sizes_of_serving(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
    make_batch: Callable[..., Any],
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    batch = make_batch(lens, heads, head_dim, block_size, dtype)
    arguments = (
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale, window=sliding_window),
        batch.max_query_len,
    )
    assert_close(paged_attention(*arguments), paged_attention(*arguments, backend="torch"))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("fp8_scales", [None, (0.5, 2.0)], ids=["bf16", "fp8"])
def test_features_at_the_sizes_of_serving(
    fp8_scales: tuple[float, float] | None,
    lens: list[tuple[int, int]],
    features: dict[str, Any],
    make_batch: Callable[..., Any],
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    batch = make_batch(lens, (16, 4), 128, 16, torch.bfloat16, fp8_scales=fp8_scales)
    k_scale, v_scale = fp8_scales or (1.0, 1.0)
    scored: dict[str, Any] = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in features.items()
    }

    def attend(backend: Backend | None) -> torch.Tensor:
        return paged_attention(
            batch.q_TNH,
            batch.kv_cache,
            batch.block_tables_SB,
            batch.query_start_loc_S1,
            batch.seq_lens_S,
            ScoreRule(scale=batch.scale, k_scale=k_scale, v_scale=v_scale, **scored),
            batch.max_query_len,
            backend=backend,
        )

    assert_close(attend(None), attend("torch"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("query_len", "seq_len"), [(4096, 4096), (1, 4096), (3, 2000)])
def test_results_are_those_of_torch(
    head_dim: int, block_size: int, query_len: int, seq_len: int, make_batch: Callable[..., Any]
) -> None:
    batch = make_batch([(query_len, seq_len)], (32, 8), head_dim, block_size, torch.bfloat16)
    out = paged_attention(
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale),
        query_len,
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (batch.q_TNH, batch.keys[0], batch.values[0]))
    mask = causal_lower_right(query_len, seq_len)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("lens", [[(1, 5000)] * 48, [(1, 4200), (600, 4900), (5, 4100)]], ids=["decode", "mixed"])
def test_cascade_is_plain_attention(lens: list[tuple[int, int]], make_batch: Callable[..., Any]) -> None:
    batch = make_batch(lens, (32, 8), 128, 16, torch.bfloat16)
    batch.block_tables_SB[:, :250] = batch.block_tables_SB[0, :250]
    arguments = (
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale),
        batch.max_query_len,
    )
    torch.testing.assert_close(
        cascade_attention(*arguments, 250), paged_attention(*arguments), rtol=1.6e-2, atol=1.6e-2
    )


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("share", range(5))  # each takes seconds to compile: shares can run side by side
def test_every_candidate_tile_is_right(share: int, family: Family, head_dim: int) -> None:
    triton = pytest.importorskip("triton")
    query_len = 1 if family == "decode" else 200
    workload = AttentionWorkload(
        num_seqs=3, query_len=query_len, seq_len=700, num_heads=16, num_kv_heads=4, head_dim=head_dim
    )
    shared = getattr(torch.cuda.get_device_properties(0), "shared_memory_per_block_optin", 99 * 1024)
    tiles = attention_candidates(family, head_dim, torch.bfloat16, shared)[share::5]
    attend = prepare_attention(workload, torch.device("cuda"))
    timings = tune_attention(attend, tiles, lambda call: 0.0, does_not_fit=(triton.OutOfResources,))
    assert sum(timing.milliseconds is not None for timing in timings) > len(tiles) // 2
