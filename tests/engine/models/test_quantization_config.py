"""The spellings of `quantization_config`, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization_scheme import (
    BlockScheme,
    CodedScheme,
    PackedScheme,
    Quantization,
    QuantizationScheme,
    on_load,
)
from pagefleet_engine.models.quantization_config import read_quantization, settle_quantization
from pagefleet_protocol.model_config.fields import ConfigFields, ModelConfigError
from transformers import BitsAndBytesConfig

from tests.fakes.architectures import llama_arch
from tests.fakes.packed_checkpoints import Packed
from tests.fakes.quantized_checkpoints import Recipe

LAYER = "model.layers.0.mlp.down_proj"
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def read(section: dict[str, Any]) -> Quantization:
    quantization = read_quantization(ConfigFields({"quantization_config": section}, "config.json"))
    assert quantization is not None
    return quantization


def scheme(section: dict[str, Any], name: str = LAYER) -> QuantizationScheme | None:
    found = read(section).scheme([name])
    assert not isinstance(found, PackedScheme | CodedScheme | BlockScheme)
    return found


def packed(section: dict[str, Any], name: str = LAYER) -> PackedScheme | None:
    found = read(section).scheme([name])
    assert not isinstance(found, QuantizationScheme | CodedScheme | BlockScheme)
    return found


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
        (Recipe("int", "channel", zeros=True), "int8 weights per channel, inputs per token with zero points"),
        (Recipe("int", "tensor", "tensor", zeros=True), "int8 weights per tensor, fixed input scale with zero points"),
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


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (Packed("awq", zeros=True, group=128), "int4 weights per group of 128, zero points (awq)"),
        (Packed("gptq", 3, group=None), "int3 weights per row (gptq)"),
        (Packed("gptq_v2", 4, zeros=True), "int4 weights per group of 32, zero points (gptq_v2)"),
        (Packed("gptq", 8, ordered=True), "int8 weights per group of 32 in act order (gptq)"),
        (Packed("pack-quantized", 8, group=None), "int8 weights per row (compressed-tensors)"),
        (Packed("pack-quantized", ordered=True), "int4 weights per group of 32 in act order (compressed-tensors)"),
        (
            Packed("pack-quantized", inputs="float"),
            "int4 weights per group of 32, fp8 inputs per token (compressed-tensors)",
        ),
        (Packed("int-quantized", inputs="int"), "int4 weights per group of 32, int8 inputs per token (int-quantized)"),
        (
            Packed("int-quantized", 8, group=None, zeros=True, inputs="int"),
            "int8 weights per row, zero points, int8 inputs per token (int-quantized)",
        ),
    ],
    ids=str,
)
def test_numbers_of_a_few_bits(stored: Packed, said: str) -> None:
    found = packed(stored.config())
    assert found is not None
    assert found.describe() == said
    assert packed(stored.config(), "lm_head") is None


@pytest.mark.parametrize("order", ["weight", "static", None])
def test_orders_that_are_undone_in_the_file(order: str | None) -> None:
    config = group({"strategy": "group", "group_size": 32, "actorder": order}, format="pack-quantized")
    found = packed(config)
    assert found is not None
    assert not found.act_order


def test_4_bits_of_bitsandbytes_are_fp4_unless_they_say_nf4() -> None:
    """As transformers, whose configuration that is, takes one without its kind."""
    usual = BitsAndBytesConfig(load_in_4bit=True).to_dict()
    without = {name: value for name, value in usual.items() if name != "bnb_4bit_quant_type"}
    found = [read(section) for section in (usual, without)]
    assert usual["bnb_4bit_quant_type"] == "fp4"
    assert found[0] == found[1]
    assert "fp4" in found[0].rules[0].scheme.describe()


def test_layers_that_awq_leaves_out() -> None:
    config = Packed("awq", zeros=True).config() | {"modules_to_not_convert": ["visual", "mlp.gate", "layers.3"]}
    assert packed(config, "model.layers.0.mlp.gate") is None
    assert packed(config, "model.layers.0.mlp.gate_proj") is not None
    assert packed(config, "model.layers.3.mlp.gate_proj") is None
    assert packed(config, "model.layers.30.mlp.gate_proj") is not None


def test_awq_has_zero_points_in_the_file_even_where_all_are_the_same() -> None:
    found = packed(Packed("awq", zeros=True).config() | {"zero_point": False})
    assert found is not None
    assert found.zero_points


def test_layers_that_gptq_names() -> None:
    within = {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.o_proj"], ["mlp.down_proj"]]}
    config = Packed("gptq").config() | within
    assert packed(config) is not None
    assert packed(config, "model.layers.0.self_attn.k_proj") is None


def test_rules_of_gptq_for_some_layers() -> None:
    rules = {
        "-:.*self_attn": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": -1, "desc_act": True},
        "model.layers.1": {"bits": 3},
    }
    config = Packed("gptq").config() | {"dynamic": rules}
    assert packed(config, "model.layers.0.self_attn.k_proj") is None
    found = [
        packed(config, f"model.layers.{layer}.mlp.{name}_proj") for layer, name in ((0, "down"), (0, "up"), (1, "up"))
    ]
    said = [one.describe() for one in found if one is not None]
    assert said == [
        "int8 weights per row (gptq)",
        "int4 weights per group of 32 (gptq)",
        "int3 weights per group of 32 (gptq)",
    ]


AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        ("auto_round:auto_gptq", "int4 weights per group of 32, zero points (gptq)"),
        ("auto_round:gptq", "int4 weights per group of 32, zero points (gptq)"),
        ("auto_round", "int4 weights per group of 32, zero points (gptq_v2)"),
        ("auto_round:gptqmodel", "int4 weights per group of 32, zero points (gptq_v2)"),
        ("autoround:exllamav2", "int4 weights per group of 32, zero points (gptq_v2)"),
        ("auto_round:auto_awq", "int4 weights per group of 32, zero points (awq)"),
        (None, "int4 weights per group of 32, zero points (gptq)"),
    ],
)
@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_packings_of_autoround(method: str, packing: str | None, said: str) -> None:
    found = packed(AUTOROUND | {"quant_method": method, "packing_format": packing})
    assert found is not None
    assert found.describe() == said


def test_rules_of_autoround_for_some_layers() -> None:
    """One by its name counts more than an expression, which is sought anywhere in a name."""
    extra = {
        "model.language_model.layers.0.mlp.down_proj": {"bits": 8, "group_size": -1, "sym": True},
        r".*down_proj$": {"bits": 2},
        "mlp.gate": {"bits": 16, "data_type": "float"},
        "layers.[23].mlp": {"bits": 16},
    }
    config = AUTOROUND | {"extra_config": extra, "block_name_to_quantize": "model.language_model.layers, visual.blocks"}
    said = {
        "0.mlp.down_proj": "int8 weights per row (gptq)",
        "1.mlp.down_proj": "int2 weights per group of 32, zero points (gptq)",
        "1.mlp.gate_proj": "int4 weights per group of 32, zero points (gptq)",
        "1.mlp.gate": None,
        "2.mlp.gate_proj": None,
        "3.self_attn.o_proj": "int4 weights per group of 32, zero points (gptq)",
    }
    found = {name: packed(config, f"model.layers.{name}") for name in said}
    assert {name: one and one.describe() for name, one in found.items()} == said
    assert packed(config, "model.merger.up_proj") is None
    assert packed(config, "lm_head") is None


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


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8 weights per tensor, fixed input scale"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
            "fp8 weights per channel, inputs per token",
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 12.0}, "fp8 weights per channel, inputs per token"),
    ],
)
def test_spellings_of_vendors(section: dict[str, Any], said: str) -> None:
    found = scheme(section)
    assert found is not None
    assert found.describe() == said
    assert found.input_bound == section.get("activation_scale_ub")
    assert scheme(section, "lm_head") is None


def test_modelopt_s_newer_files_name_the_cache_as_compressed_tensors_does() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    for given, expected in (
        ({}, False),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, True),
    ):
        found = read({**config, **given})
        assert found is not None
        assert found.kv_scales == expected
    with pytest.raises(ModelConfigError, match="kv_cache_scheme is 'NVFP4'"):
        read({**config, "kv_cache_scheme": "NVFP4"})


def test_modelopt_names_layers_by_patterns() -> None:
    left = {"exclude_modules": ["lm_head", "model.layers.1*", "*.o_proj"]}
    config = {"quant_method": "modelopt", "quant_algo": "FP8", **left}
    assert scheme(config) is not None
    assert scheme(config, "model.layers.1.mlp.down_proj") is None
    assert scheme(config, "model.layers.0.self_attn.o_proj") is None


def test_dynamic_scales_of_the_whole_step_become_those_of_tokens() -> None:
    found = scheme(group({"type": "float"}, {"type": "float", "strategy": "tensor"}, format="float-quantized"))
    assert found is not None
    assert found.input_scales == "token"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "quip"}, "quant_method is quip"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is int4"),
        (
            group({"num_bits": 4, "group_size": 16}, format="nvfp4-pack-quantized"),
            "int of 4 bits in groups of 16 in nvfp4-pack-quantized",
        ),
        (
            group({"type": "float", "num_bits": 4, "group_size": 32}, format="nvfp4-pack-quantized"),
            "float of 4 bits in groups of 32 in nvfp4-pack-quantized",
        ),
        (
            group({"type": "float", "num_bits": 4}, {"type": "float"}, format="nvfp4-pack-quantized"),
            "inputs of 8 bits in nvfp4-pack-quantized",
        ),
        (
            group({"type": "float", "num_bits": 4, "symmetric": False}, format="mxfp4-pack-quantized"),
            "weights: numbers have a zero point",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size of NVFP4 is 32"),
        ({"bits": 4}, "quant_method is not given"),
        ({"quant_method": "modelopt"}, "quant_algo of ModelOpt is not given"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo of ModelOpt is W4A8_AWQ"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
            "kv_cache_quant_algo of ModelOpt is NVFP4",
        ),
        (
            group({}, {"strategy": "tensor", "dynamic": False}, format="pack-quantized"),
            "weights of few bits or with zero points beside fixed input scale",
        ),
        (
            group({"symmetric": False}, {"symmetric": False}),
            "weights of few bits or with zero points beside inputs per token with zero points",
        ),
        (group({"num_bits": 3}, format="pack-quantized"), "weights: int of 3 bits in pack-quantized"),
        (group({"strategy": "tensor"}, format="pack-quantized"), "strategy tensor in pack-quantized"),
        (group({"actorder": "odd"}, format="pack-quantized"), "actorder is odd"),
        (group({"dynamic": True}, format="pack-quantized"), "weights are quantized at run time"),
        ({"quant_method": "awq", "version": "gemv"}, "version of AWQ is gemv"),
        ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits"),
        ({"quant_method": "awq", "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ of 5 bits"),
        (AUTOROUND | {"data_type": "mx_fp"}, "AutoRound of mx_fp with inputs of 16 bits"),
        (AUTOROUND | {"act_bits": 8}, "AutoRound of int with inputs of 8 bits"),
        (AUTOROUND | {"packing_format": "auto_round:fp8_static"}, "packing_format of AutoRound is auto_round:fp8"),
        (AUTOROUND | {"bits": 2, "packing_format": "auto_round:awq"}, "AWQ of 2 bits"),
        (AUTOROUND | {"extra_config": {"lm_head": {"bits": 4}}}, "AutoRound of the head in 4 bits"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "GPTQ of the head"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format of GPTQ is marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "layout of Marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 7}}}, "GPTQ of 7 bits"),
        (group({}, {}, format=None), "format is not given"),
        (group({"num_bits": 3}, {}), "weights: int of 3 bits"),
        (group({"num_bits": 4, "strategy": "tensor"}, {}), "strategy tensor in int-quantized"),
        (group({"type": "float", "num_bits": 4}), "weights: float of 4 bits"),
        (
            group({"type": "float", "strategy": "group"}, {"type": "float"}, format="float-quantized"),
            "weights: fp8 with strategy group",
        ),
        (group({"strategy": "block", "block_structure": [8, 8]}, {}), "int8 with strategy block"),
        (
            group({"type": "float", "symmetric": False}, {}, format="float-quantized"),
            "weights: numbers have a zero point",
        ),
        (
            group({"type": "float"}, {"type": "float", "symmetric": False}, format="float-quantized"),
            "input_activations: numbers have a zero point",
        ),
        (group({}, {"num_bits": 4}), "input_activations: int of 4 bits"),
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
    ("method", "said"),
    [
        ("aqlm", "AQLM (quant_method aqlm) is not run: choose the model in a form of"),
        ("deepspeedfp", "DeepSpeedFP (quant_method deepspeedfp) is not run: choose the model in"),
        ("eetq", "EETQ (quant_method eetq) is not run: choose"),
        ("quark", "Quark (quant_method quark) of no dtype is not run, only fp8_e4m3: export it so"),
        ("torchao", "torchao whose quant_type is a name is of before 0.15"),
    ],
)
def test_methods_that_are_refused_by_name(method: str, said: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        read({"quant_method": method})
    assert str(error.value).startswith(f"config.json: quantization_config: {said}")
    assert "(--quantization " in str(error.value)


@pytest.mark.parametrize("flag", ["load_in_4bit", "load_in_8bit"])
def test_bitsandbytes_before_it_had_a_name(flag: str) -> None:
    section = {flag: True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["o_proj"]}
    assert read(section) == read(section | {"quant_method": "bitsandbytes"})
    both = {"load_in_4bit": True, "load_in_8bit": True}
    with pytest.raises(ModelLoadError, match="load_in_4bit and load_in_8bit are both true: leave true the one"):
        read(both)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (group({}, {}, ignore=["re:("]), "ignore has 're:(', no regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "dynamic has '-:(', no regular expression"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [3]}, "a list of strings, or of lists"),
        ({"quant_method": "gptq"}, "bits is missing"),
        (AUTOROUND | {"bits": None}, "bits is None; it must be an integer"),
        (AUTOROUND | {"extra_config": {"layers.(": {"bits": 8}}}, "extra_config has 'layers.(', no regular expression"),
        (
            group({"strategy": "group", "group_size": None}, format="pack-quantized"),
            "group_size is None; it must be an integer",
        ),
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
    assert settle_quantization(None, "fp8", False) == on_load("fp8")
    assert settle_quantization(None, "int8", False) == on_load("int8")
    with pytest.raises(ModelLoadError, match=r"--quantization fp8: the checkpoint is quantized already \(int8 weights"):
        settle_quantization(read(group({}, {})), "fp8", False)
