"""Writing keys and values: every element lands at its slot and nothing else changes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.kv_cache import write_kv
from pagefleet_kernels.layout import KVLayout

from tests.example_counts import examples


def write_one_by_one(
    k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv_cache: torch.Tensor, slots: list[int], block_size: int
) -> None:
    for token, slot in enumerate(slots):
        if slot >= 0:
            kv_cache[slot // block_size, 0, :, slot % block_size] = k_TKH[token]
            kv_cache[slot // block_size, 1, :, slot % block_size] = v_TKH[token]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(1, 64, 16), (5, 96, 8), (2, 256, 32), (3, 80, 128)])
def test_every_token_lands_at_its_slot_and_nothing_else_changes(
    backend: Backend, dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    layout = KVLayout(6, 3, kv_heads, block_size, head_dim)
    pool = torch.randn(layout.shape).to(dtype).to(device)
    expected = pool.clone()
    slots = [*torch.randperm(6 * block_size)[:9].tolist(), -1, -1]
    # keys and values as slices of a fused projection
    qkv = torch.randn(len(slots), 4 * kv_heads, head_dim).to(dtype).to(device)
    k, v = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 3 * kv_heads :]
    write_one_by_one(k, v, layout.layer_view(expected, 1), slots, block_size)
    write_kv(k, v, layout.layer_view(pool, 1), torch.tensor(slots, device=device), backend=backend)
    assert torch.equal(pool, expected)


@settings(deadline=None, max_examples=examples(25))
@given(data=st.data(), block_size=st.sampled_from([1, 8, 16, 24]), num_blocks=st.integers(1, 5))
def test_any_slot_mapping(data: st.DataObject, block_size: int, num_blocks: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    used = data.draw(st.lists(st.integers(0, num_blocks * block_size - 1), unique=True, max_size=6))
    slots = data.draw(st.permutations([*used, -1, -1]))
    layout = KVLayout(num_blocks, 2, 2, block_size, 16)
    pool = torch.zeros(layout.shape, device=device)
    expected = pool.clone()
    k, v = torch.randn(2, len(slots), 2, 16, device=device)
    write_one_by_one(k, v, layout.layer_view(expected, 0), slots, block_size)
    index = torch.tensor(slots, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])), device=device)
    write_kv(k, v, layout.layer_view(pool, 0), index, backend="triton")
    assert torch.equal(pool, expected)


def test_values_are_cast_to_the_dtype_of_the_cache(
    device: torch.device, assert_close: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    layout = KVLayout(2, 1, 2, 8, 64)
    k, v = torch.randn(2, 3, 2, 64, device=device)
    slots = torch.tensor([15, 0, 3], device=device)
    pools = [torch.zeros(layout.shape, dtype=torch.float16, device=device) for _ in range(2)]
    write_kv(k, v, layout.layer_view(pools[0], 0), slots, backend="triton")
    write_kv(k, v, layout.layer_view(pools[1], 0), slots, backend="torch")
    assert pools[1].count_nonzero() > 0
    assert_close(pools[0], pools[1])


@pytest.mark.parametrize(("fp8", "largest"), [(torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344)])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_pages_of_fp8_hold_scaled_values(
    backend: Backend, fp8: torch.dtype, largest: int, device: torch.device
) -> None:
    torch.manual_seed(3)
    layout = KVLayout(2, 2, 2, 8, 48)
    pool = torch.zeros(layout.shape, device=device).to(fp8)
    k, v = (torch.randn(2, 3, 2, 48) * 20).to(torch.bfloat16).to(device)
    k[0, 0, 0] = 1e5  # saturates
    slots = torch.tensor([15, -1, 3], device=device)
    write_kv(k, v, layout.layer_view(pool, 1), slots, k_scale=0.25, v_scale=3.0, backend=backend)
    written = pool[:, 1].float()
    for token, slot in ((0, 15), (2, 3)):
        for which, (values, scale) in enumerate(((k, 0.25), (v, 3.0))):
            expected = (values[token].float() / scale).clamp(-largest, largest).to(fp8).float()
            assert torch.equal(written[slot // 8, which, :, slot % 8], expected)
            written[slot // 8, which, :, slot % 8] = 0.0
    assert written.count_nonzero() == 0
    assert pool[:, 0].float().count_nonzero() == 0


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_no_tokens_write_nothing(backend: Backend, device: torch.device) -> None:
    layout = KVLayout(1, 1, 1, 8, 64)
    pool = torch.zeros(layout.shape, device=device)
    empty = torch.empty(0, 1, 64, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    write_kv(empty, empty, layout.layer_view(pool, 0), slots, backend=backend)
    assert pool.count_nonzero() == 0


def test_misfits_are_refused() -> None:
    layout = KVLayout(1, 1, 2, 8, 64)
    kv_cache, k = layout.layer_view(torch.zeros(layout.shape), 0), torch.ones(3, 2, 64)
    slots = torch.arange(3)
    with pytest.raises(UnsupportedShapeError, match=r"\[T, 2, 64\]"):
        write_kv(k, k[:, :1], kv_cache, slots)
    with pytest.raises(UnsupportedShapeError, match="as many slots"):
        write_kv(k, k, kv_cache, slots[:2])
    with pytest.raises(UnsupportedShapeError, match="contiguous"):
        write_kv(k, k, kv_cache.transpose(3, 4).contiguous().transpose(3, 4), slots)
