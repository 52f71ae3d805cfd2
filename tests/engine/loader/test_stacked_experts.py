"""Experts whose matrices, scales and all else lie in one tensor each, of all experts: from the files to the logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import Model
from pagefleet_engine.ranks.group import RankGroup
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.loader.test_packed import logits_in_pages
from tests.fakes.coded_checkpoints import Coded
from tests.fakes.dense_attention import logits
from tests.fakes.native_kernels import native_library
from tests.fakes.packed_checkpoints import Packed, pack, quantize_packed
from tests.fakes.quantized_checkpoints import MATRICES, Recipe, quantize
from tests.fakes.ranks import on_ranks

Make = Callable[..., Path]
How = Recipe | Packed | Coded
FORMS: dict[str, How] = {
    "fp8 channel": Recipe("float", "channel", "none"),
    "fp8 tensor": Recipe("float", "tensor", "none"),
    "fp8 block": Recipe("float", "block", "none", (16, 16)),
    "int4": Packed("pack-quantized", zeros=True),
    "awq": Packed("awq", zeros=True),
    "gptq in act order": Packed("gptq", zeros=True, ordered=True),
    "nvfp4": Coded("nvfp4-pack-quantized"),
    "mxfp4": Coded("mxfp4-pack-quantized"),
}
ROUNDED: dict[str, How] = {"int8": Recipe("int", "channel"), "fp8 fixed": Recipe("float", "tensor", "tensor")}
"""Inputs are rounded, by which some rows get to other experts."""
PLACES = {
    "torch": Placement(torch.float32, torch.device("cpu"), use_kernels=False),
    "kernels": Placement(torch.float32, torch.device("cpu"), use_kernels=True),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def store(how: How, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix's tensors by the last part of their names, and the numbers that they stand for."""
    if isinstance(how, Coded):
        return how.store(weight_OI)
    if isinstance(how, Packed):
        numbers = quantize_packed(weight_OI, how)
        return pack(numbers, how), numbers.meant()
    stored, scale, meant = quantize(weight_OI, how)
    fixed = {"input_scale": torch.tensor(0.05)} if how.inputs == "tensor" else {}
    return {"weight": stored, how.scale_name: scale, **fixed}, meant


@pytest.fixture
def checkpoint(make_checkpoint: Make, tmp_path: Path) -> Callable[[How], Path]:
    """Granite MoE, quantized, and beside it, with -plain, what its numbers stand for."""

    def make(how: How) -> Path:
        source, target = make_checkpoint("granitemoe", intermediate_size=64), tmp_path / "quantized"
        tensors = load_file(source / "model.safetensors")
        stored, plain = dict(tensors), dict(tensors)
        for name, tensor in tensors.items():
            is_stack = name.endswith("_linear.weight")
            if not (is_stack or name.endswith(MATRICES)):
                continue
            del stored[name]
            parts, meant = zip(*(store(how, one) for one in (tensor if is_stack else tensor[None])), strict=True)
            for kind in parts[0]:
                together = torch.stack([part[kind] for part in parts])
                stored[f"{name.removesuffix('.weight')}.{kind}"] = together if is_stack else together[0].contiguous()
            plain[name] = torch.stack(meant).view(tensor.shape)
        for folder, content in ((target, stored), (Path(f"{target}-plain"), plain)):
            copytree(source, folder)
            save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        settings = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(settings | {"quantization_config": how.config()}))
        return target

    return make


def load(folder: Path, place: Placement) -> Model:
    return load_model(folder, read_arch(folder), place, "auto", 0)


def expected(folder: Path) -> Tensor:
    return logits(load(Path(f"{folder}-plain"), PLACES["torch"]))


@pytest.mark.parametrize("form", [*FORMS, *ROUNDED])
@pytest.mark.parametrize("place", PLACES)
def test_logits_are_those_of_what_the_numbers_mean(form: str, place: str, checkpoint: Callable[[How], Path]) -> None:
    folder = checkpoint((FORMS | ROUNDED)[form])
    model = load(folder, PLACES[place])
    found, meant = (logits_in_pages if place == "kernels" else logits)(model), expected(folder)
    assert (found - meant).norm() < (1e-3 if form in FORMS else 0.3) * meant.norm()


@pytest.mark.parametrize("form", ["int4", "nvfp4", "int8"])
def test_compiled_kernels_take_them_as_they_are(form: str, checkpoint: Callable[[How], Path]) -> None:
    folder = checkpoint((FORMS | ROUNDED)[form])
    found, meant = logits(load(folder, replace(PLACES["torch"], native=native_library()))), expected(folder)
    assert (found - meant).norm() < 0.3 * meant.norm()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_read_their_part(form: str, whole: bool, checkpoint: Callable[[How], Path]) -> None:
    """Of each expert's width, or some experts whole."""
    folder = checkpoint(FORMS[form])

    def rank(ranks: RankGroup) -> Tensor:
        return logits(load(folder, replace(PLACES["torch"], tensor=ranks, expert_parallel=whole)))

    meant = expected(folder)
    for found in on_ranks(2, rank):
        assert (found - meant).norm() < 1e-3 * meant.norm()
