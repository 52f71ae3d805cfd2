"""Attention that rounds what it gives: as attention by the twin, and rounding after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagefleet_kernels import rounded_attention as module
from pagefleet_kernels.attention import paged_attention
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.quantize import Quantized, QuantizeSpec, quantize
from pagefleet_kernels.rounded_attention import rounded_attention
from pagefleet_kernels.score_rule import ScoreRule

MakeBatch = Callable[..., Any]
BATCHES = {"decode": [(1, 70), (1, 3)], "few queries": [(2, 60), (1, 17)]}
SPECS = {
    "fp8 tokens": QuantizeSpec(FP8),
    "int8 tokens": QuantizeSpec(torch.int8),
    "fp8 groups": QuantizeSpec(FP8, group=64),
    "fp8 fixed": QuantizeSpec(FP8, torch.tensor([0.01])),
}


def on(device: torch.device, spec: QuantizeSpec) -> QuantizeSpec:
    fixed = spec.static_scale
    return spec if fixed is None else QuantizeSpec(spec.dtype, fixed.to(device))


def attend(batch: Any, spec: QuantizeSpec, max_query_len: int | None = None) -> Quantized | None:
    return rounded_attention(
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        ScoreRule(scale=batch.scale),
        max_query_len or batch.max_query_len,
        spec,
        backend="triton",
    )


def as_numbers(rounded: Quantized, group: int | None) -> torch.Tensor:
    scale = rounded.scale if group is None else rounded.scale.repeat_interleave(group, 1)
    return rounded.values.float() * scale


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("heads", [(4, 2), (6, 2)])
def test_it_is_attention_and_then_rounding(
    heads: tuple[int, int],
    spec: QuantizeSpec,
    lens: list[tuple[int, int]],
    make_batch: MakeBatch,
    device: torch.device,
) -> None:
    spec = on(device, spec)
    batch = make_batch(lens, heads, 32)
    arguments = batch.q_TNH, batch.kv_cache, batch.block_tables_SB, batch.query_start_loc_S1, batch.seq_lens_S
    exact = paged_attention(*arguments, ScoreRule(scale=batch.scale), batch.max_query_len, backend="torch").flatten(1)
    expected, rounded = quantize(exact, spec, backend="torch"), attend(batch, spec)
    assert rounded is not None
    torch.testing.assert_close(rounded.scale, expected.scale, rtol=1e-4, atol=1e-9)
    # a sum that lies between two numbers may be rounded to either
    step = 0.07 * exact.abs() if spec.dtype == FP8 else expected.scale
    off = (as_numbers(rounded, spec.group) - exact).abs()
    assert (off <= (as_numbers(expected, spec.group) - exact).abs().maximum(step) + 1e-4).all()
    same = rounded.values.view(torch.uint8) == expected.values.view(torch.uint8)
    assert same.float().mean() > 0.97


def test_what_pads_a_batch_is_zero(make_batch: MakeBatch, device: torch.device) -> None:
    batch = make_batch([(2, 30), (1, 40)], (4, 1), 32)
    padded = rounded_attention(
        torch.cat((batch.q_TNH, batch.q_TNH[:2])),
        batch.kv_cache,
        torch.cat((batch.block_tables_SB, batch.block_tables_SB[:1])),
        torch.tensor([0, 2, 3, 4], dtype=torch.int32, device=device),
        torch.tensor([30, 40, 0], dtype=torch.int32, device=device),
        ScoreRule(scale=batch.scale),
        2,
        QuantizeSpec(FP8),
        backend="triton",
    )
    real = attend(batch, QuantizeSpec(FP8))
    assert padded is not None
    assert real is not None
    torch.testing.assert_close(as_numbers(padded, None)[:3], as_numbers(real, None), rtol=0.13, atol=1e-3)
    assert not padded.values[3:].view(torch.uint8).any()
    assert padded.scale.isfinite().all()


def test_it_is_left_to_others_where_no_program_merges_or_could_hold_a_token(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = make_batch(BATCHES["decode"], (4, 2), 32)
    assert attend(decode, QuantizeSpec(FP8)) is not None
    assert attend(make_batch([(30, 50), (1, 9)], (4, 2), 32), QuantizeSpec(FP8)) is None, "long queries have no parts"
    assert attend(make_batch(BATCHES["decode"], (4, 2), 80), QuantizeSpec(FP8)) is None, "heads do not fill their tiles"
    assert attend(decode, QuantizeSpec(FP8, group=256)) is None, "a group is wider than a token"
    monkeypatch.setattr(module, "MAX_PART_BYTES", 256)
    assert attend(decode, QuantizeSpec(FP8)) is None
