"""Compiled products with numbers of 4 and 8 bits against torch, for every instruction set that this processor has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.coded_matmul import CodedWeights
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.products import Then
from pagefleet_kernels.native.quantized import PackedProduct, byte_table, reference_product, takes_packed
from pagefleet_kernels.packed_matmul import PackedWeights, pack_numbers
from torch import Tensor

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries

SETS = {library.instruction_set: library for library in native_libraries()}
FLOAT, BF16 = torch.float32, torch.bfloat16

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels of the CPU were not compiled")


@pytest.fixture(params=[*SETS] or ["none"])
def library(request: pytest.FixtureRequest) -> Library:
    return SETS[request.param]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_weights(
    outputs: int, inputs: int, bits: int = 4, group: int | None = 32, zeros: str = "middle", seed: int = 0
) -> PackedWeights:
    """All numbers occur, the largest at the largest and the smallest too; scales are such as 16 bits hold."""
    make, most = seeded(seed), (1 << bits) - 1
    numbers = torch.randint(0, most + 1, (outputs, inputs), generator=make, dtype=torch.uint8)
    numbers[0], numbers[-1] = most, 0
    groups = 1 if group is None else inputs // group
    scales = (torch.randn(outputs, groups, generator=make) / most).half().float()
    points = torch.randint(0, most + 2, (outputs, groups), generator=make, dtype=torch.int16).clamp_(max=255)
    offsets = (torch.randn(outputs, groups, generator=make) * 8 / most).half().float()
    return PackedWeights(
        pack_numbers(numbers, bits),
        scales,
        points.to(torch.uint8) if zeros == "points" else None,
        bits,
        group,
        offsets if zeros == "offsets" else None,
    )


TABLES: dict[str, Tensor | None] = {
    "e2m1": None,
    "nf4": torch.linspace(-1, 1, 16).pow(3),
    "fp4": torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12,
}


def make_coded(
    outputs: int, inputs: int, group: int = 32, table: str = "e2m1", scales: str = "e8m0", has_factor: bool = False
) -> CodedWeights:
    """All codes occur; scales are such as 16 bits hold."""
    make = seeded(inputs)
    codes = torch.randint(0, 16, (outputs, inputs), generator=make, dtype=torch.uint8)
    shape = (outputs, inputs // group)
    scales_OG = {
        "e8m0": lambda: torch.randint(110, 125, shape, generator=make, dtype=torch.uint8),
        "e4m3": lambda: (torch.rand(shape, generator=make) * 448).to(torch.float8_e4m3fn),
        "float32": lambda: torch.randn(shape, generator=make).half().float(),
    }[scales]()
    factor_O = torch.rand(outputs, generator=make) + 0.01 if has_factor else None
    values = TABLES[table]
    if values is not None:  # as it is multiplied
        numbers, unit = byte_table(values)
        values = numbers * unit
    return CodedWeights(pack_numbers(codes, 4), values, scales_OG, factor_O, group)


def make_inputs(rows: int, inputs: int, dtype: torch.dtype = FLOAT) -> Tensor:
    """Some of a block are far larger than the others, and some blocks are zeros."""
    x = torch.randn(rows, inputs, generator=seeded(rows))
    x[:, ::37] *= 20
    x[rows // 2, :16] = 0
    return x.to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Sums of numbers up to 255 cancel each other: what is left of their rounding counts against the largest."""
    spread = float(expected.abs().max()) + 1e-3
    rounding = {FLOAT: 2e-5, BF16: 1e-2}[found.dtype]
    torch.testing.assert_close(found.float(), expected, rtol=rounding, atol=rounding * spread)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    group = draw(st.sampled_from([16, 32, 48, 64, 96, 128, None]))
    bits = draw(st.sampled_from([4, 8]))
    times = draw(st.integers(1, 5)) * (1 if bits == 8 or (group or 0) % 32 == 0 else 2)
    return {
        "outputs": draw(st.integers(1, 200)),
        "inputs": (group or 32) * times,
        "bits": bits,
        "group": group,
        "zeros": draw(st.sampled_from(["middle", "points", "offsets"])),
    }


@settings(max_examples=examples(60), deadline=None)
@given(shape=shapes(), rows=st.integers(1, 70), which=st.integers(0, 9), dtype=st.sampled_from([FLOAT, BF16]))
def test_products_are_those_of_rounded_inputs(shape: dict[str, Any], rows: int, which: int, dtype: torch.dtype) -> None:
    weights, x = make_weights(**shape), make_inputs(rows, shape["inputs"], dtype)
    product = PackedProduct([*SETS.values()][which % len(SETS)], weights)
    assert_close(product(x), reference_product(x, weights))


@st.composite
def coded_shapes(draw: st.DrawFn) -> dict[str, Any]:
    group = draw(st.sampled_from([16, 32, 64, 128]))
    return {
        "outputs": draw(st.integers(1, 200)),
        "inputs": max(group, 32) * draw(st.integers(1, 5)),
        "group": group,
        "table": draw(st.sampled_from([*TABLES])),
        "scales": draw(st.sampled_from(["e8m0", "e4m3", "float32"])),
        "has_factor": draw(st.booleans()),
    }


@settings(max_examples=examples(60), deadline=None)
@given(shape=coded_shapes(), rows=st.integers(1, 40), which=st.integers(0, 9), dtype=st.sampled_from([FLOAT, BF16]))
def test_codes_stand_for_numbers(shape: dict[str, Any], rows: int, which: int, dtype: torch.dtype) -> None:
    weights, x = make_coded(**shape), make_inputs(rows, shape["inputs"], dtype)
    product = PackedProduct([*SETS.values()][which % len(SETS)], weights)
    assert_close(product(x), reference_product(x, weights))
    bound = shape["outputs"] + 64
    assert product.nbytes <= bound * (shape["inputs"] // 2 + 2 * shape["inputs"] // shape["group"] + 4) + 16


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 45])
def test_codes_by_each_instruction_set(library: Library, rows: int) -> None:
    weights, x = make_coded(130, 256, 16, "nf4", "float32", has_factor=True), make_inputs(rows, 256)
    assert_close(PackedProduct(library, weights)(x), reference_product(x, weights))


@pytest.mark.parametrize("table", TABLES)
def test_floats_of_a_table_are_near_in_8_bits(table: str) -> None:
    """docs/quantization.md says how near."""
    values = TABLES[table]
    numbers, unit = byte_table(values)
    assert int(numbers.abs().max()) <= 127
    weights = replace(make_coded(1, 32), table=values)
    exact = weights.dequantize()
    error = (replace(weights, table=numbers * unit).dequantize() - exact).norm() / exact.norm()
    assert error == 0.0 if values is None else error < 0.005


def test_a_product_of_what_another_was_made_of(library: Library) -> None:
    x = make_inputs(3, 64)
    for one, other in ((make_weights(70, 64), make_weights(70, 64, seed=1)), (make_coded(70, 64), make_coded(70, 64))):
        like, product = PackedProduct(library, one), PackedProduct(library, other)
        moved = like.of([part.clone() for part in product.kept])
        assert torch.equal(moved(x), product(x))


@pytest.mark.parametrize("zeros", ["middle", "points", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 16, 45])
def test_each_instruction_set_and_number_of_rows(library: Library, rows: int, bits: int, zeros: str) -> None:
    weights, x = make_weights(130, 256, bits, 64, zeros), make_inputs(rows, 256)
    assert_close(PackedProduct(library, weights)(x), reference_product(x, weights))


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, None)])
def test_zero_points_between_numbers(library: Library, bits: int, group: int | None) -> None:
    """They become offsets of 16 bits."""
    weights, x = make_weights(70, 256, bits, group, "points"), make_inputs(5, 256)
    assert weights.zeros_OG is not None
    weights = replace(weights, zeros_OG=weights.zeros_OG + 0.37)
    out, expected = PackedProduct(library, weights)(x), reference_product(x, weights)
    assert (out - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("rows", [1, 9])
def test_what_follows_a_product(library: Library, rows: int, dtype: torch.dtype) -> None:
    weights, x = make_weights(70, 64), make_inputs(rows, 64, dtype)
    product, make = PackedProduct(library, weights), seeded(5)
    bias, other = torch.randn(70, generator=make).to(dtype), torch.randn(rows, 70, generator=make).to(dtype)
    sums = reference_product(x, weights, bias)
    expected: dict[Then, Tensor] = {
        "nothing": sums,
        "add": sums + other.float(),
        "multiply": sums * other.float(),
        "silu": F.silu(sums),
        "gelu_tanh": F.gelu(sums, approximate="tanh"),
        "relu": F.relu(sums),
    }
    for then, result in expected.items():
        assert_close(product(x, bias, then=then, other_TO=other), result)
    wide = torch.zeros(rows, 100, dtype=dtype)
    wide[:, :70] = other
    out = product(x, None, then="add", other_TO=wide[:, :70], out_TO=wide[:, :70])
    assert out.data_ptr() == wide.data_ptr()
    assert_close(out, reference_product(x, weights) + other.float())
    assert not wide[:, 70:].any()


def test_rows_that_lie_apart(library: Library) -> None:
    weights, x = make_weights(64, 64), make_inputs(4, 128)
    product = PackedProduct(library, weights)
    assert torch.equal(product(x[:, :64]), product(x[:, :64].contiguous()))
    assert torch.equal(product(x.t()[:64].t()), product(x[:, :64].contiguous()))
    assert product(x[:0, :64]).shape == (0, 64)


def test_rows_are_rounded_by_scales_that_are_given(library: Library) -> None:
    """As INT8 checkpoints ask for; what lies beyond the largest number becomes that."""
    weights, x = make_weights(96, 128, 8, None), make_inputs(5, 128)
    scales = torch.linspace(0.01, 0.2, 5)
    found = PackedProduct(library, weights, input_block=128)(x, scales_T=scales)
    assert_close(found, reference_product(x, weights, input_block=128, scales_T=scales))


def test_scales_of_rows_and_of_rounded_inputs_are_exact(library: Library) -> None:
    """Sums of integers times two scales, rounded once each: nothing of a scale is lost."""
    weights = make_weights(64, 256, 8, None)
    weights = replace(weights, scales_OG=torch.rand(64, 1, generator=seeded(1)) + 0.1)
    x = torch.randint(-127, 128, (3, 256), generator=seeded(2)).float()
    x[:, 0] = 127
    found = PackedProduct(library, weights, input_block=256)(x)
    expected = x.double() @ (weights.numbers.double() - 128).t() * weights.scales_OG.double().t()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0.0)


def test_scales_of_16_bits_stay_as_they_are(library: Library) -> None:
    """Of either kind, and however small."""
    for dtype, size in ((torch.float16, 1.0), (BF16, 1e-20)):
        weights = make_weights(64, 64, 4, 32)
        scales = (torch.rand(64, 2, generator=seeded(3)) + 0.1) * size
        weights = replace(weights, scales_OG=scales.to(dtype).float())
        x = torch.zeros(1, 64)
        x[0, 5] = 127.0
        expected = weights.dequantize()[:, 5] * 127.0
        torch.testing.assert_close(PackedProduct(library, weights)(x)[0], expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none(library: Library, bad: float) -> None:
    weights, x = make_weights(64, 64), make_inputs(2, 64)
    x[1, 33] = bad
    out = PackedProduct(library, weights)(x)
    assert out[0].isfinite().all()
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("group", [32, 128])
def test_the_error_of_rounding_inputs(library: Library, group: int) -> None:
    """docs/quantization.md says how much."""
    weights, x = make_weights(256, 1024, 4, group), torch.randn(16, 1024, generator=seeded(0))
    exact = x @ weights.dequantize().t()
    error = (PackedProduct(library, weights)(x) - exact).norm() / exact.norm()
    assert 0.003 < error < 0.007


def test_shapes_that_no_kernel_takes(library: Library) -> None:
    assert takes_packed(96, 48)
    assert takes_packed(96, None)
    for inputs, group in ((96, 64), (96, 24), (40, None), (1 << 20, None)):
        assert not takes_packed(inputs, group)
    weights = make_weights(64, 64)
    with pytest.raises(UnsupportedShapeError, match="48 rounded together"):
        PackedProduct(library, weights, input_block=48)
    with pytest.raises(UnsupportedShapeError, match=r"\[T, 64\]"):
        PackedProduct(library, weights)(torch.zeros(2, 32))
