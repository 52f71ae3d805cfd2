"""The fused, quantizing and input kernels at the sizes of serving, which only a GPU gets through, and their waits."""

from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch
from pagefleet_kernels.activation import Kind, activation, gated_activation
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.few_rows_matmul import few_rows_matmul
from pagefleet_kernels.fp8 import FP8, has_native_fp8
from pagefleet_kernels.heads import prepare_heads
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.nonfinite import flag_nonfinite, scrub_slots
from pagefleet_kernels.norm import layer_norm, rms_norm
from pagefleet_kernels.quantize import Quantized, QuantizeSpec, quantize
from pagefleet_kernels.scaled_matmul import scaled_matmul
from pagefleet_kernels.step_inputs import StepBuffers, prepare_step, scatter_writes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Close = Callable[[torch.Tensor, torch.Tensor], None]
BF16 = torch.bfloat16


@pytest.fixture
def no_waits() -> Iterator[Callable[[bool], None]]:
    """A switch that makes torch refuse to wait for the device."""
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default")
    torch.cuda.set_sync_debug_mode("default")


def step_rows(kind: str) -> list[list[int]]:
    """(slot, computed, new, first): 256 decodes, or a few with two long prompts among them."""
    new = [1] * 256 if kind == "decode" else [1, 4000, 1, 1, 3000, 1, 7]
    rows, first = [], 0
    for slot, length in enumerate(new):
        rows.append([slot, 13 * slot % 500, length, first])
        first += length
    return rows


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_inputs_of_a_step_without_a_wait(kind: str, device: torch.device, no_waits: Callable[[bool], None]) -> None:
    tokens = torch.randint(0, 1 << 17, (256, 8192), dtype=torch.int32, device=device)
    tables = torch.randint(0, 1 << 15, (2, 256, 512), dtype=torch.int32, device=device)
    rows = torch.tensor(step_rows(kind), dtype=torch.int32, device=device)
    num_tokens = 256 if kind == "decode" else 8192
    made = [StepBuffers.allocate(2, 256, 8192, 512, device) for _ in range(2)]
    prepare_step(tokens, tables, rows, 16, made[0], num_tokens)  # compiles
    no_waits(True)
    prepare_step(tokens, tables, rows, 16, made[0], num_tokens)
    no_waits(False)
    prepare_step(tokens, tables, rows, 16, made[1], num_tokens, backend="torch")
    for name in ("token_ids_T", "positions_T", "slot_mappings_GT", "query_start_loc_R1", "seq_lens_R"):
        assert torch.equal(getattr(made[0], name), getattr(made[1], name)), name
    for row, (slot, computed, new, _) in enumerate(rows.tolist()):
        used = -(-(computed + new) // 16)
        assert torch.equal(made[0].tables_GRB[:, row, :used], tables[:, slot, :used])


def test_writes_and_scrubbing_without_a_wait(device: torch.device, no_waits: Callable[[bool], None]) -> None:
    arena = torch.zeros(1 << 20, dtype=torch.int32, device=device)
    values = torch.arange(1 << 18, dtype=torch.int32, device=device)
    writes = torch.tensor([[5, 0, 200_000], [400_000, 200_000, 1]], device=device)
    hidden = torch.randn(4096, 4096, device=device).to(BF16)
    layout = KVLayout(300, 32, 8, 16, 128)
    pool = torch.ones(layout.shape, dtype=BF16, device=device)
    slots = torch.randperm(4096, device=device)[None]
    hidden[77, 4095] = float("nan")
    for on in (False, True):
        no_waits(on)
        scatter_writes(arena, writes, values)
        bad = flag_nonfinite(hidden)
        scrub_slots(pool, slots, bad)
    no_waits(False)
    assert torch.equal(arena[5:200_005], values[:200_000])
    assert int(arena[400_000]) == 200_000
    assert bad.nonzero().tolist() == [[77]]
    slot = int(slots[0, 77])
    assert int((pool == 0).sum()) == 32 * 2 * 8 * 128
    assert (pool[slot // 16, :, :, :, slot % 16] == 0).all()


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"), [((32, 8), 128, 128), ((16, 8), 256, 256), ((32, 32), 96, 48)]
)
@pytest.mark.parametrize("cache_dtype", [BF16, FP8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 256, 5000])
def test_heads(
    num_tokens: int,
    interleaved: bool,
    cache_dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    rotary_dim: int,
    device: torch.device,
    assert_close: Close,
) -> None:
    torch.manual_seed(0)
    layout = KVLayout(num_tokens // 16 + 2, 2, heads[1], 16, head_dim)
    qkv = torch.randn(num_tokens, heads[0] + 2 * heads[1], head_dim, device=device).to(BF16)
    angles = torch.rand(9000, rotary_dim // 2, device=device) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(0, 9000, (num_tokens,), device=device)
    slots = torch.randperm(layout.num_blocks * 16, device=device)[:num_tokens]
    norm_H = torch.rand(head_dim, device=device).to(BF16)

    def prepared(backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
        pool = torch.zeros(layout.shape, device=device).to(cache_dtype)
        q = prepare_heads(
            qkv, *heads, table, positions, layout.layer_view(pool, 1), slots,
            q_norm_H=norm_H, k_norm_H=norm_H, eps=1e-6, interleaved=interleaved,
            k_scale=0.5, v_scale=0.25, backend=backend,
        )  # fmt: skip
        return q, pool.float()

    (q, pool), (twin_q, twin_pool) = prepared("triton"), prepared("torch")
    torch.testing.assert_close(q, twin_q, rtol=2e-2, atol=4e-2)
    torch.testing.assert_close(pool, twin_pool, rtol=2e-2 if cache_dtype == BF16 else 0.13, atol=4e-2)


@pytest.mark.parametrize("width", [1024, 4096, 8192, 28_672])
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_norm_and_activation(num_tokens: int, width: int, device: torch.device, assert_close: Close) -> None:
    torch.manual_seed(1)
    x, residual = torch.randn(2, num_tokens, width, device=device).to(BF16)
    weight = torch.rand(width, device=device).to(BF16)
    totals = residual.clone(), residual.clone()
    out = rms_norm(x, weight, 1e-5, residual_TD=totals[0])
    assert_close(out, rms_norm(x, weight, 1e-5, residual_TD=totals[1], backend="torch"))
    assert torch.equal(*totals)
    out = layer_norm(x, weight, weight, 1e-5, residual_TD=totals[0])
    assert_close(out, layer_norm(x, weight, weight, 1e-5, residual_TD=totals[1], backend="torch"))
    assert torch.equal(*totals)
    assert_close(gated_activation(x), gated_activation(x, backend="torch"))
    for kind in get_args(Kind):
        assert_close(activation(x, kind), activation(x, kind, backend="torch"))
    for spec in (QuantizeSpec(), QuantizeSpec(group=128), QuantizeSpec(torch.int8)):
        pairs = [
            (rms_norm(x, weight, 1e-5, quantize=spec), rms_norm(x, weight, 1e-5, quantize=spec, backend="torch")),
            (
                layer_norm(x, weight, weight, 1e-5, quantize=spec),
                layer_norm(x, weight, weight, 1e-5, quantize=spec, backend="torch"),
            ),
            (activation(x, "gelu", quantize=spec), activation(x, "gelu", quantize=spec, backend="torch")),
            (gated_activation(x, quantize=spec), gated_activation(x, quantize=spec, backend="torch")),
            (quantize(x, spec), quantize(x, spec, backend="torch")),
        ]
        for quantized, twin in pairs:
            assert_alike(quantized, twin)


def assert_alike(actual: Quantized, expected: Quantized) -> None:
    torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-5, atol=0)
    assert (actual.values.float() != expected.values.float()).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("scale_kind", ["tensor", "row"])
@pytest.mark.parametrize(("num_tokens", "outputs", "inputs"), [(1, 4096, 4096), (64, 6144, 1024), (500, 1024, 14_336)])
def test_products(
    num_tokens: int,
    outputs: int,
    inputs: int,
    scale_kind: str,
    block: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(2)
    x, x_scale = quantize(torch.randn(num_tokens, inputs, device=device), QuantizeSpec(dtype, group=block))
    weight, weight_scale = quantize(torch.randn(outputs, inputs, device=device), QuantizeSpec(dtype))
    if block is not None:
        weight_scale = torch.rand(outputs // block, inputs // block, device=device) / 100
    elif scale_kind == "tensor":
        x_scale, weight_scale = x_scale[:1], weight_scale[:1]
    bias = torch.randn(outputs, device=device).to(BF16)
    arguments = (weight, weight_scale, bias, BF16, block)
    expected = scaled_matmul(x, x_scale, *arguments, backend="torch").float()
    # the library's sums of fp8 are not all of float32's places
    rtol, atol = 2e-2, 1e-3 * float(expected.abs().max())
    backends: list[Backend | None] = [None, "triton"]
    for backend in backends:
        out = scaled_matmul(x, x_scale, *arguments, backend=backend).float()
        torch.testing.assert_close(out, expected, rtol=rtol, atol=4 * atol)
    floats = torch.randn(num_tokens, inputs, device=device).to(BF16)
    expected = scaled_matmul(floats, None, *arguments, backend="torch").float()
    out = scaled_matmul(floats, None, *arguments).float()
    torch.testing.assert_close(out, expected, rtol=rtol, atol=4e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14_336), (1030, 1100)])
def test_products_of_few_rows(rows: int, outputs: int, inputs: int, device: torch.device) -> None:
    """One after the other, so that each starts while the one before still writes what it reads."""
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs, device=device).to(BF16)
    weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(BF16)
    back = (torch.randn(inputs, outputs, device=device) / outputs**0.5).to(BF16)
    bias = torch.randn(outputs, device=device).to(BF16)
    expected, found = x.clone(), x.clone()
    for _ in range(20):
        few_rows_matmul(
            few_rows_matmul(expected, weight, bias, backend="torch"), back, residual_TO=expected, backend="torch"
        )
        few_rows_matmul(few_rows_matmul(found, weight, bias), back, residual_TO=found)
        gate = rms_norm(few_rows_matmul(found, weight, gate="silu"), bias[: outputs // 2], 1e-5)
        twin = few_rows_matmul(found, weight, gate="silu", backend="torch")
        twin = rms_norm(twin, bias[: outputs // 2], 1e-5, backend="torch")
        assert (gate.float() - twin.float()).norm() <= 1e-2 * twin.float().norm()
        assert (found.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()
        found.copy_(expected.div_(expected.abs().max()))


def test_hopper_has_fp8(device: torch.device) -> None:
    assert has_native_fp8(device) == (torch.cuda.get_device_capability(device) >= (8, 9))
