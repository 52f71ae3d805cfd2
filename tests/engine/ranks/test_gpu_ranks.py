"""Ranks on GPUs, which meet by NCCL: in graphs, with kernels, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine import LLM, SamplingParams

from bench.gpu_kv_engines import check_engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 40, 200)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def tokens(folder: Path, ranks: int, **settings: Any) -> list[tuple[int, ...]]:
    llm = LLM(
        str(folder), tensor_parallel_size=ranks, device="cuda", dtype="float32", num_kv_blocks=256, max_model_len=512,
        skip_tokenizer_init=True, **settings,
    )  # fmt: skip
    try:
        told = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
        return [tuple(one.outputs[0].token_ids) for one in told]
    finally:
        llm.shutdown()


@pytest.mark.parametrize("cuda_graphs", ["none", "full_and_piecewise"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2", "phi3"])
def test_two_gpus_give_the_tokens_of_one(family: str, cuda_graphs: str, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(family)
    assert tokens(folder, 2, cuda_graphs=cuda_graphs) == tokens(folder, 1, cuda_graphs=cuda_graphs)


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2allv"])
def test_two_copies_that_share_experts_give_the_tokens_of_one_gpu(
    backend: str, make_checkpoint: Callable[..., Path]
) -> None:
    folder = make_checkpoint("qwen3_moe")
    shared = tokens(folder, 1, data_parallel_size=2, enable_expert_parallel=True, all2all_backend=backend)
    assert shared == tokens(folder, 1)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("plane", ["tcp", "cuda_ipc"])
def test_kv_passes_between_engines_of_one_gpu_and_of_two(plane: str, ranks: tuple[int, int]) -> None:
    found = check_engines(plane, "cuda", 120, ranks=ranks)
    assert found["ok"], found["why"]


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="NCCL joins no two processes on one device")
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
def test_kv_passes_by_nccl_beside_the_sums_of_ranks(ranks: tuple[int, int]) -> None:
    devices = ("0,1", "2") if ranks == (2, 1) else ("2", "0,1")
    seen = {role: {"CUDA_VISIBLE_DEVICES": which} for role, which in zip(("prefill", "decode"), devices, strict=True)}
    found = check_engines("nccl", "cuda", 120, seen, ranks)
    assert found["ok"], found["why"]
