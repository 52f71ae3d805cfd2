"""What torchao's and HQQ's sections of config.json mean, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.models.quantization_config import read_quantization
from pagefleet_protocol.model_config.fields import ConfigFields

from tests.fakes.torchao_checkpoints import PER_GROUP, PER_ROW, PER_TENSOR, Stored, config_of, section_of

LAYER = "model.layers.0.mlp.down_proj"
INT8 = config_of("Int8WeightOnlyConfig", granularity=PER_ROW)
FP8 = config_of("Float8WeightOnlyConfig")
FP8_INPUTS = "Float8DynamicActivationFloat8WeightConfig"
INTX = "Int8DynamicActivationIntxWeightConfig"


def said(section: dict[str, Any], name: str = LAYER) -> str:
    quantization = read_quantization(ConfigFields({"quantization_config": section}, "config.json"))
    assert quantization is not None
    found = quantization.scheme([name])
    return "" if found is None else found.describe()


def dtype(name: str) -> dict[str, Any]:
    return {"_type": "torch.dtype", "_data": name}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FP8, "fp8 weights per channel, inputs as they are"),
        (config_of("Float8WeightOnlyConfig", granularity=PER_GROUP), "fp8 weights per block 1x32, inputs as they are"),
        (config_of(FP8_INPUTS, granularity=[PER_ROW, PER_ROW]), "fp8 weights per channel, inputs per token"),
        (config_of(FP8_INPUTS, granularity=PER_TENSOR), "fp8 weights per tensor, inputs per token"),
        (config_of(FP8_INPUTS), "fp8 weights per tensor, inputs per token"),
        (INT8, "int8 weights per channel, inputs as they are"),
        (config_of("Int8DynamicActivationInt8WeightConfig"), "int8 weights per channel, inputs per token"),
        (
            config_of("Int8DynamicActivationInt8WeightConfig", act_mapping_type={"_data": "ASYMMETRIC"}),
            "int8 weights per channel, inputs per token with zero points",
        ),
        (config_of("Int4WeightOnlyConfig"), "int4 weights per group of 128, zero points (torchao)"),
        (
            config_of("Float8DynamicActivationInt4WeightConfig", 1, int4_packing_format="plain"),
            "int4 weights per group of 128, zero points, fp8 inputs per token (torchao)",
        ),
        (
            config_of(INTX, weight_dtype=dtype("int4"), weight_granularity=PER_GROUP),
            "int4 weights per group of 32 (int-quantized)",
        ),
        (
            config_of("IntxWeightOnlyConfig", weight_dtype=dtype("int6"), granularity={"_type": "PerAxis"}),
            "int8 weights per row (int-quantized)",
        ),
    ],
)
def test_torchao_s_configurations(config: dict[str, Any], expected: str) -> None:
    assert said(section_of(config)) == expected
    assert said(section_of(config), "lm_head") == ""


def test_an_upper_bound_of_inputs() -> None:
    section = section_of(config_of(FP8_INPUTS, granularity=PER_ROW, activation_value_ub=12.0))
    quantization = read_quantization(ConfigFields({"quantization_config": section}, "config.json"))
    assert quantization is not None
    assert getattr(quantization.rules[0].scheme, "input_bound", None) == 12.0


def test_modules_that_are_left() -> None:
    section = section_of(INT8, modules_to_not_convert=["q_proj", "model.layers.1", r"model\.layers\.[23]\.mlp"])
    left = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.3.mlp.up_proj", "lm_head")
    assert all(said(section, name) == "" for name in left)
    assert all(
        said(section, name) for name in (LAYER, "model.layers.2.self_attn.o_proj", "model.layers.11.mlp.up_proj")
    )


@pytest.mark.parametrize("field", ["fqn_to_config", "module_fqn_to_config"])
def test_layers_by_name(field: str) -> None:
    by_name = {
        "_default": INT8,
        "model.embed_tokens": config_of("IntxWeightOnlyConfig", granularity={"_type": "PerAxis", "_data": {"axis": 0}}),
        "model.layers.1.mlp.down_proj": None,
        r"re:model\.layers\..+\.self_attn\..*\.weight": FP8,
        "model.layers.0.self_attn.o_proj.weight": config_of("Int4WeightOnlyConfig", group_size=64),
    }
    section = section_of(config_of("FqnToConfig", 1, **{field: by_name}))
    assert said(section).startswith("int8")
    assert said(section, "model.layers.1.mlp.down_proj") == ""
    assert said(section, "model.layers.0.self_attn.q_proj").startswith("fp8")
    assert said(section, "model.layers.0.self_attn.o_proj").startswith("int4 weights per group of 64")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of("Int8WeightOnlyConfig", 1), "torchao's Int8WeightOnlyConfig of version 1 is not run, only 2"),
        (config_of("NVFP4WeightOnlyConfig", 1), "torchao (quant_method torchao) of NVFP4WeightOnlyConfig is not run"),
        (
            config_of("FqnToConfig", 1, fqn_to_config={"_default": config_of("UIntX")}),
            "of UIntX is not run, only Float8",
        ),
        (config_of("FqnToConfig", 1), "quant_type of torchao quantizes nothing"),
        (config_of("FqnToConfig", 1, fqn_to_config={"re:(": INT8}), "has 're:(', no regular expression"),
        (
            config_of("Float8WeightOnlyConfig", weight_dtype=dtype("float8_e5m2")),
            "weight_dtype of torchao is float8_e5m2",
        ),
        (
            config_of(FP8_INPUTS, packing_format={"_data": "SPARSE_CUTLASS"}),
            "packing_format of torchao is SPARSE_CUTLASS",
        ),
        (config_of(FP8_INPUTS, activation_value_lb=1.0), "inputs have a least scale (activation_value_lb)"),
        (config_of(FP8_INPUTS, granularity=[PER_ROW, PER_GROUP]), "granularities of torchao are PerRow, 32"),
        (config_of("Int8WeightOnlyConfig", granularity={"_type": "PerBlock"}), "granularity of torchao is PerBlock"),
        (config_of(INTX, weight_dtype=dtype("uint4")), "weight_dtype of torchao is uint4"),
        (
            config_of(INTX, intx_packing_format={"_data": "OPAQUE_ATEN_KLEIDIAI"}),
            "intx_packing_format of torchao is OPAQUE",
        ),
        (config_of(INTX, weight_mapping_type={"_data": "ODD"}), "weight_mapping_type of torchao is ODD"),
    ],
)
def test_torchao_that_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        said(section_of(config))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_torchao_before_its_files_were_safetensors() -> None:
    with pytest.raises(
        ModelLoadError, match=r"torchao whose quant_type is a name is of before 0\.15, which wrote pickled"
    ):
        said({"quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 128}})


def test_hqq() -> None:
    assert said(Stored("hqq", 3).config()) == "int4 weights per group of 32, zero points (hqq)"
    assert said(Stored("hqq", 8).config(), "lm_head") == ""
    weights = {"nbits": 8, "group_size": None, "axis": 1}
    by_tag = {"quant_method": "hqq", "quant_config": {"self_attn.q_proj": {"weight_quant_params": weights}}}
    assert said(by_tag, "model.layers.4.self_attn.q_proj") == "int8 weights per row, zero points (hqq)"
    assert said(by_tag) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"axis": 0},
            "HQQ (quant_method hqq) of 4 bits along axis 0 is not run, only of 8, 6, 5, 4, 3, 2, 1 bits along",
        ),
        ({"nbits": 1.58}, "of 1.58 bits along axis 1 is not run"),
    ],
)
def test_hqq_that_is_refused(changed: dict[str, Any], words: str) -> None:
    section = Stored("hqq").config()
    section["quant_config"]["weight_quant_params"] |= changed
    with pytest.raises(ModelLoadError) as error:
        said(section)
    assert words in str(error.value)
