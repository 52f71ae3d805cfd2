"""Products of experts: kernels against twins, twins against each row's own matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.expert_blocks import ExpertBlocks, align_experts
from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.experts import ExpertWeights, combine_experts, grouped_matmul
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.mxfp4 import dequantize_mxfp4
from pagefleet_kernels.quantize import Activations, QuantizeSpec, quantize, quantize_with_zeros
from pagefleet_kernels.scaled_matmul import Shift

BACKENDS: tuple[Backend, ...] = ("triton", "torch")
FORMS = (
    "float",
    "fp8",
    "fp8 static",
    "fp8 block",
    "int8",
    "int8 zeros",
    "int8 one zero",
    "weights alone",
    "weights alone in blocks",
    "weights in mxfp4",
)
BLOCK = 32


def choose(rows: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """Different experts for each row, the first third of the experts most; the last row goes nowhere."""
    generator = torch.Generator().manual_seed(rows)
    liking = torch.rand(rows, num_experts, generator=generator)
    liking[:, : num_experts // 3] += 0.3
    experts = liking.topk(top_k, -1).indices.to(torch.int32)
    experts[-1:] = -1
    return experts.to(device)


def members(blocks: ExpertBlocks) -> dict[int, list[int]]:
    """Pairs by expert, as the blocks have them."""
    found: dict[int, list[int]] = {}
    for expert, pairs in zip(blocks.experts_B.tolist(), blocks.pairs_BM.tolist(), strict=True):
        if expert >= 0:
            own = [pair for pair in pairs if pair < blocks.num_pairs]
            assert own, "no block is empty"
            found.setdefault(expert, []).extend(own)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "top_k", "num_experts"), [(1, 1, 1), (2, 2, 5), (40, 3, 7), (700, 4, 60)])
def test_every_pair_is_in_a_block_of_its_expert(
    rows: int, top_k: int, num_experts: int, backend: Backend, device: torch.device
) -> None:
    experts = choose(rows, top_k, num_experts, device)
    blocks = align_experts(experts, num_experts, backend=backend)
    flat = experts.flatten().tolist()
    expected = {one: [pair for pair, found in enumerate(flat) if found == one] for one in set(flat) - {-1}}
    assert members(blocks) == expected
    owners = blocks.experts_B.tolist()
    assert owners[: len(owners) - owners.count(-1)] == sorted(one for one in owners if one >= 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_goes_anywhere(backend: Backend, device: torch.device) -> None:
    blocks = align_experts(torch.full((3, 2), -1, dtype=torch.int32, device=device), 4, backend=backend)
    assert members(blocks) == {}
    assert align_experts(torch.empty(0, 2, dtype=torch.int32, device=device), 4, backend=backend).num_pairs == 0


def weights_in(form: str, weight: torch.Tensor) -> tuple[ExpertWeights, torch.Tensor]:
    """Experts' matrices in a form, and the numbers that they stand for."""
    if form == "float":
        return ExpertWeights(weight), weight.float()
    if form == "weights in mxfp4":
        experts, rows, columns = weight.shape
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=weight.device)
        powers = torch.randint(120, 127, (experts, rows, columns // 32), dtype=torch.uint8, device=weight.device)
        return ExpertWeights(codes, powers), dequantize_mxfp4(codes, powers)
    dtype = torch.int8 if form.startswith("int8") else FP8
    flat = weight.flatten(0, 1)
    if "block" not in form:
        values, scales = quantize(flat, QuantizeSpec(dtype), backend="torch")
        stored = values.view(weight.shape), scales.view(weight.shape[:2])
        return ExpertWeights(*stored), stored[0].float() * stored[1][..., None]
    values = quantize(flat, QuantizeSpec(dtype), backend="torch").values.view(weight.shape)
    experts, rows, columns = weight.shape
    scales = torch.rand(experts, -(-rows // BLOCK), -(-columns // BLOCK), device=weight.device) / 64
    large = scales.repeat_interleave(BLOCK, 1)[:, :rows].repeat_interleave(BLOCK, 2)[..., :columns]
    return ExpertWeights(values, scales, BLOCK), values.float() * large


def inputs_in(form: str, x: torch.Tensor) -> tuple[Activations, torch.Tensor, torch.Tensor | None]:
    """Activations in a form, the numbers that they stand for, and zero points where the form has them."""
    if form == "float" or form.startswith("weights"):
        return x, x.float(), None
    if "zero" in form:
        fixed = None if form == "int8 zeros" else (torch.tensor([0.02]), torch.tensor([-30.0]))
        rounded, zeros = quantize_with_zeros(x + 1, fixed, backend="torch")
        return rounded, (rounded.values.float() - zeros) * rounded.scale, zeros
    static = torch.tensor([0.02], device=x.device) if "static" in form else None
    spec = QuantizeSpec(torch.int8 if form == "int8" else FP8, static, BLOCK if "block" in form else None)
    rounded = quantize(x, spec, backend="torch")
    scale = rounded.scale
    wide = scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]] if "block" in form else scale
    return rounded, rounded.values.float() * wide, None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize(("rows", "top_k", "width", "inputs"), [(1, 2, 32, 48), (23, 3, 96, 72)])
def test_products(
    form: str, gate: Gate | None, rows: int, top_k: int, width: int, inputs: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    num_experts = 5
    experts = choose(rows + 1, top_k, num_experts, device)
    inputs = 96 if "mxfp4" in form else inputs
    outputs = width if gate is None else 2 * width
    weights, meant = weights_in(form, torch.randn(num_experts, outputs, inputs, device=device) / 8)
    x, numbers, zeros = inputs_in(form, torch.randn(rows + 1, inputs, device=device))
    shift = None if zeros is None else Shift(zeros, weights.values_EOI.sum(-1, dtype=torch.int32))
    used = experts.flatten() >= 0
    expected = torch.einsum("poi,pi->po", meant[experts.flatten().clamp(0)], numbers.repeat_interleave(top_k, 0))
    if gate == "swigluoai":  # with biases, large enough to be clamped
        bias = 6 * torch.randn(num_experts, outputs, device=device)
        weights = replace(weights, bias_EO=bias)
        expected += bias[experts.flatten().clamp(0)]
        first, up = expected.clamp(max=7.0).chunk(2, -1)
        assert (expected.abs() > 7).any()
        expected = first * torch.sigmoid(1.702 * first) * (up.clamp(min=-7.0) + 1)
    elif gate is not None:
        first, up = expected.chunk(2, -1)
        act = torch.nn.functional
        expected = (act.silu(first) if gate == "silu" else act.gelu(first, approximate="tanh")) * up
    for backend in BACKENDS:
        blocks = align_experts(experts, num_experts, backend=backend)
        out = grouped_matmul(x, weights, blocks, torch.float32, top_k=top_k, gate=gate, shift=shift, backend=backend)
        assert out.shape == (len(used), width)
        torch.testing.assert_close(out[used], expected[used], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_number_stays_none(backend: Backend, device: torch.device) -> None:
    experts = torch.zeros(2, 1, dtype=torch.int32, device=device)
    x = torch.ones(2, 32, device=device)
    x[0, 0] = torch.nan
    blocks = align_experts(experts, 1, backend=backend)
    weights = ExpertWeights(torch.ones(1, 64, 32, device=device), bias_EO=torch.ones(1, 64, device=device))
    out = grouped_matmul(x, weights, blocks, torch.float32, gate="swigluoai", backend=backend)
    assert out.isnan().tolist() == [[True] * 32, [False] * 32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_their_own(backend: Backend, device: torch.device) -> None:
    """The second product reads a row for each pair, in bfloat16."""
    torch.manual_seed(1)
    experts = choose(9, 2, 3, device)
    weight = torch.randn(3, 40, 64, device=device, dtype=torch.bfloat16) / 8
    x = torch.randn(18, 64, device=device, dtype=torch.bfloat16)
    blocks = align_experts(experts, 3, backend=backend)
    out = grouped_matmul(x, ExpertWeights(weight), blocks, torch.bfloat16, backend=backend)
    expected = torch.einsum("poi,pi->po", weight.float()[experts.flatten().clamp(0)], x.float())
    used = experts.flatten() >= 0
    torch.testing.assert_close(out[used].float(), expected[used], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_leave_out_what_went_nowhere(backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(2)
    experts, weights = choose(5, 3, 6, device), torch.rand(5, 3, device=device)
    y = torch.randn(15, 70, device=device).to(dtype)
    y[-3:] = torch.nan
    out = combine_experts(y, weights, experts, backend=backend)
    expected = (y.float().view(5, 3, 70) * weights[..., None]).sum(1).nan_to_num(0.0)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_what_does_not_fit_is_told(device: torch.device) -> None:
    experts = choose(4, 2, 3, device)
    blocks = align_experts(experts, 3)
    with pytest.raises(UnsupportedShapeError, match="must be contiguous int32 of 1 to 4096"):
        align_experts(experts.long(), 3)
    with pytest.raises(UnsupportedShapeError, match="of 8 pairs"):
        grouped_matmul(torch.zeros(5, 8, device=device), ExpertWeights(torch.zeros(3, 4, 8)), blocks, torch.float32)
    weights = ExpertWeights(torch.zeros(3, 4, 8, dtype=torch.int8))
    with pytest.raises(UnsupportedShapeError, match=r"by experts of torch\.int8"):
        grouped_matmul(torch.zeros(8, 8, device=device), weights, blocks, torch.float32)
    shift = Shift(torch.zeros(8), torch.zeros(3, 4, dtype=torch.int32))
    plain = ExpertWeights(torch.zeros(3, 4, 8))
    with pytest.raises(UnsupportedShapeError, match=r"zero points beside torch\.float32 are not supported"):
        grouped_matmul(torch.zeros(8, 8, device=device), plain, blocks, torch.float32, shift=shift)
    rounded = quantize(torch.zeros(8, 8, device=device), QuantizeSpec(torch.int8))
    scaled = replace(weights, scales=torch.zeros(3, 4))
    wide = Shift(shift.zeros_T, torch.zeros(3, 5, dtype=torch.int32))
    with pytest.raises(UnsupportedShapeError, match=r"8 zero points and sums \[3, 5\] do not fit 8 rows"):
        grouped_matmul(rounded, scaled, blocks, torch.float32, shift=wide)
    weights = ExpertWeights(torch.zeros(3, 4, 8), bias_EO=torch.zeros(3, 5))
    with pytest.raises(UnsupportedShapeError, match=r"biases must be contiguous floats \[3, 4\], not \[3, 5\]"):
        grouped_matmul(torch.zeros(8, 8, device=device), weights, blocks, torch.float32)
    with pytest.raises(UnsupportedShapeError, match="is not a contiguous row for each of 4 x 2"):
        combine_experts(torch.zeros(7, 8, device=device), torch.zeros(4, 2, device=device), experts)
