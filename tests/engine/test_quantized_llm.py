"""Quantized models through the offline door: tokens, memory, and the refusals of the flags."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.weight_map import weight_map
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import build_model
from safetensors.torch import save_file

from tests.fakes.quantized_checkpoints import Recipe, quantize_checkpoint
from tests.fakes.small_model import write_small_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 30, 31, 7], [200, 3], [44] * 20]
FP8 = Recipe("float", "channel")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with weights and a tokenizer."""
    folder = write_small_model(tmp_path_factory.mktemp("plain"))
    model = build_model(read_arch(folder), Placement(torch.float32, torch.device("cpu"), use_kernels=False))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(place.shape) if "norm" in name else torch.randn(place.shape, generator=generator) * 0.2
        for name, place in weight_map(model.weights()).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def quantized(plain: Path, tmp_path: Path) -> Callable[..., Path]:
    return lambda recipe, **config: quantize_checkpoint(plain, tmp_path / "quantized", recipe, config=config)


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), dtype="float32", num_kv_blocks=64, max_num_seqs=8, device="cpu", **settings)


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    with load(folder, **settings) as llm:
        results = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY)
    return [result.outputs[0].token_ids for result in results]


def test_fp8_on_load_is_what_a_quantized_checkpoint_would_give(
    plain: Path, quantized: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        on_load = tokens(plain, quantization="fp8")
    assert on_load == tokens(quantized(FP8))
    assert "fp8 weights per channel, inputs per token: weights are kept" in caplog.text
    assert "a CPU does not multiply fp8" in caplog.text


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("int", "channel"),
        Recipe("float", "tensor", "tensor"),
        Recipe("float", "block", "group", (16, 16), plain_fp8=True),
    ],
    ids=str,
)
def test_a_quantized_checkpoint_answers_alike_in_any_batch(recipe: Recipe, quantized: Callable[..., Path]) -> None:
    folder = quantized(recipe)
    together = tokens(folder)
    with load(folder) as llm:
        alone = [llm.generate([{"prompt_token_ids": ids}], GREEDY)[0].outputs[0].token_ids for ids in PROMPTS]
    assert together == alone


def test_dummy_weights_can_be_quantized_on_load(plain: Path) -> None:
    assert tokens(plain, load_format="dummy", quantization="fp8") != tokens(plain, quantization="fp8")


def test_a_quantized_checkpoint_is_not_quantized_again(quantized: Callable[..., Path]) -> None:
    with pytest.raises(ModelLoadError, match="the checkpoint is quantized already"):
        load(quantized(FP8), quantization="fp8")


def test_another_format_is_refused_with_what_is_supported(quantized: Callable[..., Path]) -> None:
    with pytest.raises(ModelLoadError, match=r"format is marlin-24; pagefleet runs fp8"):
        load(quantized(FP8, format="marlin-24"))
