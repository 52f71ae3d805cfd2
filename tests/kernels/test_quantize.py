"""Rounding to eight bits: kernel against twin, twin against arithmetic, alone and at the end of norm and activation."""

from collections.abc import Callable

import pytest
import torch
from pagefleet_kernels import activation, norm, reference
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.quantize import Quantized, QuantizeSpec, quantize, quantize_fp8, quantize_with_zeros

BACKENDS: tuple[Backend, ...] = ("triton", "torch")
STEP = {FP8: 0.0626, torch.int8: 0.0}  # half a place of e4m3, relative; int8 has half a number, absolute


def specs(device: torch.device) -> list[QuantizeSpec]:
    static = torch.tensor(0.05, device=device)
    return [
        QuantizeSpec(FP8),
        QuantizeSpec(FP8, static),
        QuantizeSpec(FP8, group=32),
        QuantizeSpec(FP8, group=128),
        QuantizeSpec(torch.int8),
        QuantizeSpec(torch.int8, static),
        QuantizeSpec(torch.int8, group=64),
    ]


def spread(scale: torch.Tensor, width: int, group: int | None) -> torch.Tensor:
    return scale.repeat_interleave(group or width, 1)[:, :width]


def expand(quantized: Quantized, spec: QuantizeSpec) -> torch.Tensor:
    scale = quantized.scale
    if scale.dim() == 2:
        scale = spread(scale, quantized.values.shape[1], spec.group)
    return quantized.values.float() * scale


def assert_alike(actual: Quantized, expected: Quantized) -> None:
    """Scales agree; numbers too, but for ties that one last place of a quotient decides."""
    assert actual.values.dtype == expected.values.dtype
    assert actual.values.is_contiguous()
    torch.testing.assert_close(actual.scale, expected.scale, rtol=2e-6, atol=0)
    differ = actual.values.float() != expected.values.float()
    assert differ.float().mean() < 0.02
    dtype = actual.values.dtype
    torch.testing.assert_close(
        actual.values.float(),
        expected.values.float(),
        rtol=2.1 * STEP[dtype],
        atol=1.0 if dtype == torch.int8 else 2e-3,
    )


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (5, 384), (3, 1176)])
def test_kernel_matches_the_twin_and_both_are_near(
    tokens: int, width: int, dtype: torch.dtype, index: int, device: torch.device
) -> None:
    torch.manual_seed(index)
    spec = specs(device)[index]
    x = (torch.randn(tokens, width + 8) * torch.rand(tokens, 1) * 4).to(dtype).to(device)[:, :width]
    out, twin = quantize(x, spec, backend="triton"), quantize(x, spec, backend="torch")
    assert_alike(out, twin)
    assert out.values.shape == x.shape
    scale = twin.scale if twin.scale.dim() < 2 else spread(twin.scale, width, spec.group)
    largest = 448.0 if spec.dtype == FP8 else 127.0
    expected = (x.float() / scale).clamp(-largest, largest) * scale
    error = (expand(twin, spec) - expected).abs()
    assert (
        error <= expected.abs() * STEP[spec.dtype] + 0.501 * scale * (1.0 if spec.dtype == torch.int8 else 0.002)
    ).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_even_and_the_range_is_kept(backend: Backend, device: torch.device) -> None:
    one = torch.ones(1, device=device)
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 1e6, -1e6, 0.0]], device=device)
    values = quantize(x, QuantizeSpec(torch.int8, one), backend=backend).values
    assert values.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -127, 0]]
    x = torch.tensor([[17.0, 19.0, 448.0, 1e6, -1e6, 2**-10, 0.0]], device=device)
    values = quantize_fp8(x, scale=one, backend=backend).values.float()
    assert values.tolist() == [[16.0, 20.0, 448.0, 448.0, -448.0, 0.0, 0.0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_each_kind(backend: Backend, device: torch.device) -> None:
    x = torch.zeros(2, 64, device=device)
    x[0, 3], x[0, 40], x[1, 0] = -896.0, 448.0, 44.8
    assert quantize_fp8(x, backend=backend).scale.tolist() == [[2.0], [pytest.approx(0.1)]]
    assert quantize_fp8(x, per_token=False, backend=backend).scale.tolist() == [2.0]
    grouped = quantize_fp8(x, group=32, backend=backend)
    assert grouped.scale.tolist() == [[2.0, 1.0], [pytest.approx(0.1), pytest.approx(1e-12)]]
    assert grouped.values.float()[0, [3, 40]].tolist() == [-448.0, 448.0]
    in_int8 = quantize(x, QuantizeSpec(torch.int8), backend=backend)
    assert in_int8.scale.tolist() == [[pytest.approx(896 / 127)], [pytest.approx(44.8 / 127)]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: Backend, device: torch.device) -> None:
    values, scale = quantize_fp8(torch.empty(0, 64, device=device), group=32, backend=backend)
    assert values.shape == (0, 64)
    assert scale.shape == (0, 2)


@pytest.mark.parametrize("index", [0, 1, 3, 4])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm_ends_in_eight_bits(with_residual: bool, index: int, device: torch.device) -> None:
    torch.manual_seed(2)
    spec = specs(device)[index]
    x, residual = torch.randn(2, 5, 256).to(torch.bfloat16).to(device)
    weight = torch.rand(256).to(torch.bfloat16).to(device)
    if with_residual:
        total, twins = residual.clone(), residual.clone()
        out = norm.rms_norm(x, weight, 1e-6, residual_TD=total, quantize=spec, backend="triton")
        total = twins  # the interpreter truncates sums of bfloat16: compare from the same sum
        twin = norm.rms_norm(x, weight, 1e-6, residual_TD=twins, quantize=spec, backend="torch")
        torch.testing.assert_close(expand(out, spec), expand(twin, spec), rtol=0.15, atol=0.06)
        x = total
    else:
        out = norm.rms_norm(x, weight, 1e-6, quantize=spec, backend="triton")
        twin = norm.rms_norm(x, weight, 1e-6, quantize=spec, backend="torch")
        assert_alike(out, twin)
    exact = reference.rms_norm(x.float(), weight.float(), 1e-6)
    assert_alike(twin, quantize(exact, spec, backend="torch"))


@pytest.mark.parametrize("index", [0, 1, 3, 4])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation_ends_in_eight_bits(kind: activation.Kind, index: int, device: torch.device) -> None:
    torch.manual_seed(3)
    spec = specs(device)[index]
    gate_up = torch.randn(3, 2 * 640).to(torch.bfloat16).to(device)
    out = activation.gated_activation(gate_up, kind, quantize=spec, backend="triton")
    twin = activation.gated_activation(gate_up, kind, quantize=spec, backend="torch")
    assert_alike(out, twin)
    assert_alike(twin, quantize(reference.gated_activation(gate_up.float(), kind), spec, backend="torch"))


def test_misfits_are_refused(device: torch.device) -> None:
    x = torch.ones(2, 96, device=device)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("contiguous", lambda: quantize_fp8(x.t())),
        ("power of two", lambda: quantize_fp8(x, group=48)),
        ("no static scale", lambda: quantize_fp8(x, scale=x[0, :1], group=32)),
        ("float8_e4m3fn and int8", lambda: QuantizeSpec(torch.float8_e5m2)),
    ]
    for message, call in refused:
        with pytest.raises(UnsupportedShapeError, match=message):
            call()


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (5, 200), (0, 64)])
def test_numbers_around_zero_points(tokens: int, width: int, fixed: bool, device: torch.device) -> None:
    torch.manual_seed(2)
    x = (torch.randn(tokens, width + 8, device=device) + 1.5).to(torch.bfloat16)[:, :width]
    given = (torch.tensor(0.03, device=device), torch.tensor(-40.0, device=device)) if fixed else None
    (twin, scale), zero = quantize_with_zeros(x, given, backend="torch")
    (values, own_scale), own_zero = quantize_with_zeros(x, given, backend="triton")
    torch.testing.assert_close(own_scale, scale, rtol=2e-6, atol=0)
    torch.testing.assert_close(own_zero, zero, rtol=0, atol=1.0)
    torch.testing.assert_close(values.int(), twin.int(), rtol=0, atol=1)
    assert values.shape == x.shape
    if tokens and not fixed:
        assert (own_zero < 0).all()
        torch.testing.assert_close((values - own_zero) * own_scale, x.float(), rtol=0, atol=float(own_scale.max()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", range(7))
def test_what_is_no_number_is_none_in_eight_bits(index: int, backend: Backend, device: torch.device) -> None:
    spec, x = specs(device)[index], torch.ones(3, 256, device=device)
    x[1, 200] = torch.nan
    found = [
        quantize(x, spec, backend=backend),
        activation.activation(x, "relu", quantize=spec, backend=backend),
        norm.rms_norm(x, torch.ones(256, device=device), 1e-6, quantize=spec, backend=backend),
    ]
    for one in found:
        assert expand(one, spec).sum(1).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fixed", [True, False])
def test_with_zero_points_a_row_with_what_is_no_number_has_no_scale(
    fixed: bool, backend: Backend, device: torch.device
) -> None:
    x = torch.ones(3, 64, device=device)
    x[1, 40] = torch.nan
    given = (torch.tensor(0.03, device=device), torch.tensor(-40.0, device=device)) if fixed else None
    (values, scale), zero = quantize_with_zeros(x, given, backend=backend)
    assert scale.isnan().tolist() == [[False], [True], [False]]
    torch.testing.assert_close(((values - zero) * scale)[[0, 2]], x[[0, 2]], rtol=0.02, atol=0)


def test_whole_rows_of_one_sign_and_of_nothing(device: torch.device) -> None:
    x = torch.stack([torch.zeros(32), torch.full((32,), 3.0), torch.full((32,), -3.0)]).to(device)
    for backend in BACKENDS:
        (values, scale), zero = quantize_with_zeros(x, backend=backend)
        torch.testing.assert_close((values - zero) * scale, x, rtol=1e-5, atol=1e-6)
