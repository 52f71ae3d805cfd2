"""Pools of 32,768 blocks, where an offset passes 2^31 elements: 32-bit arithmetic would read and write elsewhere.

The pool is a sparse file, so that only the touched pages of 6 GB take memory; on a GPU it is allocated.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagefleet_kernels.attention import paged_attention
from pagefleet_kernels.cascade_attention import cascade_attention
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.kv_cache import write_kv
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.score_rule import ScoreRule

# 98,304 elements per block: the last block begins 1.5 * 2^31 elements into the pool
LAYOUT = KVLayout(num_blocks=32_768, num_layers=48, num_kv_heads=1, block_size=16, head_dim=64)


@pytest.fixture
def pool(tmp_path: Path, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.zeros(LAYOUT.shape, dtype=torch.float16, device=device)
    num_elements = LAYOUT.num_blocks * LAYOUT.bytes_per_block("float16") // 2
    path = tmp_path / "pool"
    return torch.from_file(str(path), shared=True, size=num_elements, dtype=torch.float16).view(LAYOUT.shape)


@pytest.mark.parametrize("query_len", [1, 3, 20])
def test_last_blocks_of_a_large_pool(
    query_len: int, pool: torch.Tensor, device: torch.device, assert_close: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    torch.manual_seed(0)
    kv_cache = LAYOUT.layer_view(pool, LAYOUT.num_layers - 1)
    assert (LAYOUT.num_blocks - 1) * kv_cache.stride(0) > 2**31
    blocks = torch.tensor([[LAYOUT.num_blocks - 1, 0, LAYOUT.num_blocks - 2]], dtype=torch.int32, device=device)
    position = torch.arange(40, device=device)
    slots = blocks[0, position // 16] * 16 + (position % 16).to(torch.int32)
    k, v = torch.randn(2, 40, 1, 64).to(torch.float16).to(device)
    write_kv(k, v, kv_cache, slots, backend="triton")
    assert torch.equal(kv_cache[-1, 0, 0], k[:16, 0])
    assert torch.equal(kv_cache[-2, 1, 0, :8], v[32:, 0])

    def attend(backend: Backend) -> torch.Tensor:
        return paged_attention(
            q,
            kv_cache,
            blocks,
            torch.tensor([0, query_len], dtype=torch.int32, device=device),
            torch.tensor([40], dtype=torch.int32, device=device),
            ScoreRule(scale=0.125),
            query_len,
            backend=backend,
        )

    q = torch.randn(query_len, 2, 64).to(torch.float16).to(device)
    assert_close(attend("triton"), attend("torch"))


def test_last_blocks_of_a_large_fp8_pool_that_two_rows_share(
    pool: torch.Tensor, device: torch.device, assert_close: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    torch.manual_seed(0)
    codes = pool.view(FP8)[..., :64]
    kv_cache = codes[:, LAYOUT.num_layers - 1]
    assert (LAYOUT.num_blocks - 1) * kv_cache.stride(0) > 2**32
    last = LAYOUT.num_blocks - 1
    blocks = torch.tensor([[last, last - 1, 1], [last, last - 1, 2]], dtype=torch.int32, device=device)
    k, v = torch.randn(2, 80, 1, 64).to(torch.float16).to(device)
    position = torch.arange(40, device=device)
    slots = (blocks[:, position // 16] * 16 + position % 16).view(-1)
    write_kv(k, v, kv_cache, slots, k_scale=0.5, v_scale=2.0, backend="torch")
    q = torch.randn(2, 2, 64).to(torch.float16).to(device)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    lens = torch.tensor([40, 37], dtype=torch.int32, device=device)

    def attend(backend: Backend) -> torch.Tensor:
        batch = q, kv_cache, blocks, starts, lens, ScoreRule(scale=0.125, k_scale=0.5, v_scale=2.0), 1
        return cascade_attention(*batch, 2, backend=backend)

    assert_close(attend("triton"), attend("torch"))
