"""Inputs of the kernel tests: random batches over a fragmented pool, and how close two results must be.

The kernels run compiled on a GPU and in Triton's interpreter elsewhere (conftest.py), with the same tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.kv_cache import write_kv
from pagefleet_kernels.layout import KVLayout


@dataclass(frozen=True)
class PagedBatch:
    """Ragged queries of several sequences, their pages, and the keys and values in order, as an oracle wants them."""

    q_TNH: torch.Tensor
    kv_cache: torch.Tensor
    block_tables_SB: torch.Tensor
    query_start_loc_S1: torch.Tensor
    seq_lens_S: torch.Tensor
    lens: Sequence[tuple[int, int]]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    @property
    def max_query_len(self) -> int:
        return max(query_len for query_len, _ in self.lens)

    @property
    def scale(self) -> float:
        return float(self.q_TNH.shape[-1] ** -0.5)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def assert_close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Compare two results of one dtype. bfloat16 gets two units in the last place: the interpreter truncates."""
    tolerances = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        rtol, atol = tolerances[expected.dtype]
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)

    return check


@pytest.fixture
def make_batch(device: torch.device) -> Callable[..., PagedBatch]:
    """Build a PagedBatch from (query_len, seq_len) pairs.

    The pool has two layers of which the second is used, pages lie in random order, and everything that no kernel may
    read (other pages, the rest of a last page, unused table entries) is NaN or out of range. With `fp8_scales` (of
    keys and of values) the pool holds `fp8`.
    """

    def build(
        lens: Sequence[tuple[int, int]],
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        fp8_scales: tuple[float, float] | None = None,
        fp8: torch.dtype = FP8,
    ) -> PagedBatch:
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        blocks_each = [-(-seq_len // block_size) for _, seq_len in lens]
        layout = KVLayout(sum(blocks_each) + 3, 2, num_kv_heads, block_size, head_dim)
        pool = torch.full(layout.shape, float("nan"), device=device).to(fp8 if fp8_scales else dtype)
        kv_cache = layout.layer_view(pool, 1)
        k_scale, v_scale = fp8_scales or (1.0, 1.0)
        order = torch.randperm(layout.num_blocks, generator=generator).to(torch.int32)
        block_tables = torch.full((len(lens), max(blocks_each) + 2), -1, dtype=torch.int32)
        keys, values, used = [], [], 0
        for seq, ((_, seq_len), num_blocks) in enumerate(zip(lens, blocks_each, strict=True)):
            block_tables[seq, :num_blocks] = order[used : used + num_blocks]
            used += num_blocks
            k, v = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator).to(dtype).to(device)
            position = torch.arange(seq_len)
            slots = block_tables[seq, position // block_size].long() * block_size + position % block_size
            if fp8_scales:
                # what the pool can hold exactly, so that an oracle sees the same keys and values
                k, v = (x.to(fp8).to(dtype) * scale for x, scale in ((k, k_scale), (v, v_scale)))
            write_kv(k, v, kv_cache, slots.to(device), k_scale=k_scale, v_scale=v_scale, backend="torch")
            keys.append(k)
            values.append(v)
        query_lens = torch.tensor([0] + [query_len for query_len, _ in lens])
        num_tokens = int(query_lens.sum())
        # a slice of a wider projection, as the model hands it over
        projected = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
        return PagedBatch(
            q_TNH=projected.to(dtype).to(device)[:, :num_heads],
            kv_cache=kv_cache,
            block_tables_SB=block_tables.to(device),
            query_start_loc_S1=query_lens.cumsum(0).to(torch.int32).to(device),
            seq_lens_S=torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32, device=device),
            lens=lens,
            keys=keys,
            values=values,
        )

    return build
