"""Quantized checkpoints, from the files to the logits; and what is said where their tensors do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagefleet_engine.attention.backend import AttentionSpec
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import Model
from safetensors.torch import load_file
from torch import Tensor

from tests.fakes.checkpoints import edit, reference_model
from tests.fakes.dense_attention import DenseSequence, DenseStep, logits
from tests.fakes.quantized_checkpoints import Recipe, quantize_checkpoint, quark, rounded_inputs

CPU = torch.device("cpu")
Make = Callable[..., Path]
RECIPES = [
    Recipe("float", "tensor", "tensor"),
    Recipe("float", "channel", "token"),
    Recipe("float", "block", "group", (16, 16)),
    Recipe("int", "channel", "token"),
    Recipe("int", "channel", "tensor"),
    Recipe("float", "tensor", "token", plain_fp8=True),
    Recipe("float", "block", "group", (32, 32), plain_fp8=True),
    Recipe("int", "channel", "token", zeros=True),
    Recipe("int", "channel", "tensor", zeros=True),
]
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
O_PROJ = "model.layers.0.self_attn.o_proj"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, read_arch(folder), Placement(dtype, CPU, False), "auto", 0)


def plain(folder: Path) -> Path:
    """What the stored numbers stand for, as a checkpoint of its own."""
    return Path(f"{folder}-plain")


@pytest.fixture
def quantized(make_checkpoint: Make, tmp_path: Path) -> Callable[[Recipe], Path]:
    return lambda recipe: quantize_checkpoint(make_checkpoint("llama"), tmp_path / "quantized", recipe)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        load(folder)
    return str(error.value)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_logits_are_those_of_transformers_with_rounded_inputs(
    recipe: Recipe, quantized: Callable[[Recipe], Path]
) -> None:
    folder = quantized(recipe)
    reference = reference_model(plain(folder))
    for name, module in reference.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, args: (rounded_inputs(args[0], recipe).float(),))
    with torch.inference_mode():
        expected = reference(torch.arange(3, 15)[None]).logits[0]
    # A sum that is rounded the other way moves an input by one number here or there.
    assert torch.nn.functional.cosine_similarity(logits(load(folder)), expected).min() > 0.9995


@pytest.mark.parametrize(
    "recipe",
    [Recipe("int", "channel", "none"), Recipe("float", "tensor", "none"), Recipe("float", "block", "none", (16, 16))],
    ids=str,
)
def test_weights_alone_stand_for_themselves(recipe: Recipe, quantized: Callable[[Recipe], Path]) -> None:
    folder = quantized(recipe)
    torch.testing.assert_close(logits(load(folder)), logits(load(plain(folder))), rtol=1e-4, atol=1e-4)


def test_bfloat16(quantized: Callable[[Recipe], Path]) -> None:
    folder = quantized(Recipe("int", "channel"))
    precise, rough = logits(load(folder)), logits(load(folder, torch.bfloat16)).float()
    assert torch.nn.functional.cosine_similarity(precise, rough).min() > 0.99


def test_layers_that_are_ignored_stay_as_they_are(make_checkpoint: Make, tmp_path: Path) -> None:
    recipe = Recipe("int", "channel", "none")
    ignore = {"ignore": ["lm_head", "re:.*self_attn.*"]}
    folder = quantize_checkpoint(make_checkpoint("llama"), tmp_path / "quantized", recipe, config=ignore)
    source = load_file(make_checkpoint("llama") / "model.safetensors")
    kept = {name: tensor for name, tensor in source.items() if "self_attn" in name}
    scales = {name.replace("weight", "weight_scale"): None for name in kept}
    edit(folder, kept | scales)
    edit(plain(folder), dict(kept))
    torch.testing.assert_close(logits(load(folder)), logits(load(plain(folder))), rtol=1e-4, atol=1e-4)


def test_a_missing_scale(quantized: Callable[[Recipe], Path]) -> None:
    folder = quantized(Recipe("float", "channel"))
    edit(folder, {f"{O_PROJ}.weight_scale": None})
    assert f"the weights lack {O_PROJ}.weight_scale: download the checkpoint again" in refusal(folder)


def test_a_missing_input_scale(quantized: Callable[[Recipe], Path]) -> None:
    folder = quantized(Recipe("float", "tensor", "tensor"))
    edit(folder, {f"{O_PROJ}.input_scale": None})
    assert f"the weights lack {O_PROJ}.input_scale" in refusal(folder)


def test_a_missing_zero_point_of_inputs(quantized: Callable[[Recipe], Path]) -> None:
    folder = quantized(Recipe("int", "channel", "tensor", zeros=True))
    edit(folder, {f"{O_PROJ}.input_zero_point": None})
    assert f"the weights lack {O_PROJ}.input_zero_point" in refusal(folder)


@pytest.mark.parametrize("own_file", [True, False])
def test_modelopt_says_the_same_in_other_words(own_file: bool, quantized: Callable[[Recipe], Path]) -> None:
    """In config.json, or in a file of its own; with scales of K/V where it has them."""
    folder = quantized(Recipe("float", "tensor", "tensor"))
    expected = logits(load(folder))
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "vision*"]}
    config = json.loads((folder / "config.json").read_text())
    if own_file:
        del config["quantization_config"]
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": said}))
    else:
        config["quantization_config"] = {"quant_method": "modelopt", **said}
    (folder / "config.json").write_text(json.dumps(config))
    assert "the weights lack model.layers.0.self_attn.k_scale" in refusal(folder)
    scales = {
        f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": torch.tensor(0.5)
        for layer in range(3)
        for name in ("k", "v")
    }
    edit(folder, dict(scales))
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[1], Recipe("float", "channel", "none")])
def test_quark_says_the_same_in_other_words(recipe: Recipe, quantized: Callable[[Recipe], Path]) -> None:
    """And its scales of K/V are those of outputs."""
    folder = quantized(recipe)
    expected = logits(load(folder))
    section = quark(
        {"qscheme": f"per_{recipe.strategy}", "ch_axis": 0},
        None if recipe.inputs == "none" else {"is_dynamic": recipe.inputs == "token"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    assert torch.equal(logits(load(folder)), expected)
    scales = {
        f"model.layers.{n}.self_attn.{kind}_proj.output_scale": torch.tensor(0.5) for n in range(3) for kind in "qkv"
    }
    edit(folder, dict(scales))
    assert torch.equal(logits(load(folder)), expected)
    with_cache = section | {"export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": with_cache}))
    assert torch.equal(logits(load(folder)), expected)
    edit(folder, {name: None for name in scales if "v_proj" in name})
    assert "the weights lack model.layers.0.self_attn.v_scale" in refusal(folder)


def test_fbgemm_says_the_same_in_other_words(quantized: Callable[[Recipe], Path]) -> None:
    folder = quantized(Recipe("float", "channel", "token"))
    expected = logits(load(folder))
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    assert torch.equal(logits(load(folder)), expected)


def test_a_misshapen_scale(quantized: Callable[[Recipe], Path]) -> None:
    folder = quantized(Recipe("float", "channel"))
    edit(folder, {f"{O_PROJ}.weight_scale": torch.ones(63, 1)})
    assert f"{O_PROJ}.weight_scale is [63, 1], config.json makes it [64]" in refusal(folder)


def test_weights_of_another_type(quantized: Callable[[Recipe], Path]) -> None:
    folder = quantized(Recipe("float", "channel"))
    edit(folder, {f"{O_PROJ}.weight": torch.zeros(64, 64, dtype=torch.int8)})
    said = refusal(folder)
    assert f"{O_PROJ}.weight is of type I8; config.json says that it is quantized: give a checkpoint in F8_E4M3" in said


def test_quantized_weights_that_the_configuration_does_not_mention(quantized: Callable[[Recipe], Path]) -> None:
    folder = quantized(Recipe("int", "channel"))
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (folder / "config.json").write_text(json.dumps(settings))
    said = refusal(folder)
    assert "the weights have model.layers.0.mlp.down_proj.weight, " in said
    assert "quantized, where the model has floats: repair quantization_config in config.json" in said


def test_scales_of_the_kv_cache_reach_attention(make_checkpoint: Make, tmp_path: Path) -> None:
    recipe, kv = Recipe("float", "channel"), {"kv_cache_scheme": KV_SCHEME}
    folder = quantize_checkpoint(make_checkpoint("llama"), tmp_path / "quantized", recipe, config=kv)
    assert "the weights lack model.layers.0.self_attn.k_scale" in refusal(folder)
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([value + layer])
        for layer in range(3)
        for name, value in (("k_scale", 0.25), ("v_scale", 0.5))
    }
    edit(folder, dict(scales))
    seen: list[AttentionSpec] = []

    class Watcher(DenseStep):
        def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
            seen.append(spec)
            return super().attend(spec, q_TNH)

    with torch.inference_mode():
        load(folder).forward(torch.arange(3, 6), torch.arange(3), Watcher([(DenseSequence(), 3)]))
    assert [(spec.k_scale, spec.v_scale) for spec in seen] == [(0.25 + n, 0.5 + n) for n in range(3)]


def test_a_scale_of_the_kv_cache_is_positive(make_checkpoint: Make, tmp_path: Path) -> None:
    recipe, kv = Recipe("float", "channel"), {"kv_cache_scheme": KV_SCHEME}
    folder = quantize_checkpoint(make_checkpoint("llama"), tmp_path / "quantized", recipe, config=kv)
    edit(
        folder,
        {f"model.layers.{n}.self_attn.{kind}": torch.zeros(1) for n in range(3) for kind in ("k_scale", "v_scale")},
    )
    assert "self_attn.k_scale is 0.0, no scale: give --kv-cache-dtype auto" in refusal(folder)


def test_dummy_weights_of_a_quantized_shape(quantized: Callable[[Recipe], Path], tmp_path: Path) -> None:
    for number, recipe in enumerate(RECIPES[:4]):
        folder = tmp_path / f"dummy-{number}"
        folder.mkdir()
        made = quantized(recipe)
        shutil.copy(made / "config.json", folder)
        shutil.rmtree(made)
        shutil.rmtree(plain(made))
        out = logits(load_model(folder, read_arch(folder), Placement(torch.float32, CPU, False), "dummy", 1))
        assert out.isfinite().all()
        assert out.std() > 1e-3
