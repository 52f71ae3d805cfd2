"""AMD Quark's `quantization_config`: what it means here, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization_scheme import Quantization
from pagefleet_engine.models.quantization_config import read_quantization
from pagefleet_protocol.model_config.fields import ConfigFields, ModelConfigError

from tests.fakes.quantized_checkpoints import quark

LAYER = "model.layers.0.mlp.down_proj"
STATIC = quark({}, {})["global_quant_config"]
OUTPUTS = STATIC["weight"]


def read(section: dict[str, Any]) -> Quantization:
    quantization = read_quantization(ConfigFields({"quantization_config": section}, "config.json"))
    assert quantization is not None
    return quantization


def said_of(section: dict[str, Any], name: str = LAYER) -> str | None:
    found = read(section).scheme([name])
    return None if found is None else found.describe()


@pytest.mark.parametrize(
    ("weight", "inputs", "said"),
    [
        ({}, {}, "fp8 weights per tensor, fixed input scale"),
        ({}, {"is_dynamic": True}, "fp8 weights per tensor, inputs per token"),
        (
            {"qscheme": "per_channel", "ch_axis": 0},
            {"is_dynamic": True, "qscheme": "per_channel", "ch_axis": 1},
            "fp8 weights per channel, inputs per token",
        ),
        ({"qscheme": "per_channel", "ch_axis": 0}, {}, "fp8 weights per channel, fixed input scale"),
        ({}, None, "fp8 weights per tensor, inputs as they are"),
    ],
)
def test_forms_of_fp8(weight: dict[str, Any], inputs: dict[str, Any] | None, said: str) -> None:
    assert said_of(quark(weight, inputs)) == said
    assert said_of(quark(weight, inputs), "lm_head") is None


def test_layers_by_patterns() -> None:
    dynamic = STATIC | {"input_tensors": STATIC["input_tensors"] | {"is_dynamic": True}}
    layers = {"*down_proj": dynamic, "*o_proj": {"weight": None}}
    section = quark({}, {}, layer_quant_config=layers, exclude=["model.layers.1.*", "re:.*layers[.]2"])
    assert said_of(section) == "fp8 weights per tensor, inputs per token"
    assert said_of(section, "model.layers.0.mlp.up_proj") == "fp8 weights per tensor, fixed input scale"
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"):
        assert said_of(section, name) is None


def test_keys_and_values_are_outputs_of_the_group_that_says_so() -> None:
    cached = ["*k_proj", "*v_proj"]
    layers = {name: STATIC | {"output_tensors": OUTPUTS} for name in (*cached, "*q_proj")}
    section = quark({}, {}, layer_quant_config=layers, export={"kv_cache_group": cached})
    assert read(section).kv_scales
    assert not read(quark({}, {})).kv_scales


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (quark({}, {"dtype": "int8"}), "input_tensors: dtype of Quark is int8"),
        (quark({"is_dynamic": True}, {}), "weights are quantized at run time"),
        (quark({"qscheme": "per_group"}, {}), "weights of Quark are per_group (ch_axis 0)"),
        (quark({"qscheme": "per_channel", "ch_axis": 1}, {}), "weights of Quark are per_channel (ch_axis 1)"),
        (quark({}, {"qscheme": "per_channel"}), "static inputs of Quark are per_channel"),
        (quark({}, {}, export={"weight_format": "fake_quantized"}), "weight_format of Quark is fake_quantized"),
        (quark({}, {}, softmax_quant_spec={"dtype": "int8"}), "softmax_quant_spec or layer_type_quant_config"),
        (quark({}, {}, layer_type_quant_config={"Linear": STATIC}), "softmax_quant_spec or layer_type_quant_config"),
        (quark({}, {}, algo_config=[{"name": "awq"}, {"name": "rotation"}]), "algo_config of Quark has a rotation"),
        (quark({}, {}, layer_quant_config={"*k_proj": STATIC | {"output_tensors": OUTPUTS}}), "outputs are quantized"),
        (quark({}, {}, layer_quant_config={"*k_proj": STATIC | {"bias": OUTPUTS}}), "biases are quantized"),
        (
            quark(
                {},
                {},
                layer_quant_config={"*k_proj": STATIC | {"output_tensors": OUTPUTS | {"is_dynamic": True}}},
                export={"kv_cache_group": ["*k_proj"]},
            ),
            "the KV cache is scaled otherwise",
        ),
        (quark({}, {}, exclude=["re:("]), "exclude has 're:(', no regular expression"),
    ],
)
def test_what_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(section)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_algorithms_are_objects() -> None:
    with pytest.raises(ModelConfigError, match="algo_config is 'awq'; it must be a list of objects"):
        read(quark({}, {}, algo_config="awq"))
