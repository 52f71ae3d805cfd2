"""The path that a GPU takes through layers and pages, run here on the kernels' torch twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.safetensors import fill_from_safetensors
from pagefleet_engine.loader.weight_map import weight_map
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import build_model

from tests.fakes.checkpoints import FAMILIES
from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.paged_step import paged_step

NUM_TOKENS = 40


@torch.inference_mode()
def check_paths_agree(folder: Path) -> None:
    arch = read_arch(folder)
    tokens = torch.randint(0, arch.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    logits = []
    for use_kernels in (False, True):
        model = build_model(arch, Placement(torch.float32, torch.device("cpu"), use_kernels))
        fill_from_safetensors(folder, weight_map(model.weights()), arch.tie_word_embeddings)
        step = paged_step(arch, NUM_TOKENS) if use_kernels else DenseStep([(DenseSequence(), NUM_TOKENS)])
        logits.append(model.logits(model.forward(tokens, torch.arange(NUM_TOKENS), step)))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_and_plain_torch_agree(family: str, make_checkpoint: Callable[..., Path]) -> None:
    check_paths_agree(make_checkpoint(family))


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "llama", "olmo2", "qwen3"])
def test_they_agree_about_biases(family: str, make_checkpoint: Callable[..., Path]) -> None:
    mlp = {"mlp_bias": True} if family == "llama" else {}
    check_paths_agree(make_checkpoint(family, attention_bias=True, **mlp))


def test_they_agree_about_heads_that_rotate_in_part(make_checkpoint: Callable[..., Path]) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    check_paths_agree(make_checkpoint("phi3", rope_parameters=rope))
