"""Plain and packed matrices against the formula; merged and gated layers against their parts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pagefleet_engine.layers.embedding import Embedding, LMHead
from pagefleet_engine.layers.linear import GatedLinear, Linear
from pagefleet_engine.layers.linear_kernel import (
    Activation,
    CompiledLinear,
    LinearKernel,
    OneDnnLinear,
    PlainLinear,
    activate,
    can_pack,
    is_laid_out,
    linear_kernel,
)
from pagefleet_engine.layers.weight import Placement
from pagefleet_kernels.native.dense import DenseProduct, is_fastest
from pagefleet_kernels.native.library import LIBRARY, load_library

CPU = torch.device("cpu")
PLACE = Placement(torch.float32, CPU, use_kernels=False)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compiled(weight: torch.Tensor) -> CompiledLinear:
    if not LIBRARY.exists():
        pytest.skip("the kernels were not compiled")
    return CompiledLinear(DenseProduct(load_library()[0], weight))


@pytest.fixture(
    params=[(kind, dtype) for kind in (PlainLinear, OneDnnLinear, compiled) for dtype in TOLERANCE],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def kernel_and_weight(request: pytest.FixtureRequest) -> tuple[LinearKernel, torch.Tensor]:
    kind, dtype = request.param
    if kind is OneDnnLinear and not can_pack(dtype, CPU):
        pytest.skip("this processor does not multiply packed matrices of the type")
    weight = numbers(48, 80, dtype=dtype) / 9
    return kind(weight.clone()), weight


@pytest.mark.parametrize("rows", [1, 2, 17, 64, 130])
@pytest.mark.parametrize("with_bias", [False, True])
@torch.inference_mode()
def test_kernels_compute_the_formula(
    kernel_and_weight: tuple[LinearKernel, torch.Tensor], rows: int, with_bias: bool
) -> None:
    kernel, weight = kernel_and_weight
    dtype = weight.dtype
    x, other = numbers(rows, 80, dtype=dtype, seed=1), numbers(rows, 48, dtype=dtype, seed=2)
    bias = numbers(48, dtype=dtype, seed=3) if with_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    check = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    check(kernel.linear(x, bias).double(), exact)
    check(kernel.linear_activated(x, bias, "silu").double(), F.silu(exact))
    check(kernel.linear_activated(x, bias, "gelu").double(), F.gelu(exact))
    check(kernel.linear_activated(x, bias, "gelu_tanh").double(), F.gelu(exact, approximate="tanh"))
    check(kernel.linear_mul(x, other, bias).double(), exact * other.double())
    check(kernel.linear_add(x, other.clone(), bias).double(), exact + other.double())


@torch.inference_mode()
def test_a_packed_matrix_is_a_copy() -> None:
    if not can_pack(torch.float32, CPU):
        pytest.skip("this torch has no packed matrices")
    weight, x = numbers(48, 80), numbers(3, 80, seed=1)
    kernel = OneDnnLinear(weight)
    before = kernel.linear(x, None)
    weight.zero_()
    assert torch.equal(kernel.linear(x, None), before)


def test_what_can_be_packed() -> None:
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("cuda"))
    assert isinstance(linear_kernel(numbers(4, 4, dtype=torch.float16)), PlainLinear)


@pytest.mark.skipif(not LIBRARY.exists(), reason="the kernels were not compiled")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_compiled_kernels_multiply_where_they_are_faster(dtype: torch.dtype) -> None:
    library = load_library()[0]
    kernel = linear_kernel(numbers(4, 4, dtype=dtype), library)
    assert isinstance(kernel, CompiledLinear) == is_fastest(library, dtype)
    assert is_laid_out(dtype, CPU, library) >= is_fastest(library, dtype)


def test_without_onednn_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(torch.float32, CPU)
    assert isinstance(linear_kernel(numbers(4, 4)), PlainLinear)


@torch.inference_mode()
def test_a_merged_layer_stacks_its_parts() -> None:
    layer = Linear(80, (32, 16, 16), True, PLACE)
    slots = dict(layer.weights())
    parts = [(numbers(rows, 80, seed=rows), numbers(rows, seed=rows + 1)) for rows in (32, 16, 15 + 1)]
    for part in (2, 0, 1):  # any order
        slots["weight"].fill(part, parts[part][0])
        slots["bias"].fill(part, parts[part][1])
    x = numbers(5, 80, seed=9)
    expected = torch.cat([F.linear(x, weight, bias) for weight, bias in parts], dim=-1)
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
    residual = numbers(5, 64, seed=10)
    torch.testing.assert_close(layer.add_to(residual.clone(), x)[0], expected + residual, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@torch.inference_mode()
def test_a_gated_layer(use_kernels: bool, with_bias: bool, activation: Activation) -> None:
    layer = GatedLinear(80, (48, 48), with_bias, Placement(torch.float32, CPU, use_kernels), activation)
    gate, up = numbers(48, 80, seed=1) / 9, numbers(48, 80, seed=2) / 9
    gate_bias, up_bias = (numbers(48, seed=3), numbers(48, seed=4)) if with_bias else (None, None)
    for name, slot in layer.weights():
        for part, source in enumerate((gate, up) if name == "weight" else (gate_bias, up_bias)):
            assert source is not None
            slot.fill(part, source)
    x = numbers(7, 80, seed=5)
    expected = activate(F.linear(x, gate, gate_bias), activation) * F.linear(x, up, up_bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_kernels", [False, True])
@torch.inference_mode()
def test_gate_and_up_may_come_in_one_tensor(use_kernels: bool) -> None:
    layer = GatedLinear(80, (96,), False, Placement(torch.float32, CPU, use_kernels))
    both, x = numbers(96, 80) / 9, numbers(3, 80, seed=1)
    dict(layer.weights())["weight"].fill(0, both)
    gate, up = F.linear(x, both).chunk(2, -1)
    torch.testing.assert_close(layer(x), F.silu(gate) * up, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_tied_head_follows_its_embedding() -> None:
    embedding = Embedding(30, 16, PLACE)
    head = LMHead(30, 16, PLACE, tied_to=embedding)
    assert list(head.weights()) == []
    table = numbers(30, 16)
    dict(embedding.weights())["weight"].fill(0, table)
    assert torch.equal(embedding(torch.tensor([3, 29])), table[[3, 29]])
    hidden = numbers(4, 16, seed=1)
    torch.testing.assert_close(head(hidden), hidden @ table.T, atol=1e-5, rtol=1e-5)
