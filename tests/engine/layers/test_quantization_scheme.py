"""Which layer has which scheme: names, patterns, classes, what is ignored, and projections that are merged."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization_scheme import Quantization, QuantizationScheme, Rule, matches, on_load
from pagefleet_engine.layers.weight import Placement

FP8 = QuantizationScheme(number="fp8", weight_scales="channel", input_scales="token")
INT8 = QuantizationScheme(number="int8", weight_scales="channel", input_scales="token")
MLP = "model.layers.3.mlp.down_proj"


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("Linear", MLP, True),
        (MLP, MLP, True),
        ("model.layers.3", MLP, True),
        ("model.layers.3.mlp.down", MLP, False),
        ("model.layers.30", MLP, False),
        ("lm_head", "lm_head", True),
        ("lm_head", MLP, False),
        (r"re:.*down_proj$", MLP, True),
        (r"re:mlp", MLP, False),  # from the name's start on
        (r"re:model\.layers\.[0-2]\.", MLP, False),
        ("Embedding", MLP, False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_an_expression_that_would_take_hours_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"takes too long to compare with aaa.*: repair it"):
        matches(r"re:(a|aa|[a-z]+)*$", "a" * 60 + "!")


def test_the_first_rule_that_names_a_layer_decides() -> None:
    rules = (Rule(("re:.*mlp.*",), INT8), Rule(("Linear",), FP8))
    quantization = Quantization(rules=rules, ignored=("lm_head", "re:.*layers[.]0[.].*"))
    assert quantization.scheme([MLP]) is INT8
    assert quantization.scheme(["model.layers.3.self_attn.o_proj"]) is FP8
    assert quantization.scheme(["lm_head"]) is None
    assert quantization.scheme(["model.layers.0.mlp.down_proj"]) is None


def test_a_layer_that_no_rule_names_stays_as_it_is() -> None:
    assert Quantization(rules=(Rule(("re:.*mlp.*",), INT8),)).scheme(["model.layers.3.self_attn.o_proj"]) is None


def test_merged_projections_are_looked_up_by_the_checkpoints_names() -> None:
    quantization = Quantization(rules=(Rule(("re:.*(q|k|v)_proj",), FP8),))
    place = Placement(torch.float32, torch.device("cpu"), False, quantization).within("model.layers.0")
    assert place.within("self_attn").within("qkv_proj").scheme(3) is FP8
    assert place.within("self_attn.o_proj").scheme(1) is None
    # One tensor in the checkpoint as well: its own name counts.
    assert place.within("self_attn.qkv_proj").scheme(1) is FP8


def test_merged_projections_must_agree() -> None:
    quantization = Quantization(rules=(Rule(("Linear",), FP8),), ignored=("re:.*k_proj",))
    place = Placement(torch.float32, torch.device("cpu"), False, quantization).within("attn.qkv_proj")
    with pytest.raises(ModelLoadError, match=r"attn.k_proj: not quantized.*quantize them alike"):
        place.scheme(3)


def test_without_quantization_nothing_has_a_scheme() -> None:
    assert Placement(torch.float32, torch.device("cpu"), False, path=MLP).scheme(1) is None


def test_on_load_the_head_stays_as_it_is() -> None:
    quantization = on_load("fp8")
    assert quantization.scheme(["lm_head"]) is None
    scheme = quantization.scheme([MLP])
    assert isinstance(scheme, QuantizationScheme)
    assert scheme.on_load
    assert scheme.storage == torch.float8_e4m3fn


def test_a_scheme_says_what_it_is() -> None:
    block = QuantizationScheme(number="fp8", weight_scales="block", input_scales="group", block=(128, 64))
    assert block.describe() == "fp8 weights per block 128x64, inputs per token and group"
    assert INT8.describe() == "int8 weights per channel, inputs per token"
