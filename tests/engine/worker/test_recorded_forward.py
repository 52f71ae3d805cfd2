"""Steps of decoding on a CPU that are recorded give what they give one operation after another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.layers.embedding import Embedding
from pagefleet_engine.worker.recorded_forward import MEMORY, MOST_ROWS
from pagefleet_kernels.native.attention import LayerPages, PagedStep, plan_attention
from pagefleet_kernels.native.recording import Recording
from pagefleet_kernels.score_rule import ScoreRule

from tests.fakes.native_kernels import native_libraries

pytestmark = pytest.mark.skipif(not native_libraries(), reason="the kernels of the CPU were not compiled")

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1400,
    "num_kv_blocks": 600,
    "num_threads": 2,
    "skip_tokenizer_init": True,
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each run of a recording had."""
    seen: list[int] = []
    run = Recording.run

    def counted(recording: Recording) -> torch.Tensor:
        seen.append(len(recording.result))
        return run(recording)

    monkeypatch.setattr(Recording, "run", counted)
    return seen


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    """Of five requests that end one after the other; contexts are cut for two threads, some once they have grown."""
    lengths = (1, 500, 9, 1100, 30)
    prompts = [[3 + (7 * at + 11 * length) % 300 for at in range(length)] for length in lengths]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12 * (number + 1), ignore_eos=True) for number in range(len(prompts))
    ]
    with LLM(model=str(folder), **SETTINGS, **settings) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [
        *(
            ("llama", "auto"),
            ("llama", "fp8"),
            ("gemma3_text", "auto"),
            ("gemma3_text", "fp8_e5m2"),
            ("mixtral", "auto"),
        ),
        *(("deepseek_v3", "auto"), ("deepseek_v3", "fp8")),
    ],
)
def test_tokens_are_those_of_one_operation_after_another(
    family: str, kv_cache_dtype: str, make_checkpoint: Callable[..., Path], runs: list[int]
) -> None:
    folder = make_checkpoint(family, max_position_embeddings=1500)
    expected = tokens(folder, cuda_graphs="none", kv_cache_dtype=kv_cache_dtype)
    assert not runs
    assert tokens(folder, kv_cache_dtype=kv_cache_dtype) == expected
    assert len(runs) > 40, "most steps are runs of what was recorded"
    assert set(runs) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((32, 32), 128), ((128, 1), 576)])
def test_attention_of_192_threads_leaves_room_for_a_layer(heads: tuple[int, int], head_dim: int) -> None:
    (library, *_), (num_heads, kv_heads) = native_libraries(), heads
    kept = torch.zeros(1, 1 if kv_heads == 1 else 2, kv_heads, 16, head_dim)
    lens = torch.ones(MOST_ROWS, dtype=torch.int32)
    step = PagedStep(torch.zeros(MOST_ROWS, 1, dtype=torch.int32), torch.arange(MOST_ROWS + 1, dtype=torch.int32), lens)
    plan = plan_attention(library, LayerPages(kept, num_heads, ScoreRule(scale=1.0)), step, 192, any_lengths=True)
    assert sum(tensor.nbytes for tensor in (*plan.kept, plan.memory)) < 0.8 * MEMORY


def test_a_model_that_looks_at_its_numbers_runs_one_operation_after_another(
    make_checkpoint: Callable[..., Path],
    runs: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make_checkpoint("llama", max_position_embeddings=1500)
    expected = tokens(folder)
    runs.clear()
    embed = Embedding.__call__

    def looking(embedding: Embedding, token_ids_T: torch.Tensor) -> torch.Tensor:
        assert token_ids_T.max().item() >= 0
        return embed(embedding, token_ids_T)

    monkeypatch.setattr(Embedding, "__call__", looking)
    with caplog.at_level(logging.INFO):
        assert tokens(folder) == expected
    assert not runs
    assert "steps of 1 tokens run one operation after another: it does not do the same each time" in caplog.text
