"""Checkpoints of torchao and HQQ, from the files to the logits; and what is said of bad ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader import hqq
from pagefleet_engine.loader.checkpoint import TensorFile
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.loader.test_packed import load, logits_in_pages, refusal
from tests.fakes.checkpoints import edit, reference_model
from tests.fakes.dense_attention import logits
from tests.fakes.native_kernels import native_library
from tests.fakes.torchao_checkpoints import Stored, stored_checkpoint, write

CPU = torch.device("cpu")
Make = Callable[..., Path]
INT4, TILES, INT8 = Stored("int4"), Stored("int4-tiles"), Stored("int8")
FORMATS = [
    *(Stored("fp8"), Stored("fp8-tensor"), Stored("fp8-group"), INT8, Stored("int8-tensor"), Stored("int8-group")),
    *(INT4, TILES, Stored("intx3"), Stored("intx4-zeros"), *(Stored("hqq", bits) for bits in (8, 4, 3, 2, 1))),
]
O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.fixture
def kept(make_checkpoint: Make, tmp_path: Path) -> Callable[..., Path]:
    return lambda how, **more: stored_checkpoint(
        make_checkpoint("llama", intermediate_size=192), tmp_path / "kept", how, **more
    )


def metadata_of(folder: Path) -> dict[str, dict[str, Any]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: json.loads(said) for name, said in file.metadata().items() if "." in name}


def change(folder: Path, tensors: dict[str, Tensor | None], said: dict[str, Any] | None = None) -> None:
    """Other tensors of O_PROJ, and other metadata of it."""
    metadata = metadata_of(folder)
    if said is not None:
        metadata[f"{O_PROJ}.weight"] = said
    edit(folder, {f"{O_PROJ}.{kind}": tensor for kind, tensor in tensors.items()})
    write(folder, load_file(folder / "model.safetensors"), metadata)


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_logits_are_those_of_transformers_with_what_the_numbers_mean(how: Stored, kept: Callable[..., Path]) -> None:
    folder = kept(how)
    with torch.inference_mode():
        expected = reference_model(Path(f"{folder}-plain"))(torch.arange(3, 15)[None]).logits[0]
    torch.testing.assert_close(logits(load(folder)), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits_in_pages(load(folder, use_kernels=True)), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("how", [INT8, INT4, TILES, Stored("intx4-zeros"), Stored("hqq", 8), Stored("hqq", 3)], ids=str)
def test_compiled_kernels_give_the_logits_of_expanded_weights(how: Stored, kept: Callable[..., Path]) -> None:
    """But for the rounding of inputs to 8 bits."""
    folder, placement = kept(how), Placement(torch.float32, CPU, False, native=native_library())
    found, expected = logits(load_model(folder, read_arch(folder), placement, "auto", 0)), logits(load(folder))
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("how", [INT4, Stored("hqq")], ids=str)
def test_experts_with_zero_points_in_floats(how: Stored, make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", moe_intermediate_size=64, intermediate_size=128)
    folder = stored_checkpoint(source, tmp_path / "kept", how)
    found, expected = logits_in_pages(load(folder, use_kernels=True)), logits(load(folder))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("how", [INT8, INT4, TILES, Stored("fp8-group")], ids=str)
def test_embeddings_and_heads_that_are_quantized_become_floats(how: Stored, kept: Callable[..., Path]) -> None:
    folder = kept(how, extra=("embed_tokens.weight", "lm_head.weight"))
    with torch.inference_mode():
        expected = reference_model(Path(f"{folder}-plain"))(torch.arange(3, 15)[None]).logits[0]
    torch.testing.assert_close(logits(load(folder)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("how", [INT4, Stored("hqq")], ids=str)
def test_dummy_weights(how: Stored, kept: Callable[..., Path]) -> None:
    folder = kept(how)
    (folder / "model.safetensors").unlink()
    out = logits(load_model(folder, read_arch(folder), Placement(torch.float32, CPU, False), "dummy", 1))
    assert out.isfinite().all()
    assert out.std() > 1e-3


MISFIT = f"the tensors of {O_PROJ}.weight do not fit each other"


@pytest.mark.parametrize(
    ("how", "tensors", "said", "words"),
    [
        (INT4, {"_weight_scale": None}, None, f"{O_PROJ} is quantized, and {O_PROJ}._weight_scale is missing"),
        (INT4, {"_weight_scale": torch.ones(64, 2)}, None, MISFIT),
        (INT4, {"_weight_qdata": torch.zeros(64, 30, dtype=torch.int8)}, None, MISFIT),
        (INT4, {}, {"_type": "Int4Tensor", "_data": {"block_size": [1, 0], "shape": [64, 64]}}, MISFIT),
        (INT4, {}, {"_type": "Int4Tensor", "_data": {"block_size": [1, 32], "shape": "64"}}, MISFIT),
        (INT4, {}, {"_type": "NVFP4Tensor", "_data": {}}, "of torchao's class 'NVFP4Tensor', which is not run"),
        (
            INT4,
            {},
            {"_type": "Int8Tensor", "_data": {}},
            "class Int8Tensor, and config.json's quant_type makes another",
        ),
        (INT4, {}, {"_type": 4}, f"metadata does not say of which class {O_PROJ}.weight is"),
        (INT4, {"_weight_scale": torch.zeros(2, 64)}, None, "weight_zero_point holds a number that is not finite"),
        (INT4, {"_weight_act_pre_scale": torch.ones(64)}, None, "_weight_act_pre_scale changes inputs of the layer"),
        (INT4, {"_weight_qdata": None}, None, f"the weights lack {O_PROJ}.weight_"),
        (TILES, {"_weight_qdata": torch.zeros(4, 8, 32, 4, dtype=torch.int32)}, None, MISFIT),
        (INT8, {"_weight_scale": None}, None, f"{O_PROJ}._weight_scale is missing"),
        (INT8, {"_weight_scale": torch.ones(63, 1)}, None, "_scale is [63, 1], config.json makes it [64]"),
        (
            INT8,
            {"_weight_zero_point": torch.ones(64, 1, dtype=torch.int8)},
            None,
            "_weight_zero_point holds zero points",
        ),
        (INT8, {"_weight_qdata": torch.ones(64, 64)}, None, "is of type F32"),
    ],
)
def test_torchao_that_does_not_fit(
    how: Stored, tensors: dict[str, Tensor | None], said: Any, words: str, kept: Callable[..., Path]
) -> None:
    folder = kept(how)
    change(folder, tensors, said)
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"scale": None}, f"{O_PROJ} is quantized, and {O_PROJ}.scale is missing"),
        ({"scale": torch.ones(127, 1)}, f"the tensors of {O_PROJ} do not fit each other"),
        ({"nbits": torch.tensor(3, dtype=torch.int32)}, f"the tensors of {O_PROJ} do not fit each other"),
        ({"shape": torch.tensor([64])}, f"the tensors of {O_PROJ} do not fit each other"),
        ({"axis": torch.tensor(0, dtype=torch.int32)}, "has groups along axis [0], only 1 is run"),
        ({"quant_zero": torch.tensor(1, dtype=torch.uint8)}, "has quant_zero, which is not run"),
        ({"axis": torch.tensor(float("nan"))}, f"{O_PROJ}.axis is in floats"),
    ],
)
def test_hqq_that_does_not_fit(tensors: dict[str, Tensor | None], words: str, kept: Callable[..., Path]) -> None:
    folder = kept(Stored("hqq"))
    edit(folder, {f"{O_PROJ}.{kind}": tensor for kind, tensor in tensors.items()})
    assert words in refusal(folder)


def test_metadata_that_is_lost(kept: Callable[..., Path]) -> None:
    folder = kept(INT8)
    edit(folder, {})
    assert "save it again with transformers and torchao 0.15 or later" in refusal(folder)


def test_a_disk_that_fails_is_one_line(kept: Callable[..., Path]) -> None:
    folder = kept(Stored("hqq"))
    file = TensorFile(folder / "model.safetensors", None)
    os.truncate(file.path, file.offset(file.names[0]))
    with pytest.raises(ModelLoadError, match=r"model.safetensors: \S+ cannot be read \(the file ends at byte \d+\): "):
        hqq.settled([file])
