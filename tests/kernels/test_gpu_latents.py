"""Attention over latents at the sizes of serving, which only a GPU gets through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pagefleet_kernels.fp8 import FP8

from tests.kernels.test_latents import Lens, make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENS: dict[str, Lens] = {
    "mixed": [(1, 1328), (5, 18), (129, 463)],
    "prompts": [(512, 512), (133, 2000)],
    "decode": [(1, length) for length in (1, 17, 512, 4096, 1023)],
    "long decode": [(1, 30_000)],
}


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("stored", [None, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("heads", "block_size"), [(16, 16), (128, 64), (10, 32)])
def test_deepseek_s_widths(
    lens: Lens,
    stored: torch.dtype | None,
    heads: int,
    block_size: int,
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    batch = make_batch(
        torch.device("cuda"), lens, heads=heads, rank=512, rotated=64, block_size=block_size, dtype=torch.bfloat16,
        stored=stored,
    )  # fmt: skip
    assert_close(batch.attend("triton"), batch.attend("torch"))


def test_a_graph_serves_other_lengths(assert_close: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """What was captured at one length is replayed at others, padding among them."""
    batch = make_batch(
        torch.device("cuda"), LENS["decode"], heads=16, rank=512, rotated=64, dtype=torch.bfloat16
    )  # fmt: skip
    batch.attend("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.attend("triton")
    batch.seq_lens_S.copy_(torch.tensor([1, 3, 0, 2000, 64], dtype=torch.int32))
    graph.replay()
    assert_close(out, batch.attend("torch"))
