"""Engines over latents: ranks that each have all of them, and bytes that engines of other numbers of ranks read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine import LLM, SamplingParams

PROMPTS = [[number % 300 + 3 for number in range(start, start + 100)] for start in (0, 40, 170)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def generate(folder: Path, **settings: Any) -> tuple[list[list[int]], int]:
    """The tokens, and how many of the prompts were not computed."""
    fixed: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 64, "num_threads": 1}
    with LLM(str(folder), skip_tokenizer_init=True, **fixed, **settings) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    return [[*result.outputs[0].token_ids] for result in results], sum(r.num_cached_tokens or 0 for r in results)


@pytest.fixture(scope="module")
def folder(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("deepseek_v3")


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_blocks_of_one_rank_are_those_of_several(folder: Path, ranks: dict[str, int], tmp_path: Path) -> None:
    """A file of one engine is read by another, whichever has ranks."""
    kept: dict[str, Any] = {"kv_connector": "file", "kv_offload_dir": str(tmp_path)}
    alone, _ = generate(folder)
    saved, computed = generate(folder, **kept)
    loaded, found = generate(folder, **kept, **ranks)
    assert (saved, loaded) == (alone, alone)
    assert computed == 0
    assert found == 3 * 96


def test_blocks_of_several_ranks_are_those_of_one(folder: Path, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"kv_connector": "file", "kv_offload_dir": str(tmp_path)}
    saved, _ = generate(folder, tensor_parallel_size=2, **kept)
    loaded, found = generate(folder, **kept)
    assert saved == loaded
    assert found == 3 * 96
