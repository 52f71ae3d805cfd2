"""How many launches a layer takes where each row computes one token: a budget for families and number formats."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.gpu_path.conftest import NONE, serve
from tests.fakes.cuda.runtime import Launched
from tests.fakes.quantized_checkpoints import Recipe, quantize_checkpoint

BUDGET = {
    ("gemma2", "plain"): 14,  # sums between norms are operations of their own
    ("gemma3_text", "plain"): 14,
    ("llama", "plain"): 10,
    ("mistral", "plain"): 9,
    ("olmo2", "plain"): 16,  # norms of whole projections: two kernels and two copies
    ("phi3", "plain"): 9,
    ("qwen2", "plain"): 10,
    ("qwen3", "plain"): 10,
    ("bloom", "plain"): 10,
    ("falcon", "plain"): 9,
    ("gpt2", "plain"): 10,
    ("mpt", "plain"): 10,
    ("cohere", "plain"): 9,
    ("cohere2", "plain"): 9,
    ("gemma", "plain"): 10,
    ("granite", "plain"): 12,
    ("phi", "plain"): 10,
    ("stablelm", "plain"): 10,
    ("opt", "plain"): 10,
    ("llama", "fp8"): 10,
    ("llama", "int8"): 10,
    ("qwen3", "fp8"): 10,
    ("gemma3_text", "fp8"): 14,
}
"""With the context in parts, whose merge is a launch; mistral and phi3 see too little of it for that."""
RECIPES = {"fp8": Recipe("float", "channel"), "int8": Recipe("int", "channel")}
FIRST = ("_prepare_heads_kernel", "_write_kv_kernel")
"""What writes keys and values: with rotation or without."""


def launches_per_layer(graph: list[Launched]) -> int:
    """From one layer's first launch of attention to the next one's; all layers are alike."""
    at = [place for place, launched in enumerate(graph) if launched.name in FIRST]
    assert len(at) > 1, "a graph of the whole pass holds all layers"
    return max(end - start for start, end in pairwise(at))


@pytest.mark.parametrize(("family", "numbers"), BUDGET)
def test_a_layer_keeps_its_budget(
    family: str, numbers: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, dtype="bfloat16")
    if numbers in RECIPES:
        folder = quantize_checkpoint(folder, tmp_path / numbers, RECIPES[numbers])
    served = serve(folder, batches=NONE, cuda_graphs="full_decode_only", cuda_graph_sizes="1,8,32", max_num_seqs=32)
    per_layer = [launches_per_layer(graph) for graph in served.graphs]
    assert len(per_layer) == 3
    assert max(per_layer) == BUDGET[family, numbers]
