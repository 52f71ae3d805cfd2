"""Slopes of ALiBi against transformers' own, for numbers of heads that are powers of two and not."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.models.alibi import alibi_slopes, mosaic_slopes
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 14, 32, 71, 112])
def test_slopes_are_transformers(num_heads: int) -> None:
    bloom = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), bloom[:, 0, 1])
    mpt = build_mpt_alibi_tensor(num_heads, 2, 16)
    torch.testing.assert_close(torch.tensor(mosaic_slopes(num_heads, 16.0)), -mpt[:, 0, 0])
