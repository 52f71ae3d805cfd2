"""A model in GGUF computes what its checkpoint in safetensors does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.quants import quantize
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.blocks import BY_NAME
from pagefleet_engine.gguf.file import read_gguf
from pagefleet_engine.gguf.folder import folder_of
from pagefleet_engine.layers.quantization.block_slots import packed_weights
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from torch import Tensor

from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.gguf_files import ARCHITECTURES, Type, write_gguf

Make = Callable[..., Path]
_LENGTH = 12


def logits(folder: Path, *, use_kernels: bool = False) -> Tensor:
    place = Placement(torch.float32, torch.device("cpu"), use_kernels)
    model = load_model(folder, read_arch(folder), place, "auto", 0)
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


_MIXED = {"attn_v": Type.Q8_0, "ffn_down": Type.Q5_0}


@pytest.mark.parametrize("usual", [Type.Q8_0, Type.Q4_0, Type.Q5_0, Type.Q4_1, Type.Q5_1, Type.F16, Type.BF16])
def test_kernels_multiply_what_blocks_stand_for(usual: Type, make_checkpoint: Make, tmp_path: Path) -> None:
    """Also where projections that are computed as one are of different types, and heads' rows change places."""
    write_gguf(make_checkpoint("llama"), tmp_path / "model.gguf", matrices=usual, types=_MIXED)
    folder = folder_of(tmp_path / "model.gguf", tmp_path / "cache")
    expanded = logits(folder)
    torch.testing.assert_close(logits(folder, use_kernels=True), expanded, rtol=1e-3, atol=1e-3)
    assert (expanded - logits(make_checkpoint("llama"))).abs().mean() < 0.5 * expanded.std()


def test_packed_matrices_stand_for_the_same_numbers() -> None:
    random = np.random.default_rng(5)
    for name in ("Q4_0", "Q5_0", "Q8_0"):
        kind = BY_NAME[name]
        numbers = random.standard_normal((6, 96), np.float32)
        stored = torch.from_numpy(quantize(numbers, getattr(Type, name)))
        expected = kind.decode(stored.view(-1, kind.num_bytes)).view(6, 96)
        assert torch.equal(packed_weights(stored, kind).dequantize(), expected)


def test_a_scale_that_is_no_number_is_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_checkpoint("llama"), path, matrices=Type.Q8_0)
    tensor = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.start : tensor.start + 2] = b"\xff\xff"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight holds a scale that is no finite number"):
        logits(folder_of(path, tmp_path / "cache"), use_kernels=True)
