"""The two spellings of `quantization_config`, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization_scheme import Quantization, QuantizationScheme, fp8_on_load
from pagefleet_engine.models.quantization_config import read_quantization, settle_quantization
from pagefleet_protocol.model_config.fields import ConfigFields, ModelConfigError

from tests.fakes.architectures import llama_arch
from tests.fakes.quantized_checkpoints import Recipe

LAYER = "model.layers.0.mlp.down_proj"
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def read(section: dict[str, Any]) -> Quantization:
    quantization = read_quantization(ConfigFields({"quantization_config": section}, "config.json"))
    assert quantization is not None
    return quantization


def scheme(section: dict[str, Any], name: str = LAYER) -> QuantizationScheme | None:
    return read(section).scheme([name])


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """compressed-tensors, int8 per channel and token unless changed."""
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    args = {
        "weights": number | {"strategy": "channel", "dynamic": False} | weights,
        "input_activations": None if inputs is None else number | {"strategy": "token", "dynamic": True} | inputs,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": args},
        "ignore": ["lm_head"],
    } | changes


def test_no_section_is_no_quantization() -> None:
    assert llama_arch().quantization is None
    assert llama_arch(quantization_config=None).quantization is None


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe("float", "tensor", "tensor"), "fp8 weights per tensor, fixed input scale"),
        (Recipe("float", "channel", "token"), "fp8 weights per channel, inputs per token"),
        (Recipe("float", "block", "group", (128, 128)), "fp8 weights per block 128x128, inputs per token and group"),
        (Recipe("int", "channel", "token"), "int8 weights per channel, inputs per token"),
        (Recipe("int", "channel", "none"), "int8 weights per channel, inputs as they are"),
        (Recipe("float", "tensor", "token", plain_fp8=True), "fp8 weights per tensor, inputs per token"),
        (Recipe("float", "tensor", "tensor", plain_fp8=True), "fp8 weights per tensor, fixed input scale"),
        (
            Recipe("float", "block", "group", (128, 128), plain_fp8=True),
            "fp8 weights per block 128x128, inputs per token and group",
        ),
    ],
    ids=str,
)
def test_what_is_read(recipe: Recipe, said: str) -> None:
    found = scheme(recipe.config())
    assert found is not None
    assert found.describe() == said
    assert found.scale_name == recipe.scale_name
    assert not found.on_load
    assert scheme(recipe.config(), "lm_head") is None


def test_the_arch_carries_it() -> None:
    quantization = llama_arch(quantization_config=Recipe("int", "channel").config()).quantization
    assert quantization is not None
    assert len(quantization.rules) == 1


def test_groups_have_targets_of_their_own() -> None:
    config = group({}, {})
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    config["config_groups"]["group_1"] = Recipe("float", "channel").config()["config_groups"]["group_0"]
    config["config_groups"]["group_1"]["format"] = "float-quantized"
    mlp, attention = scheme(config), scheme(config, "model.layers.0.self_attn.o_proj")
    assert mlp is not None
    assert attention is not None
    assert (mlp.number, attention.number) == ("int8", "fp8")


def test_layers_that_are_not_converted() -> None:
    config = Recipe("float", "tensor", plain_fp8=True).config() | {"modules_to_not_convert": ["model.layers.0"]}
    assert scheme(config) is None
    assert scheme(config, "model.layers.1.mlp.down_proj") is not None


@pytest.mark.parametrize("prefix", ["model.layers", "language_model.model.layers", "model.language_model.layers"])
def test_names_of_a_text_model_within_another(prefix: str) -> None:
    config = group({}, {}, ignore=[f"{prefix}.0.mlp.down_proj", "language_model.lm_head"])
    assert scheme(config) is None
    assert scheme(config, "lm_head") is None
    assert scheme(config, "model.layers.1.mlp.down_proj") is not None


def test_dynamic_scales_of_the_whole_step_become_those_of_tokens() -> None:
    found = scheme(group({"type": "float"}, {"type": "float", "strategy": "tensor"}, format="float-quantized"))
    assert found is not None
    assert found.input_scales == "token"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "awq"}, "quant_method is awq"),
        ({"bits": 4}, "quant_method is not given"),
        (group({}, {}, format="pack-quantized"), "format is pack-quantized"),
        (group({}, {}, format=None), "format is not given"),
        (group({"num_bits": 4}, {}), "weights: int of 4 bits"),
        (group({"type": "float", "num_bits": 4}), "weights: float of 4 bits"),
        (group({"strategy": "group"}, {}), "weights: int8 with strategy group"),
        (group({"strategy": "block", "block_structure": [8, 8]}, {}), "int8 with strategy block"),
        (group({"symmetric": False}, {}), "weights: numbers have a zero point"),
        (group({}, {"symmetric": False}), "input_activations: numbers have a zero point"),
        (group({}, {"dynamic": False}), "static inputs with strategy token"),
        (group({}, {"strategy": "group"}), "dynamic inputs with strategy group"),
        (group({}, {"type": "float"}), "inputs and weights are of different types"),
        (group({"dynamic": True}, {}), "weights are quantized at run time"),
        (group({}, {}, config_groups={}), "config_groups is empty"),
        (group({}, {}, sparsity_config={"format": "sparse-24-bitmask"}), "the weights are sparse"),
        (group({}, {}, kv_cache_scheme=KV_SCHEME | {"type": "int"}), "kv_cache_scheme: the KV cache is scaled"),
        (group({}, {}, kv_cache_scheme=KV_SCHEME | {"dynamic": True}), "kv_cache_scheme: the KV cache is scaled"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is e5m2"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme is odd"),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
            "static with weight_block_size",
        ),
    ],
)
def test_what_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(section)
    assert said in str(error.value)
    assert str(error.value).startswith("config.json: quantization_config")
    assert "; pagefleet runs fp8 (e4m3) or int8 weights" in str(error.value)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (group({}, {}, ignore=["re:("]), "ignore has 're:(', no regular expression"),
        (group({}, {}, ignore="lm_head"), "ignore is 'lm_head'; it must be a list of strings"),
        (group({"type": "float", "strategy": "block"}, None), "block_structure is missing; it must be a list of two"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is [128, 0]"),
    ],
)
def test_what_cannot_be_understood(section: dict[str, Any], said: str) -> None:
    with pytest.raises((ModelConfigError, ModelLoadError)) as error:
        read(section)
    assert said in str(error.value)
    assert str(error.value).endswith("repair the file")


def test_scales_of_the_kv_cache_count_where_it_is_in_fp8() -> None:
    quantization = read(group({}, {}, kv_cache_scheme=KV_SCHEME))
    assert quantization.kv_scales
    with_fp8, without = (settle_quantization(quantization, None, fp8) for fp8 in (True, False))
    assert with_fp8 == quantization
    assert without is not None
    assert not without.kv_scales


def test_quantization_on_load() -> None:
    assert settle_quantization(None, None, True) is None
    assert settle_quantization(None, "fp8", False) == fp8_on_load()
    with pytest.raises(ModelLoadError, match=r"--quantization fp8: the checkpoint is quantized already \(int8 weights"):
        settle_quantization(read(group({}, {})), "fp8", False)
