"""The path that a GPU takes through layers, run here on the kernels' torch twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.safetensors import fill_from_safetensors
from pagefleet_engine.loader.weight_map import weight_map
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.registry import build_model

from tests.fakes.checkpoints import FAMILIES
from tests.fakes.dense_attention import DenseSequence, DenseStep


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_kernels_and_plain_torch_agree(family: str, bias: bool, make_checkpoint: Callable[..., Path]) -> None:
    overrides = {"attention_bias": True} if bias and family in ("llama", "qwen3") else {}
    folder = make_checkpoint(family, **overrides | ({"mlp_bias": True} if bias and family == "llama" else {}))
    arch = read_arch(folder)
    tokens = torch.randint(0, arch.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
    logits = []
    for use_kernels in (False, True):
        model = build_model(arch, Placement(torch.float32, torch.device("cpu"), use_kernels))
        fill_from_safetensors(folder, weight_map(model.weights()), arch.tie_word_embeddings)
        hidden = model.forward(tokens, torch.arange(40), DenseStep([(DenseSequence(), 40)]))
        logits.append(model.logits(hidden))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
