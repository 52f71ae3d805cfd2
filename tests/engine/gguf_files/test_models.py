"""A model in GGUF computes what its checkpoint in safetensors does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.gguf.folder import folder_of
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from torch import Tensor

from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.gguf_files import ARCHITECTURES, write_gguf

Make = Callable[..., Path]
_LENGTH = 12


def logits(folder: Path) -> Tensor:
    model = load_model(folder, read_arch(folder), Placement(torch.float32, torch.device("cpu"), False), "auto", 0)
    with torch.inference_mode():
        step = DenseStep([(DenseSequence(), _LENGTH)])
        return model.logits(model.forward(torch.arange(3, 3 + _LENGTH), torch.arange(_LENGTH), step))


_GEMMA3 = {
    "num_hidden_layers": 7,
    "layer_types": [f"{'full' if layer == 5 else 'sliding'}_attention" for layer in range(7)],
    "query_pre_attn_scalar": 32,
}
_CONFIGS: dict[str, dict[str, Any]] = {"gemma2": {"query_pre_attn_scalar": 32}, "gemma3_text": _GEMMA3}
_SHAPES = {"gemma3_text": {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_are_those_of_the_checkpoint(kind: str, make_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(kind, **_CONFIGS.get(kind, {}))
    write_gguf(checkpoint, tmp_path / "model.gguf", shape=_SHAPES.get(kind))
    found = logits(folder_of(tmp_path / "model.gguf", tmp_path / "cache"))
    torch.testing.assert_close(found, logits(checkpoint), rtol=1e-4, atol=1e-4)
