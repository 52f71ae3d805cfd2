"""Compiled products with matrices in floats against torch's, for every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.dense import DenseProduct, HeadProducts
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.products import Then

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries

SETS = {library.instruction_set: library for library in native_libraries()}
AFTER: dict[Then, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda y, _: y,
    "add": torch.add,
    "multiply": torch.mul,
    "relu": lambda y, _: y.relu(),
}
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


@given(
    heads=st.integers(1, 9),
    rows=st.integers(0, 9),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 150),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    data=st.data(),
)
@settings(max_examples=examples(50), deadline=None)
def test_each_head_has_a_matrix_of_its_own(
    heads: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Heads may lie beside each other, or behind all rows of the one before."""
    library = SETS[data.draw(st.sampled_from([*SETS]))]
    weights = numbers(heads, inputs, outputs, dtype=dtype).transpose(1, 2) / inputs**0.5
    x = numbers(rows, heads, inputs + 3, dtype=dtype, seed=1).transpose(0, 1)[..., :inputs]
    out = torch.full((heads, rows, outputs + 2), 7.0, dtype=dtype)
    HeadProducts(library, weights)(x, out[..., :outputs])
    exact = torch.bmm(x.double(), weights.double().transpose(1, 2))
    torch.testing.assert_close(out[..., :outputs].double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert bool((out[..., outputs:] == 7.0).all())


def test_heads_of_another_shape_or_type_are_refused(library: Library) -> None:
    products, x = HeadProducts(library, numbers(2, 48, 64, dtype=torch.float32)), numbers(2, 3, 64, dtype=torch.float32)
    out = numbers(2, 3, 48, dtype=torch.float32)
    for wrong_x, wrong_out in ((x[:1], out), (x[..., :63], out), (x, out[:, :2]), (x.bfloat16(), out), (x, out.mT)):
        with pytest.raises(UnsupportedShapeError, match="are not for 2 matrices of 48 x 64"):
            products(wrong_x, wrong_out)
    with pytest.raises(UnsupportedShapeError, match="are not for"):
        products(x.transpose(0, 2).contiguous().transpose(0, 2), out)


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
