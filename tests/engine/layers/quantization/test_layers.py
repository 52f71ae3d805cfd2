"""Quantized layers against the formula: what the stored numbers stand for times the rounded inputs, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear import GatedLinear, Linear
from pagefleet_engine.layers.quantization import form as form_module
from pagefleet_engine.layers.quantization.inputs import InputQuantizer, joined
from pagefleet_engine.layers.quantization_scheme import (
    Quantization,
    QuantizationScheme,
    RoundedNumber,
    Rounding,
    Rule,
    on_load,
)
from pagefleet_engine.layers.weight import HasWeights, Placement, Weight
from pagefleet_engine.ranks.group import Alone, Reduction
from torch import Tensor

from tests.fakes.native_kernels import native_library
from tests.fakes.quantized_checkpoints import INPUT_ZERO, Recipe, quantize, rounded_inputs

CPU = torch.device("cpu")
BLOCK = (16, 16)
ODD_BLOCK = (16, 32)
RECIPES = [
    Recipe("float", "tensor", "tensor"),
    Recipe("float", "tensor", "token"),
    Recipe("float", "channel", "token"),
    Recipe("float", "channel", "none"),
    Recipe("float", "block", "group", BLOCK),
    Recipe("float", "block", "none", BLOCK),
    Recipe("float", "block", "group", ODD_BLOCK),
    Recipe("int", "channel", "token"),
    Recipe("int", "channel", "tensor"),
    Recipe("int", "tensor", "token"),
    Recipe("int", "channel", "none"),
    Recipe("int", "channel", "token", zeros=True),
    Recipe("int", "tensor", "tensor", zeros=True),
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 5e-2}
INPUTS = 80


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scheme_of(recipe: Recipe) -> QuantizationScheme:
    return QuantizationScheme(
        number="fp8" if recipe.kind == "float" else "int8",
        weight_scales=recipe.strategy,  # type: ignore[arg-type]
        input_scales=recipe.inputs,  # type: ignore[arg-type]
        block=recipe.block,
        input_zero_points=recipe.zeros,
    )


def placed(recipe: Recipe, dtype: torch.dtype, use_kernels: bool = False) -> Placement:
    rule = Rule(("Linear",), scheme_of(recipe))
    return Placement(dtype, CPU, use_kernels, Quantization(rules=(rule,)), "qkv_proj")


def fill(layer: HasWeights, weights: list[Tensor], recipe: Recipe) -> Tensor:
    """Fill the layer with the quantized parts; returns what they stand for, stacked."""
    slots: dict[str, Weight] = dict(layer.weights())
    meant = []
    for part, weight in enumerate(weights):
        stored, scale, stands_for = quantize(weight, recipe)
        slots["weight"].fill(part, stored)
        slots["weight_scale"].fill(part, scale)
        if recipe.inputs == "tensor":
            slots["input_scale"].fill(part, torch.tensor(0.05))
        if recipe.inputs == "tensor" and recipe.zeros:
            slots["input_zero_point"].fill(part, torch.tensor(INPUT_ZERO, dtype=torch.int8))
        meant.append(stands_for)
    return torch.cat(meant).double()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("use_kernels", [False, True])
@torch.inference_mode()
def test_merged_layers_compute_the_formula(recipe: Recipe, dtype: torch.dtype, rows: int, use_kernels: bool) -> None:
    outputs = (32, 16, 48)
    layer = Linear(INPUTS, outputs, True, placed(recipe, dtype, use_kernels))
    weights = [numbers(size, INPUTS, seed=size) * size / 90 for size in outputs]  # parts of different scale
    weight = fill(layer, weights, recipe)
    bias = numbers(96, dtype=dtype, seed=7)
    for part, values in enumerate(torch.split(bias, list(outputs))):
        dict(layer.weights())["bias"].fill(part, values)
    x = numbers(rows, INPUTS, dtype=dtype, seed=1)
    expected = F.linear(rounded_inputs(x, recipe), weight, bias.double())
    check = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    check(layer(x).double(), expected)
    residual = numbers(rows, 96, dtype=dtype, seed=2)
    total, pending = layer.add_to(residual.clone(), x)
    check((total if pending is None else total + pending).double(), expected + residual.double())


@pytest.mark.parametrize("recipe", [one for one in RECIPES if one.kind == "int" and not one.zeros], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7])
@torch.inference_mode()
def test_compiled_products_round_inputs_as_the_scheme_says(recipe: Recipe, dtype: torch.dtype, rows: int) -> None:
    """Or in blocks, where it says nothing."""
    outputs = (32, 16, 48)
    layer = Linear(INPUTS, outputs, True, replace(placed(recipe, dtype), native=native_library()))
    weight = fill(layer, [numbers(size, INPUTS, seed=size) * size / 90 for size in outputs], recipe)
    bias = numbers(96, dtype=dtype, seed=7)
    for part, values in enumerate(torch.split(bias, list(outputs))):
        dict(layer.weights())["bias"].fill(part, values)
    x = numbers(rows, INPUTS, dtype=dtype, seed=1)
    expected = F.linear(rounded_inputs(x, recipe), weight, bias.double())
    close = TOLERANCE[dtype] if recipe.inputs != "none" else 0.1
    torch.testing.assert_close(layer(x).double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("use_kernels", [False, True])
@torch.inference_mode()
def test_gated_layers_compute_the_formula(recipe: Recipe, use_kernels: bool) -> None:
    layer = GatedLinear(INPUTS, (32, 32), False, placed(recipe, torch.float32, use_kernels).within("gate_up_proj"))
    weight = fill(layer, [numbers(32, INPUTS, seed=1) / 9, numbers(32, INPUTS, seed=2) / 3], recipe)
    x = numbers(4, INPUTS, seed=3)
    gate, up = F.linear(rounded_inputs(x, recipe), weight).chunk(2, -1)
    out = layer(x)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", [one for one in RECIPES if one.block is not None], ids=str)
@torch.inference_mode()
def test_gate_and_up_in_one_tensor_may_part_within_a_block(recipe: Recipe) -> None:
    layer = GatedLinear(INPUTS, (48,), False, placed(recipe, torch.float32).within("gate_up_proj"))
    weight = fill(layer, [numbers(48, INPUTS, seed=1) / 9 * torch.arange(1, 49)[:, None]], recipe)
    x = numbers(4, INPUTS, seed=3)
    gate, up = F.linear(rounded_inputs(x, recipe), weight).chunk(2, -1)
    out = layer(x)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("use_kernels", [False, True])
@torch.inference_mode()
def test_a_rank_without_tokens_multiplies_none(recipe: Recipe, use_kernels: bool) -> None:
    layer = Linear(INPUTS, (32,), False, placed(recipe, torch.bfloat16, use_kernels))
    fill(layer, [numbers(32, INPUTS)], recipe)
    assert layer(numbers(0, INPUTS, dtype=torch.bfloat16)).shape == (0, 32)


@pytest.mark.parametrize("has_int8", [True, False])
@pytest.mark.parametrize("zeros", [True, False])
@torch.inference_mode()
def test_with_and_without_onednns_int8_the_numbers_are_exact(
    has_int8: bool, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_int8 and not form_module.has_onednn_int8():
        pytest.skip("oneDNN has no exact int8 product on this processor")
    monkeypatch.setattr(form_module, "has_onednn_int8", lambda: has_int8)
    recipe = Recipe("int", "channel", zeros=zeros)
    layer = Linear(INPUTS, (32,), False, placed(recipe, torch.float32))
    weight = fill(layer, [numbers(32, INPUTS)], recipe)
    x = numbers(3, INPUTS, seed=4)
    torch.testing.assert_close(layer(x).double(), F.linear(rounded_inputs(x, recipe), weight), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("number", ["fp8", "int8"])
def test_on_load_there_is_one_scale_per_row(number: RoundedNumber) -> None:
    layer = Linear(INPUTS, (32, 16, 16), False, Placement(torch.float32, CPU, False, on_load(number), "qkv_proj"))
    weights = [numbers(size, INPUTS, seed=part) * (part + 1) for part, size in enumerate((32, 16, 16))]
    recipe = Recipe("float" if number == "fp8" else "int", "channel")
    meant = []
    for part, weight in enumerate(weights):
        dict(layer.weights())["weight"].fill(part, weight)
        meant.append(quantize(weight, recipe)[2])
    x = numbers(3, INPUTS, seed=9)
    expected = F.linear(rounded_inputs(x, recipe), torch.cat(meant).double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("computed_by", ["torch", "kernels", "native"])
@torch.inference_mode()
def test_a_damaged_input_stays_in_its_row(recipe: Recipe, computed_by: str) -> None:
    """What is no number is none in 8 bits; what is infinite may be the largest of a fixed range."""
    place = placed(recipe, torch.float32, computed_by == "kernels")
    layer = Linear(INPUTS, (32,), False, replace(place, native=native_library() if computed_by == "native" else None))
    fill(layer, [numbers(32, INPUTS)], recipe)
    x = numbers(4, INPUTS, seed=5)
    clean = layer(x)
    x[1, 3], x[2, 7] = float("nan"), float("inf")
    out = layer(x)
    assert out[1].isnan().all()
    assert recipe.inputs == "tensor" or not out[2].isfinite().any()
    assert torch.equal(out[[0, 3]], clean[[0, 3]])


@torch.inference_mode()
def test_inputs_of_zero_give_the_bias_alone() -> None:
    recipe = Recipe("float", "channel")
    layer = Linear(INPUTS, (32,), False, placed(recipe, torch.float32))
    fill(layer, [numbers(32, INPUTS)], recipe)
    assert torch.equal(layer(torch.zeros(2, INPUTS)), torch.zeros(2, 32))


def test_blocks_must_end_where_parts_do() -> None:
    recipe = Recipe("float", "block", "group", BLOCK)
    with pytest.raises(ModelLoadError, match=r"qkv_proj: parts of 32, 8, 8 rows .* block of 16 rows"):
        Linear(INPUTS, (32, 8, 8), False, placed(recipe, torch.float32))


@pytest.mark.parametrize(("name", "value"), [("weight_scale", float("nan")), ("input_scale", 0.0)])
def test_a_scale_that_spoils_every_answer_is_refused(name: str, value: float) -> None:
    recipe = Recipe("float", "channel", "tensor")
    slots = dict(Linear(INPUTS, (32,), False, placed(recipe, torch.float32)).weights())
    stored, scale, _ = quantize(numbers(32, INPUTS), recipe)
    given = {"weight_scale": scale, "input_scale": torch.tensor(0.05)}
    for slot, tensor in given.items():
        slots[slot].fill(0, torch.full_like(tensor, value) if slot == name else tensor)
    with pytest.raises(ModelLoadError, match=f"qkv_proj: {name} holds no usable scale"):
        slots["weight"].fill(0, stored)


@torch.inference_mode()
def test_parts_with_zero_points_of_their_own_share_those_of_the_widest_range() -> None:
    recipe = Recipe("int", "channel", "tensor", zeros=True)
    slots = dict(Linear(INPUTS, (32, 32), False, placed(recipe, torch.float32).within("gate_up_proj")).weights())
    for part, (scale, zero) in enumerate(((0.5, -128), (0.25, 127))):  # 0 to 127.5, and -63.75 to 0
        stored, scales, _ = quantize(numbers(32, INPUTS), recipe)
        slots["weight_scale"].fill(part, scales)
        slots["input_scale"].fill(part, torch.tensor(scale))
        slots["input_zero_point"].fill(part, torch.tensor(zero, dtype=torch.int8))
        slots["weight"].fill(part, stored)
    both = joined(torch.tensor([0.5, 0.25]), torch.tensor([-128, 127], dtype=torch.int8))
    assert both.zero is not None
    assert float(both.scale) == pytest.approx((127.5 + 63.75) / 255)
    assert float(both.zero) == -43.0


@pytest.mark.parametrize("use_kernels", [False, True])
@torch.inference_mode()
def test_inputs_beyond_a_bound_count_as_that(use_kernels: bool) -> None:
    scheme = QuantizationScheme(number="fp8", weight_scales="channel", input_scales="token", input_bound=2.0)
    place = Placement(torch.float32, CPU, use_kernels, Quantization(rules=(Rule(("Linear",), scheme),)), "o_proj")
    layer, recipe = Linear(INPUTS, (32,), False, place), Recipe("float", "channel")
    weight = fill(layer, [numbers(32, INPUTS)], recipe)
    x = numbers(3, INPUTS, seed=4)
    x[1, 5] = 90.0
    assert layer.rounding is None
    expected = F.linear(rounded_inputs(x.clamp(-2.0, 2.0), recipe), weight)
    torch.testing.assert_close(layer(x).double(), expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
def test_ranks_that_share_a_token_share_its_zero_point() -> None:
    x = numbers(3, INPUTS, seed=6) + 1.0
    ends = torch.stack((-x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)))

    class Both(Alone):
        def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
            assert reduction == "max"
            return torch.maximum(x, ends)

    rounding = Rounding(number="int8", scales="token", zero_points=True)
    whole, scale, zero = InputQuantizer(rounding, None).numbers(x)
    part, own_scale, own_zero = InputQuantizer(rounding, None, Both()).numbers(x[:, :32])
    assert zero is not None
    assert own_zero is not None
    assert torch.equal(part, whole[:, :32])
    assert torch.equal(own_scale, scale)
    assert torch.equal(own_zero, zero)


@pytest.mark.parametrize("zeros", [True, False])
@torch.inference_mode()
def test_ranks_keep_a_damage_of_their_own_whatever_their_network_makes_of_it(zeros: bool) -> None:
    class Dropping(Alone):
        def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
            return x.nan_to_num_(1.0)

    x = numbers(3, INPUTS)
    x[1, 3] = torch.nan
    rounding = Rounding(number="int8", scales="token", zero_points=zeros)
    _, scale, _ = InputQuantizer(rounding, None, Dropping()).numbers(x)
    assert scale.isnan().tolist() == [[False], [True], [False]]
