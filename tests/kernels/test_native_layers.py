"""RMSNorm and rotation by the compiled kernels of the CPU against the torch twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels import reference
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.layers import NativeNorm, rotate_heads
from pagefleet_kernels.native.library import Library

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries

SETS = {library.instruction_set: library for library in native_libraries()}
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels of the CPU were not compiled")


@pytest.fixture(scope="module", params=[*SETS] or ["none"])
def library(request: pytest.FixtureRequest) -> Library:
    return SETS[request.param]


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=examples(40), deadline=None)
@given(
    tokens=st.integers(0, 40),
    width=st.sampled_from([1, 7, 16, 40, 768, 1000]),
    dtype=st.sampled_from(DTYPES),
    unit_offset=st.booleans(),
)
def test_norm(library: Library, tokens: int, width: int, dtype: torch.dtype, unit_offset: bool) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(tokens, width + 3).to(dtype)[:, :width], torch.randn(width).to(dtype)
    out = NativeNorm(library, weight, 1e-5, unit_offset)(x)
    assert out.is_contiguous()
    near(out, reference.rms_norm(x.float(), weight.float(), 1e-5, unit_offset))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_have_norms_of_their_own(library: Library, dtype: torch.dtype) -> None:
    x, weight = torch.randn(90, 9, 24).to(dtype)[:, :6], torch.randn(6, 24)
    near(NativeNorm(library, weight, 1e-6, False)(x), reference.rms_norm(x.float(), weight, 1e-6))
    assert NativeNorm(library, weight, 1e-6, False)(x.new_full((1, 6, 24), float("nan"))).isnan().all()


@settings(max_examples=examples(40), deadline=None)
@given(
    tokens=st.integers(0, 40),
    sizes=st.sampled_from([(16, 16), (16, 12), (40, 40), (64, 64), (80, 32), (128, 128), (6, 2)]),
    kv_heads=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
    has_norm=st.booleans(),
)
def test_rotation(
    library: Library,
    tokens: int,
    sizes: tuple[int, int],
    kv_heads: int,
    dtype: torch.dtype,
    interleaved: bool,
    has_norm: bool,
) -> None:
    torch.manual_seed(tokens)
    head_dim, rotary_dim = sizes
    qkv = torch.randn(tokens, 5 + 2 * kv_heads, head_dim).to(dtype)
    before = qkv.float()
    turns = torch.rand(tokens, rotary_dim // 2) * 6
    table = torch.cat((turns.cos(), turns.sin()), -1)
    norms = torch.randn(2 if kv_heads else 1, head_dim) if has_norm else None
    q, k = before[:, :5], before[:, 5 : 5 + kv_heads]
    if norms is not None:
        q, k = reference.rms_norm(q, norms[0], 1e-5), reference.rms_norm(k, norms[-1], 1e-5)
    q, k = reference.apply_rope(q, k, table, torch.arange(tokens), interleaved)
    rotate_heads(library, qkv[:, : 5 + kv_heads], 5, table, norms_2H=norms, eps=1e-5, interleaved=interleaved)
    near(qkv[:, : 5 + kv_heads], torch.cat((q, k), 1))
    assert torch.equal(qkv[:, 5 + kv_heads :].float(), before[:, 5 + kv_heads :]), "values stay"


def test_shapes_that_do_not_fit_are_refused(library: Library) -> None:
    norm = NativeNorm(library, torch.ones(8), 1e-5, False)
    for x in (torch.ones(2, 9), torch.ones(2, 8, dtype=torch.float16), torch.ones(8, 2).t()):
        with pytest.raises(UnsupportedShapeError):
            norm(x)
    with pytest.raises(UnsupportedShapeError, match="do not fit angles"):
        rotate_heads(library, torch.ones(3, 2, 8), 1, torch.ones(2, 8))
