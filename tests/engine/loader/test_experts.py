"""Checkpoints whose experts are not those that config.json says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from torch import Tensor

from tests.fakes.changed_checkpoint import changed, nothing

Make = Callable[..., Path]


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        load_model(folder, read_arch(folder), Placement(torch.float32, torch.device("cpu"), False), "auto", 0)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_missing_expert(make_checkpoint: Make, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    folder = changed(make_checkpoint("qwen3_moe"), tmp_path / "model", drop)
    assert f"the weights lack {name}: download the checkpoint again" in refusal(folder)


def test_more_experts_than_the_configuration_says(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = changed(make_checkpoint("mixtral"), tmp_path / "model", nothing, num_local_experts=3)
    assert "no place in the model for model.layers.0.block_sparse_moe.experts.3.w1.weight" in refusal(folder)


def test_stacked_experts_of_another_number(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = changed(make_checkpoint("granitemoe"), tmp_path / "model", nothing, num_local_experts=4)
    assert "input_linear.weight is [8, 96, 64], config.json makes it [4, 96, 64]" in refusal(folder)


def test_transposed_experts_of_another_number(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = changed(make_checkpoint("gpt_oss"), tmp_path / "model", nothing, num_local_experts=4)
    assert "experts.down_proj is [8, 96, 64], config.json makes it [4, 96, 64]" in refusal(folder)


def test_experts_of_llama4_of_another_number_and_without_the_shared_one(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = changed(make_checkpoint("llama4_text"), tmp_path / "model", nothing, num_local_experts=3)
    assert "experts.down_proj is [4, 48, 64], config.json makes it [3, 48, 64]" in refusal(folder)
    name = "model.layers.1.feed_forward.shared_expert.up_proj.weight"
    folder = changed(make_checkpoint("llama4_text"), tmp_path / "other", lambda tensors: tensors.pop(name))
    assert f"the weights lack {name}: download the checkpoint again" in refusal(folder)


def test_biases_that_are_missing(make_checkpoint: Make, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_bias"
    folder = changed(make_checkpoint("gpt_oss"), tmp_path / "model", lambda tensors: tensors.pop(name))
    assert f"the weights lack {name}: download the checkpoint again" in refusal(folder)


def test_a_gate_that_is_clamped_otherwise(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = changed(make_checkpoint("gpt_oss"), tmp_path / "model", nothing, swiglu_limit=6)
    with pytest.raises(ModelLoadError, match="swiglu_limit is 6; pagefleet runs 7"):
        read_arch(folder)


def test_more_experts_for_a_token_than_there_are(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = changed(make_checkpoint("olmoe"), tmp_path / "model", nothing, num_experts_per_tok=9)
    with pytest.raises(ModelLoadError, match="num_experts_per_tok is 9, of 8 experts"):
        read_arch(folder)


def test_groups_that_cannot_be(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = changed(make_checkpoint("glm4_moe"), tmp_path / "model", nothing, topk_group=1)
    with pytest.raises(ModelLoadError, match="3 of 8 experts from 1 of 4 groups"):
        read_arch(folder)
