"""Layers in numbers of a few bits against what the numbers stand for, in every format and form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.layers.linear import GatedLinear, Linear
from pagefleet_engine.layers.quantization.packing import unpack
from pagefleet_engine.layers.quantization_scheme import PackedScheme, Quantization, RoundedNumber, Rounding, Rule
from pagefleet_engine.layers.shard import Shard, shard_of
from pagefleet_engine.layers.weight import HasWeights, Placement, Weight
from torch import Tensor

from tests.example_counts import examples
from tests.fakes.native_kernels import native_library
from tests.fakes.packed_checkpoints import Packed, into_words, pack, quantize_packed
from tests.fakes.quantized_checkpoints import Recipe, rounded_inputs

CPU = torch.device("cpu")
ALL = [
    Packed("pack-quantized"),
    Packed("pack-quantized", group=None),
    Packed("pack-quantized", zeros=True),
    Packed("pack-quantized", ordered=True),
    Packed("pack-quantized", 8, group=64),
    Packed("pack-quantized", 8, zeros=True, group=None),
    Packed("awq", zeros=True),
    Packed("awq", zeros=True, group=16),
    Packed("gptq"),
    Packed("gptq", zeros=True, ordered=True),
    Packed("gptq", 2, zeros=True),
    Packed("gptq", 3),
    Packed("gptq", 3, zeros=True, ordered=True),
    Packed("gptq", 8, zeros=True, ordered=True),
    Packed("gptq", group=None),
    Packed("gptq_v2", zeros=True),
    Packed("gptq_v2", 3, zeros=True, group=None),
    Packed("int-quantized", inputs="int"),
    Packed("int-quantized", zeros=True, inputs="int"),
    Packed("int-quantized", 8, group=None, zeros=True, inputs="int"),
    Packed("int-quantized", 8, zeros=True),
    Packed("pack-quantized", inputs="float"),
    Packed("pack-quantized", group=None, inputs="int"),
    Packed("pack-quantized", zeros=True, ordered=True, inputs="float"),
]
_PACKINGS = {"pack-quantized": "compressed-tensors"}
_NUMBERS: dict[str, RoundedNumber] = {"int": "int8", "float": "fp8"}
INPUTS = 128
OUTPUTS = (64, 32, 32)


def scheme_of(packed: Packed) -> PackedScheme:
    return PackedScheme(
        packing=_PACKINGS.get(packed.format, packed.format),  # type: ignore[arg-type]
        bits=packed.bits,
        group_size=packed.group,
        zero_points=packed.zeros,
        act_order=packed.ordered,
        inputs=Rounding(number=_NUMBERS[packed.inputs], scales="token") if packed.inputs else None,
    )


def multiplied(x: Tensor, packed: Packed) -> Tensor:
    """The inputs that a layer computes with, in float64."""
    return rounded_inputs(x, Recipe(packed.inputs, "channel")) if packed.inputs else x.double()


def placed(packed: Packed, dtype: torch.dtype, use_kernels: bool, layer: str = "qkv_proj", **more: Any) -> Placement:
    rule = Rule(("Linear",), scheme_of(packed))
    return Placement(dtype, CPU, use_kernels, Quantization(rules=(rule,)), layer, **more)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fill(layer: HasWeights, weights: list[Tensor], packed: Packed) -> Tensor:
    """Fill the layer with the packed parts; returns what they stand for, stacked."""
    slots: dict[str, Weight] = dict(layer.weights())
    meant = []
    for part, weight in enumerate(weights):
        made = quantize_packed(weight, packed)
        for kind, tensor in pack(made, packed).items():
            if kind in slots:
                slots[kind].fill(part, tensor)
        meant.append(made.meant())
    assert all(slot.is_complete for kind, slot in slots.items() if kind != "bias")
    return torch.cat(meant).double()


@pytest.mark.parametrize("packed", ALL, ids=str)
@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@torch.inference_mode()
def test_merged_layers_compute_the_formula(packed: Packed, use_kernels: bool, dtype: torch.dtype, close: float) -> None:
    layer = Linear(INPUTS, OUTPUTS, True, placed(packed, dtype, use_kernels))
    meant = fill(layer, [numbers(size, INPUTS, seed=size + part) / 9 for part, size in enumerate(OUTPUTS)], packed)
    bias = numbers(sum(OUTPUTS), dtype=dtype, seed=7)
    for part, values in enumerate(torch.split(bias, list(OUTPUTS))):
        dict(layer.weights())["bias"].fill(part, values)
    for rows in (1, 5):
        x = numbers(rows, INPUTS, dtype=dtype, seed=1)
        expected = F.linear(multiplied(x, packed), meant, bias.double())
        torch.testing.assert_close(layer(x).double(), expected, rtol=close, atol=close * 4)
        residual = numbers(rows, sum(OUTPUTS), dtype=dtype, seed=2)
        total, pending = layer.add_to(residual.clone(), x)
        both = (total if pending is None else total + pending).double()
        torch.testing.assert_close(both, expected + residual.double(), rtol=close, atol=close * 4)


@pytest.mark.parametrize("packed", ALL, ids=str)
@pytest.mark.parametrize("use_kernels", [False, True])
@torch.inference_mode()
def test_gated_layers_compute_the_formula(packed: Packed, use_kernels: bool) -> None:
    layer = GatedLinear(INPUTS, (64, 64), False, placed(packed, torch.float32, use_kernels, "gate_up_proj"))
    meant = fill(layer, [numbers(64, INPUTS, seed=1) / 9, numbers(64, INPUTS, seed=2) / 3], packed)
    x = numbers(4, INPUTS, seed=3)
    gate, up = F.linear(multiplied(x, packed), meant).chunk(2, -1)
    out = layer(x)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [one for one in ALL if one.inputs != "float"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_compiled_products_round_inputs_and_nothing_else(packed: Packed, dtype: torch.dtype) -> None:
    """Inputs that are whole numbers up to 127 are exact in 8 bits: so are layers, up to their sums' rounding."""
    place = placed(packed, dtype, False, native=native_library())
    layer = Linear(INPUTS, OUTPUTS, True, place)
    gated = GatedLinear(INPUTS, (64, 64), False, replace(place, path="gate_up_proj"))
    meant = fill(layer, [numbers(size, INPUTS, seed=size + part) / 9 for part, size in enumerate(OUTPUTS)], packed)
    both = fill(gated, [numbers(64, INPUTS, seed=1) / 9, numbers(64, INPUTS, seed=2) / 3], packed)
    bias = numbers(sum(OUTPUTS), dtype=dtype, seed=7)
    for part, values in enumerate(torch.split(bias, list(OUTPUTS))):
        dict(layer.weights())["bias"].fill(part, values)
    # Scales of groups are kept in 16 bits; some are of 32 in the checkpoint.
    close = 2e-3 if dtype == torch.float32 else 3e-2
    for rows in (1, 5, 17):
        x = torch.randint(-127, 128, (rows, INPUTS), generator=torch.Generator().manual_seed(rows)).to(dtype)
        x[:, ::16] = 127
        expected = F.linear(x.double(), meant, bias.double())
        atol = close * float(expected.abs().max())
        torch.testing.assert_close(layer(x).double(), expected, rtol=close, atol=atol)
        residual = numbers(rows, sum(OUTPUTS), dtype=dtype, seed=2)
        total, pending = layer.add_to(residual.clone(), x)
        assert pending is None
        torch.testing.assert_close(total.double(), expected + residual.double(), rtol=close, atol=atol)
        gate, up = F.linear(x.double(), both).chunk(2, -1)
        out = gated(x)
        assert isinstance(out, Tensor)
        product = F.silu(gate) * up
        torch.testing.assert_close(out.double(), product, rtol=close, atol=close * float(product.abs().max()))


@settings(max_examples=examples(40), deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), words=st.integers(1, 4), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_words_hold_a_stream_of_bits(bits: int, words: int, rows: int, seed: int) -> None:
    """By rows, and as GPTQ has them: there a rank's rows may have a single word."""
    count = words * (32 if bits == 3 else 32 // bits)
    made = torch.randint(0, 1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    stored = into_words(made, bits)
    by_columns = stored.t().clone(memory_format=torch.contiguous_format).t()
    assert torch.equal(unpack(stored, bits).long(), made)
    assert torch.equal(unpack(by_columns, bits).long(), made)


@pytest.mark.parametrize("packed", ALL, ids=str)
@pytest.mark.parametrize("cut", ["outputs", "inputs"])
@pytest.mark.parametrize("use_kernels", [False, True])
@torch.inference_mode()
def test_a_ranks_part_is_that_of_the_whole(packed: Packed, cut: str, use_kernels: bool) -> None:
    weight = numbers(64, INPUTS, seed=4) / 9
    halves = []
    for rank in range(2):
        inputs, outputs = shard_of(INPUTS), shard_of(64)
        if cut == "outputs":
            outputs = Shard(64, (range(32 * rank, 32 * rank + 32),))
        elif packed.group is None or packed.group <= 64:
            inputs = Shard(INPUTS, (range(64 * rank, 64 * rank + 64),))
        layer = Linear(inputs, (outputs,), False, placed(packed, torch.float32, use_kernels, "o_proj"))
        meant = fill(layer, [weight], packed)
        x = numbers(3, INPUTS, seed=5)
        rows, columns = (list(shard.ranges[0]) for shard in (outputs, inputs))
        halves.append(layer(x[:, columns]).double())
        expected = F.linear(multiplied(x[:, columns], packed), meant[rows][:, columns])
        torch.testing.assert_close(halves[-1], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("packed", ALL, ids=str)
@torch.inference_mode()
def test_a_matrix_that_arrived_can_be_moved(packed: Packed) -> None:
    """`stored`, `of` and `plain` of what a layer would keep."""
    from pagefleet_engine.layers.matrix import Matrix, matrix_slots

    found: list[Matrix] = []
    slots = matrix_slots(INPUTS, (32,), placed(packed, torch.float32, True, "down_proj"), found.append)
    made = quantize_packed(numbers(32, INPUTS) / 9, packed)
    for kind, tensor in pack(made, packed).items():
        if kind in slots:
            slots[kind].fill(0, tensor)
    again = found[0].of([part.clone() for part in found[0].stored])
    torch.testing.assert_close(again.plain(), made.meant(), rtol=1e-6, atol=1e-6)
