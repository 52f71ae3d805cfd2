"""Hidden states that are not numbers are found, and their slots, but no others, become zero."""

from pathlib import Path

import pytest
import torch
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.nonfinite import flag_nonfinite, scrub_slots

BACKENDS: tuple[Backend, ...] = ("triton", "torch")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 96, 1100])
def test_tokens_with_any_such_element_are_flagged(
    width: int, dtype: torch.dtype, backend: Backend, device: torch.device
) -> None:
    hidden = torch.randn(7, width + 5).to(dtype).to(device)[:, :width]
    hidden[1, -1], hidden[2, 0], hidden[4, width // 2] = NAN, INF, -INF
    hidden[5, 0], hidden[5, 1] = INF, -INF
    hidden[6, :2] = torch.finfo(dtype).max / 4
    expected = [False, True, True, False, True, True, False]
    assert flag_nonfinite(hidden, backend=backend).tolist() == expected
    assert flag_nonfinite(hidden[:0], backend=backend).tolist() == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_only_slots_of_flagged_tokens_become_zero(dtype: torch.dtype, backend: Backend, device: torch.device) -> None:
    layout = KVLayout(num_blocks=7, num_layers=3, num_kv_heads=3, block_size=8, head_dim=20)
    pool = torch.ones(layout.shape).to(dtype).to(device)
    slots = torch.tensor([[0, 9, 17, -1, 55], [3, 30, 23, -1, 48]], device=device)
    flags = torch.tensor([False, True, False, True, True], device=device)
    expected = pool.clone()
    for slot in (9, 55, 30, 48):
        pool[slot // 8, :, :, :, slot % 8] = NAN
        expected[slot // 8, :, :, :, slot % 8] = 0.0
    scrub_slots(pool, slots, flags, backend=backend)
    assert torch.equal(pool.float(), expected.float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_flagged_changes_nothing(backend: Backend, device: torch.device) -> None:
    pool = torch.ones(KVLayout(2, 1, 1, 4, 8).shape, device=device)
    scrub_slots(pool, torch.tensor([[0, 1]], device=device), torch.zeros(2, dtype=torch.bool, device=device))
    scrub_slots(pool, torch.empty((1, 0), dtype=torch.int64), torch.zeros(0, dtype=torch.bool), backend=backend)
    assert (pool == 1).all()


def test_many_tokens_take_several_programs(device: torch.device) -> None:
    pool = torch.ones(KVLayout(50, 1, 1, 4, 8).shape, device=device)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    flags = torch.zeros(200, dtype=torch.bool)
    flags[[3, 63, 64, 199]] = True
    scrub_slots(pool, order[None].to(device), flags.to(device), backend="triton")
    assert torch.equal(pool[:, 0, 0], pool[:, 0, 1])
    zero = (pool[:, 0, 0] == 0).all(-1).view(-1).nonzero().view(-1)
    assert zero.tolist() == sorted(order[flags].tolist())


def test_last_block_of_a_large_pool(tmp_path: Path, device: torch.device) -> None:
    """Offsets pass 2^31 elements; on a CPU the pool is a sparse file."""
    layout = KVLayout(num_blocks=32_768, num_layers=48, num_kv_heads=1, block_size=16, head_dim=64)
    if device.type == "cuda":
        pool = torch.zeros(layout.shape, dtype=torch.float16, device=device)
    else:
        size = layout.num_blocks * layout.bytes_per_block("float16") // 2
        file = str(tmp_path / "pool")
        pool = torch.from_file(file, shared=True, size=size, dtype=torch.float16).view(layout.shape)
    pool[-1] = NAN
    last = torch.arange(16, device=device) + (layout.num_blocks - 1) * 16
    scrub_slots(pool, last[None], torch.ones(16, dtype=torch.bool, device=device), backend="triton")
    assert torch.equal(pool[-1], torch.zeros_like(pool[-1]))


def test_misfits_are_refused() -> None:
    pool, slots, flags = torch.zeros(1, 1, 2, 1, 4, 8), torch.zeros((1, 2), dtype=torch.int64), torch.zeros(2).bool()
    with pytest.raises(UnsupportedShapeError, match="contiguous"):
        flag_nonfinite(torch.ones(4, 2).T)
    with pytest.raises(UnsupportedShapeError, match="KV pool"):
        scrub_slots(pool[0], slots, flags)
    with pytest.raises(UnsupportedShapeError, match=r"\[G, T\]"):
        scrub_slots(pool, slots[0], flags)
