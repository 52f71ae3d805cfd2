"""The one pass over a token's heads against the three steps that it replaces."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagefleet_kernels import norm
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.heads import prepare_heads
from pagefleet_kernels.kv_cache import write_kv
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.reference import apply_rope

Close = Callable[[torch.Tensor, torch.Tensor], None]
BACKENDS: tuple[Backend, ...] = ("triton", "torch")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim", "normed", "unit_offset", "dtype"),
    [
        ((4, 2), 64, 64, False, False, torch.float32),
        ((8, 1), 128, 128, True, False, torch.bfloat16),
        ((3, 3), 96, 48, True, True, torch.float32),
        ((5, 1), 80, 20, False, False, torch.float16),
        ((4, 2), 256, 256, True, True, torch.bfloat16),
        ((16, 16), 64, 64, True, False, torch.float16),
    ],
)
def test_one_pass_gives_what_three_give(
    heads: tuple[int, int],
    head_dim: int,
    rotary_dim: int,
    normed: bool,
    unit_offset: bool,
    dtype: torch.dtype,
    backend: Backend,
    interleaved: bool,
    device: torch.device,
    assert_close: Close,
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    layout = KVLayout(4, 3, num_kv_heads, 8, head_dim)
    pool = torch.randn(layout.shape).to(dtype).to(device)
    expected_pool = pool.clone()
    wide = torch.randn(5, num_heads + 2 * num_kv_heads + 1, head_dim).to(dtype).to(device)
    qkv = wide[:, 1:]
    before = wide.clone()
    angles = torch.rand(32, rotary_dim // 2, device=device) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.tensor([3, 31, 0, 7, 7], device=device)
    slots = torch.tensor([9, 31, -1, 0, 17], device=device)
    q_norm, k_norm = torch.randn(2, head_dim).to(dtype).to(device)

    q, k, v = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
    if normed:
        q = norm.rms_norm(q, q_norm, 1e-6, unit_offset=unit_offset)
        k = norm.rms_norm(k, k_norm, 1e-6, unit_offset=unit_offset)
    if interleaved:
        order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
        q, k = q[..., order], k[..., order]
    expected, k = apply_rope(q, k, table, positions)
    if interleaved:
        places = sorted(range(head_dim), key=order.__getitem__)
        expected, k = expected[..., places], k[..., places]
    write_kv(k, v, layout.layer_view(expected_pool, 1), slots)

    out = prepare_heads(
        qkv,
        num_heads,
        num_kv_heads,
        table,
        positions,
        layout.layer_view(pool, 1),
        slots,
        q_norm_H=q_norm if normed else None,
        k_norm_H=k_norm if normed else None,
        interleaved=interleaved,
        eps=1e-6,
        unit_offset=unit_offset,
        backend=backend,
    )
    assert out.is_contiguous()
    if normed and dtype == torch.bfloat16:  # the interpreter truncates before the rotation, where terms may cancel
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=6e-2)
        torch.testing.assert_close(pool, expected_pool, rtol=2e-2, atol=6e-2)
    else:
        assert_close(out, expected)
        assert_close(pool, expected_pool)
    assert torch.equal(pool[:, 1, 1], expected_pool[:, 1, 1])  # values are only copied
    assert torch.equal(pool[:, [0, 2]], expected_pool[:, [0, 2]])
    assert torch.equal(wide, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_fp8_get_scaled_keys_and_values(backend: Backend, device: torch.device) -> None:
    torch.manual_seed(1)
    layout = KVLayout(2, 1, 2, 8, 32)
    pool = torch.zeros(layout.shape, device=device).to(FP8)
    qkv = torch.randn(3, 8, 32, device=device) * 9
    table, positions = torch.randn(8, 16, device=device), torch.tensor([1, 2, 3], device=device)
    slots = torch.tensor([4, -1, 9], device=device)
    cache = layout.layer_view(pool, 0)
    prepare_heads(qkv, 4, 2, table, positions, cache, slots, k_scale=0.5, v_scale=2.0, backend=backend)
    _, k = apply_rope(qkv[:, :4], qkv[:, 4:6], table, positions)
    for token, slot in ((0, 4), (2, 9)):
        stored = pool[slot // 8, 0, :, :, slot % 8].float()
        # neighbouring numbers of e4m3 are at most an eighth apart
        torch.testing.assert_close(stored[0] * 0.5, k[token], rtol=0.07, atol=2e-3)
        torch.testing.assert_close(stored[1] * 2.0, qkv[token, 6:], rtol=0.07, atol=4e-3)
    assert pool.float().count_nonzero() <= 2 * 2 * 2 * 32


def test_last_block_of_a_large_pool(tmp_path: Path, device: torch.device) -> None:
    """Offsets pass 2^31 elements; on a CPU the pool is a sparse file."""
    layout = KVLayout(num_blocks=32_768, num_layers=48, num_kv_heads=1, block_size=16, head_dim=64)
    if device.type == "cuda":
        pool = torch.zeros(layout.shape, dtype=torch.float16, device=device)
    else:
        size = layout.num_blocks * layout.bytes_per_block("float16") // 2
        file = str(tmp_path / "pool")
        pool = torch.from_file(file, shared=True, size=size, dtype=torch.float16).view(layout.shape)
    cache = layout.layer_view(pool, 47)
    qkv = torch.randn(2, 4, 64).to(torch.float16).to(device)
    table = torch.cat((torch.ones(4, 32), torch.zeros(4, 32)), 1).to(device)  # turns by nothing
    slots = torch.tensor([32_768 * 16 - 1, 32_768 * 16 - 16], device=device)
    q = prepare_heads(qkv, 2, 1, table, torch.tensor([0, 3], device=device), cache, slots, backend="triton")
    assert torch.equal(q, qkv[:, :2])
    assert torch.equal(cache[-1, :, 0, 15], qkv[0, 2:])
    assert torch.equal(cache[-1, :, 0, 0], qkv[1, 2:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_alone_leave_the_pages_as_they_are(backend: Backend, device: torch.device, assert_close: Close) -> None:
    """As of a layer that reads what another one keeps."""
    torch.manual_seed(0)
    layout = KVLayout(2, 1, 2, 8, 64)
    pool, q = torch.randn(layout.shape, device=device), torch.randn(5, 3, 64, device=device)
    before, norm_H = pool.clone(), torch.randn(64, device=device)
    angles = torch.rand(32, 32, device=device) * 6
    table, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.tensor([3, 31, 0, 7, 7], device=device)
    pages, slots = layout.layer_view(pool, 0), torch.tensor([9, 1, -1, 0, 15], device=device)
    out = prepare_heads(
        q, 3, 0, table, positions, pages, slots, q_norm_H=norm_H, k_norm_H=norm_H, eps=1e-6, backend=backend
    )
    normed = norm.rms_norm(q, norm_H, 1e-6, backend="torch")
    assert_close(out, apply_rope(normed, normed[:, :0], table, positions)[0])
    assert torch.equal(pool, before)


def test_misfits_are_refused(device: torch.device) -> None:
    layout = KVLayout(2, 1, 1, 8, 32)
    cache = layout.layer_view(torch.zeros(layout.shape), 0)
    qkv, table, index = torch.zeros(2, 4, 32), torch.zeros(4, 32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UnsupportedShapeError, match=r"\[T, 5, H\]"):
        prepare_heads(qkv, 3, 1, table, index, cache, index)
    with pytest.raises(UnsupportedShapeError, match="as many positions"):
        prepare_heads(qkv, 2, 1, table, index[:1], cache, index)
    with pytest.raises(UnsupportedShapeError, match="even R"):
        prepare_heads(qkv, 2, 1, torch.zeros(4, 34), index, cache, index)
    with pytest.raises(UnsupportedShapeError, match="come together"):
        prepare_heads(qkv, 2, 1, table, index, cache, index, q_norm_H=torch.ones(32))
    with pytest.raises(UnsupportedShapeError, match="heads of kv_cache"):
        prepare_heads(qkv[..., :16], 2, 1, table[:, :16], index, cache, index)
