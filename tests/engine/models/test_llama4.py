"""Llama 4 as it is published in 8 bits: each expert apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.quantized_checkpoints import Recipe, quantize_checkpoint

TOKENS = torch.arange(3, 60)


def written(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    copytree(source, target)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def apart(source: Path, target: Path) -> Path:
    """The same checkpoint with a matrix for each expert, a row for each output."""
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        block, kind = name.rsplit(".", 1)
        for expert, matrix_IO in enumerate(tensors.pop(name)):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, weight_OI in zip(names, matrix_IO.t().chunk(len(names)), strict=True):
                tensors[f"{block}.{expert}.{part}.weight"] = weight_OI
    return written(source, target, tensors)


def stacked(source: Path, target: Path) -> Path:
    """And back."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    for block in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        experts = [f"{block}.experts.{expert}" for expert in range(config["num_local_experts"])]
        gate, up, down = (
            torch.stack([tensors.pop(f"{expert}.{kind}.weight").t() for expert in experts])
            for kind in ("gate_proj", "up_proj", "down_proj")
        )
        tensors |= {f"{block}.experts.gate_up_proj": torch.cat((gate, up), -1), f"{block}.experts.down_proj": down}
    return written(source, target, tensors)


@torch.inference_mode()
def logits(folder: Path) -> Tensor:
    place = Placement(torch.float32, torch.device("cpu"), use_kernels=False)
    model = load_model(folder, read_arch(folder), place, "auto", 0)
    step = DenseStep([(DenseSequence(), len(TOKENS))])
    return model.logits(model.forward(TOKENS, torch.arange(len(TOKENS)), step))


@pytest.mark.parametrize("recipe", [Recipe("float", "channel", "none"), Recipe("int", "channel", "none")], ids=str)
def test_in_8_bits_each_expert_is_apart(recipe: Recipe, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Against the numbers that the stored ones stand for."""
    folder = quantize_checkpoint(apart(make_checkpoint("llama4_text"), tmp_path / "apart"), tmp_path / "8", recipe)
    expected = logits(stacked(Path(f"{folder}-plain"), tmp_path / "plain"))
    torch.testing.assert_close(logits(folder), expected, atol=1e-4, rtol=0)
