"""What is DeepSeek's own: other names for one shape, layers that only draft, blocks of FP8, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import arch_from_config, read_arch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.changed_checkpoint import changed
from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.quantized_checkpoints import Recipe, quantize_checkpoint

Make = Callable[..., Path]
PROMPT = torch.arange(3, 60)
V3 = {"model_type": "deepseek_v3", "rope_theta": 10_000.0}


@torch.inference_mode()
def logits_of(folder: Path) -> Tensor:
    model = load_model(folder, read_arch(folder), Placement(torch.float32, torch.device("cpu"), False), "auto", 0)
    return model.logits(model.forward(PROMPT, torch.arange(len(PROMPT)), DenseStep([(DenseSequence(), len(PROMPT))])))


def test_kimi_k2_is_a_deepseek_v3(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v3")
    kimi = changed(folder, tmp_path / "kimi", model_type="kimi_k2", num_nextn_predict_layers=0)
    assert torch.equal(logits_of(kimi), logits_of(folder))


def test_layers_that_only_draft_are_passed_over(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v3")
    drafting = changed(folder, tmp_path / "drafting", num_nextn_predict_layers=1)
    tensors = load_file(drafting / "model.safetensors")
    extra = {name.replace("layers.2.", "layers.3."): one.clone() for name, one in tensors.items() if ".2." in name}
    save_file(tensors | extra, drafting / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(drafting), logits_of(folder))


def test_the_maps_of_a_checkpoint_in_blocks_are_what_its_numbers_stand_for(
    make_checkpoint: Make, tmp_path: Path
) -> None:
    """Inputs are rounded too, so results are near those of the same numbers in float32."""
    recipe = Recipe("float", "block", "group", (8, 8), plain_fp8=True)
    folder = quantize_checkpoint(make_checkpoint("deepseek_v3"), tmp_path / "fp8", recipe)
    plain, stored = logits_of(Path(f"{folder}-plain")), logits_of(folder)
    assert torch.corrcoef(torch.stack((plain.flatten(), stored.flatten())))[0, 1] > 0.95


def test_the_published_scale_of_queries() -> None:
    """YaRN's 0.1 ln(40) + 1, twice, for keys and queries alike."""
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}
    arch = arch_from_config(V3 | {"max_position_embeddings": 163_840, "rope_scaling": scaling}, "config.json")
    assert arch.query_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert arch.ropes[0].attention_factor == 1.0
    assert arch.context_length == 163_840


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (V3 | {"topk_method": "greedy"}, "topk_method is greedy with scoring_func sigmoid; pagefleet runs noaux_tc"),
        (V3 | {"scoring_func": "softmax"}, "with scoring_func softmax"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq is 2; pagefleet runs models that have experts in every layer"),
        (V3 | {"n_group": 7}, r"8 of 256 experts from 4 of 7 groups"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 6, "topk_method": "noaux_tc"}, "runs greedy and group"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 65}, "num_experts_per_tok is 65, of 64 experts"),
    ],
)
def test_other_ways_to_choose_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        arch_from_config(config, "config.json")
