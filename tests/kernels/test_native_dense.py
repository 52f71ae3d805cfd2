"""Compiled products with matrices in floats against torch's, for every instruction set that this processor has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.dense import DenseProduct
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.products import Then

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries

SETS = {library.instruction_set: library for library in native_libraries()}
AFTER = {"nothing": lambda y, _: y, "add": torch.add, "multiply": torch.mul, "relu": lambda y, _: y.relu()}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels of the CPU were not compiled")


@pytest.fixture(params=[*SETS] or ["none"])
def library(request: pytest.FixtureRequest) -> Library:
    return SETS[request.param]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 150),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    then=st.sampled_from([*AFTER]),
    has_bias=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(100), deadline=None)
def test_products_are_torchs(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, then: Then, has_bias: bool, data: st.DataObject
) -> None:
    library = SETS[data.draw(st.sampled_from([*SETS]))]
    weight = numbers(outputs, inputs + 5, dtype=dtype)[:, 5:] / inputs**0.5
    x, other = numbers(rows, inputs + 3, dtype=dtype, seed=1)[:, :inputs], numbers(rows, outputs, dtype=dtype, seed=2)
    bias = numbers(outputs, dtype=dtype, seed=3) if has_bias else None
    exact = x.double() @ weight.double().t()
    exact = AFTER[then](exact if bias is None else exact + bias, other.double())
    out = DenseProduct(library, weight)(x, bias, then=then, other_TO=other if then in ("add", "multiply") else None)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_many_threads_give_what_one_gives(library: Library, dtype: torch.dtype) -> None:
    product, x = DenseProduct(library, numbers(700, 512, dtype=dtype)), numbers(65, 512, dtype=dtype, seed=1)
    threads = torch.get_num_threads()
    try:
        outs = []
        for count in (1, 3):
            torch.set_num_threads(count)
            outs.append(product(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outs)


def test_the_residual_may_be_overwritten(library: Library) -> None:
    weight, x, other = (numbers(*shape, dtype=torch.float32) for shape in ((48, 32), (9, 32), (9, 48)))
    exact = torch.addmm(other, x, weight.t())
    out = DenseProduct(library, weight)(x, then="add", other_TO=other, out_TO=other)
    assert out is other
    torch.testing.assert_close(other, exact)


def test_what_is_no_number_stays_in_its_row(library: Library) -> None:
    x = numbers(9, 64, dtype=torch.bfloat16)
    x[4, 7] = torch.nan
    out = DenseProduct(library, numbers(48, 64, dtype=torch.bfloat16))(x)
    assert out[4].isnan().all()
    assert out[torch.arange(9) != 4].isfinite().all()


def test_inputs_of_another_shape_or_type_are_refused(library: Library) -> None:
    product = DenseProduct(library, numbers(48, 64, dtype=torch.float32))
    with pytest.raises(UnsupportedShapeError, match=r"inputs \[2, 63\] of torch.float32 are not .* \[T, 64\]"):
        product(numbers(2, 63, dtype=torch.float32))
    with pytest.raises(UnsupportedShapeError, match="of another type than the matrix"):
        product(numbers(2, 64, dtype=torch.bfloat16))
