"""Scaled embeddings round as transformers' do; a soft cap bounds logits and keeps their order."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.layers.embedding import Embedding, HeadForm, LMHead
from pagefleet_engine.layers.weight import Placement
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding


def place(dtype: torch.dtype) -> Placement:
    return Placement(dtype, torch.device("cpu"), use_kernels=False)


def table(dtype: torch.dtype) -> Tensor:
    return torch.randn((20, 8), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_scale_is_rounded_to_the_models_type(dtype: torch.dtype) -> None:
    """In bfloat16 the root of 3072, 55.4256, is 55.5."""
    embedding = Embedding(20, 8, place(dtype), scale=3072**0.5)
    dict(embedding.weights())["weight"].fill(0, table(dtype))
    theirs = Gemma3TextScaledWordEmbedding(20, 8, 0, embed_scale=3072**0.5).to(dtype)
    theirs.weight.copy_(table(dtype))
    tokens = torch.arange(20)
    assert torch.equal(embedding(tokens), theirs(tokens))
    assert torch.equal(embedding(tokens), theirs(tokens)), "the table itself is not scaled"


@torch.inference_mode()
def test_a_tied_head_reads_the_table_unscaled() -> None:
    embedding = Embedding(20, 8, place(torch.float32), scale=100.0)
    head = LMHead(20, 8, place(torch.float32), tied_to=embedding)
    dict(embedding.weights())["weight"].fill(0, table(torch.float32))
    hidden = torch.ones(1, 8)
    torch.testing.assert_close(head(hidden), hidden @ table(torch.float32).T, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_soft_cap_bounds_logits_and_keeps_their_order() -> None:
    plain, capped = LMHead(20, 8, place(torch.float32)), LMHead(20, 8, place(torch.float32), form=HeadForm(softcap=2.0))
    for head in (plain, capped):
        dict(head.weights())["weight"].fill(0, table(torch.float32))
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    logits = plain(hidden)
    assert logits.abs().max() > 2.0
    torch.testing.assert_close(capped(hidden), 2.0 * torch.tanh(logits / 2.0), atol=1e-6, rtol=0)
    assert torch.equal(capped(hidden).argsort(), logits.argsort())
