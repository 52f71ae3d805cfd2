"""gpt-oss as it is published, its experts in four bits: against transformers with the numbers that these stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.loader.memory import weight_bytes
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import Model, build_model
from pagefleet_engine.ranks.group import Alone, RankGroup
from pagefleet_kernels.native.library import Library
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.checkpoints import reference_model
from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.native_kernels import experts_one_by_one, native_library
from tests.fakes.paged_step import paged_step
from tests.fakes.quantized_checkpoints import mxfp4_checkpoint
from tests.fakes.ranks import on_ranks

Make = Callable[..., Path]
CPU = torch.device("cpu")
TOKENS = torch.arange(3, 43)


@pytest.fixture
def folder(make_checkpoint: Make, tmp_path: Path) -> Path:
    """Beside it, `-plain`, what it stands for."""
    return mxfp4_checkpoint(make_checkpoint("gpt_oss"), tmp_path / "mxfp4")


def load(
    folder: Path,
    ranks: RankGroup | None = None,
    *,
    kernels: bool = False,
    whole: bool = False,
    native: Library | None = None,
) -> Model:
    place = Placement(torch.float32, CPU, kernels, tensor=ranks or Alone(), expert_parallel=whole, native=native)
    return load_model(folder, read_arch(folder), place, "auto", 0)


@torch.inference_mode()
def logits(model: Model, *, kernels: bool = False) -> Tensor:
    step = paged_step(model.arch, len(TOKENS)) if kernels else DenseStep([(DenseSequence(), len(TOKENS))])
    return model.logits(model.forward(TOKENS, torch.arange(len(TOKENS)), step))


@pytest.mark.parametrize("kernels", [False, True])
@torch.inference_mode()
def test_four_bits_are_the_numbers_that_they_stand_for(kernels: bool, folder: Path) -> None:
    expected = reference_model(Path(f"{folder}-plain"))(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(load(folder, kernels=kernels), kernels=kernels), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_compiled_kernels_multiply_four_bits(size: int, folder: Path) -> None:
    """By inputs that are rounded to eight: as a layer, and one by one."""
    native = native_library()
    found = on_ranks(size, lambda ranks: logits(load(folder, ranks, native=native)))
    with experts_one_by_one():
        expected = logits(load(folder, native=native))
    exact = logits(load(folder))
    for each in found:
        assert (each - expected).norm() < 0.02 * expected.norm()
        assert not torch.equal(each, exact)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("size", "whole"), [(2, False), (2, True), (4, True)])
def test_over_ranks(size: int, whole: bool, kernels: bool, folder: Path) -> None:
    """Experts of a width of three blocks over two ranks, or whole ones."""
    found = on_ranks(size, lambda ranks: logits(load(folder, ranks, kernels=kernels, whole=whole), kernels=kernels))
    expected = logits(load(Path(f"{folder}-plain")))
    for each in found:
        torch.testing.assert_close(each, expected, atol=1e-4, rtol=0)


def test_ranks_do_not_cut_blocks(folder: Path) -> None:
    def refused(ranks: RankGroup) -> str:
        with pytest.raises(Exception, match="cannot be divided") as error:
            load(folder, ranks)
        return str(error.value)

    expected = "an expert's MLP of 96 in blocks of 32 cannot be divided among 4 ranks: give --tensor-parallel-size 3"
    assert on_ranks(4, refused)[0].startswith(expected)


def test_memory_is_reckoned_as_it_is_kept(folder: Path) -> None:
    """Of three layers with eight experts of 3 * 64 * 96 numbers: four bits and a scale for 32, or the model's type;
    both where experts move."""
    numbers = 3 * 8 * 3 * 64 * 96
    arch, plain = read_arch(folder), read_arch(Path(f"{folder}-plain"))
    four_bits = numbers // 2 + numbers // 32
    for kernels, moves, native, kept in (
        (False, False, None, 2 * numbers),
        (False, True, None, 2 * numbers + four_bits),
        (True, False, None, four_bits),
        (False, False, native_library(), four_bits + numbers // 32),
    ):
        place = Placement(torch.bfloat16, CPU, use_kernels=kernels, traceable=moves, native=native)
        float_bytes = weight_bytes(plain, build_model(plain, place).weights(), place)
        quantized = replace(place, quantization=arch.quantization)
        own_bytes = weight_bytes(arch, build_model(arch, quantized).weights(), quantized)
        assert own_bytes == float_bytes - 2 * numbers + kept


@pytest.mark.parametrize("kernels", [False, True])
def test_weights_made_at_random(kernels: bool, folder: Path) -> None:
    place = Placement(torch.float32, CPU, use_kernels=kernels)
    model = load_model(folder, read_arch(folder), place, "dummy", 5)
    assert logits(model, kernels=kernels).isfinite().all()


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj_scales"), "the weights lack model.layers.1"),
        (
            lambda tensors: tensors["model.layers.1.mlp.experts.down_proj_scales"].fill_(255),
            "model.layers.1.mlp.experts.down_proj_scales holds no usable scale: download the checkpoint again",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(8, 64, 3, 16)}),
            "is of type F32; config.json says that it is quantized: give a checkpoint in U8",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(8, 96, 64)}),
            "no place in the model for model.layers.0.mlp.experts.down_proj",
        ),
    ],
    ids=["missing", "no numbers", "of another type", "doubled"],
)
def test_a_damaged_checkpoint(change: Callable[[dict[str, Tensor]], object], said: str, folder: Path) -> None:
    with pytest.raises(ModelLoadError) as error:
        load(changed(folder, change))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_inputs_that_are_no_whole_blocks(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = mxfp4_checkpoint(make_checkpoint("gpt_oss"), tmp_path / "mxfp4")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 100'))
    with pytest.raises(ModelLoadError, match=r"down_proj has 100 inputs; MXFP4 has blocks of 32: repair config.json"):
        load(folder)
