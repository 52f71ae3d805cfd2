"""The attention kernels at the sizes of serving, which only a GPU gets through. The other files run there too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagefleet_kernels.attention import paged_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENS = {
    "mixed": [(1, 1328), (5, 18), (129, 463)],
    "prompts": [(1024, 1024), (333, 4000)],
    "decode": [(1, length) for length in (1, 17, 512, 4096, 1023)],
    "long decode": [(1, 30_000)],
}


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "sliding_window"),
    [
        ((4, 4), 64, 16, torch.bfloat16, None),
        ((8, 2), 80, 32, torch.float16, None),
        ((5, 1), 128, 128, torch.bfloat16, 256),
        ((32, 8), 128, 16, torch.bfloat16, None),
        ((8, 2), 128, 64, torch.float32, 64),
        ((16, 8), 256, 16, torch.bfloat16, 128),
        ((4, 4), 256, 8, torch.float32, None),
    ],
)
def test_paged_attention_at_the_sizes_of_serving(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
    make_batch: Callable[..., Any],
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    batch = make_batch(lens, heads, head_dim, block_size, dtype)
    arguments = (
        batch.q_TNH,
        batch.kv_cache,
        batch.block_tables_SB,
        batch.query_start_loc_S1,
        batch.seq_lens_S,
        batch.scale,
        batch.max_query_len,
        sliding_window,
    )
    assert_close(paged_attention(*arguments), paged_attention(*arguments, backend="torch"))
