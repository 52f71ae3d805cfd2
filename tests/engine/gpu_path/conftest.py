"""Engines on a make-believe GPU: loaded, asked for a mix of everything, and asked again for numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pagefleet_engine import LLM, SamplingParams

from tests.fakes.cuda.device import FakeGpu, fake_gpu
from tests.fakes.cuda.runtime import GpuKind, Launched
from tests.fakes.cuda.tensors import Wait
from tests.fakes.trie_forms import AnySource, choice

LIMITS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 160,
    "block_size": 8,
    "skip_tokenizer_init": True,
    "profile_cache": False,
    "num_threads": 1,
}
VOCABULARY = 320
_PLAIN: dict[str, Any] = {"ignore_eos": True, "detokenize": False}
FORM = choice(range(20, 40), range(300, 320), [20, 31, 32], [7, 8, 9])
EVERY_SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=5, **_PLAIN),
    SamplingParams(temperature=0.8, max_tokens=7, seed=1, **_PLAIN),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, max_tokens=6, **_PLAIN),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=9, **_PLAIN),
    SamplingParams(temperature=0.9, frequency_penalty=0.3, max_tokens=9, **_PLAIN),
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=4, **_PLAIN),
    SamplingParams(temperature=0.0, logit_bias={3: 5.0}, min_tokens=3, max_tokens=4, detokenize=False),
    SamplingParams(temperature=0.7, allowed_token_ids=(5, 6, 7), max_tokens=4, **_PLAIN),
    SamplingParams(temperature=0.7, structured_outputs=FORM, max_tokens=8, **_PLAIN),
    SamplingParams(structured_outputs=FORM, top_p=0.9, repetition_penalty=1.3, logprobs=2, max_tokens=4, **_PLAIN),
)
PROMPTS = [[5, 9, 30, 31, 7], [200, 3], [44] * 12]  # of more than one block; a pass over more than 16 rows
ALL, NONE = slice(None), slice(0)
MIXED = slice(2, None, 5)
"""Of three without a common prefix, sampled alike, and of eleven with one, sampled in several ways: for what sampling
has nothing to do with."""
NUM_GREEDY = 2
"""A prompt's pass and a decode: interpreted kernels take their time."""
LAYERS = 2
"""One that begins, and one that adds to another's sums, where layers are alike: each more does the same again."""
OF_SEVERAL_KINDS = {
    *("cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone4", "gemma2", "gemma3_text"),
    *("gemma3n_text", "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama4_text", "olmo3", "smollm3"),
}
"""Families whose layers differ in windows, rotations or experts."""


@dataclass(frozen=True)
class Served:
    """What serving on the device showed."""

    waits: list[Wait]
    late_forms: list[str]
    num_forms: int
    graphs: list[list[Launched]]
    tokens: list[list[int]]
    """Greedy ones for PROMPTS, by kernels in Triton's interpreter; empty unless asked for."""


def serve(
    folder: Path,
    kind: GpuKind | None = None,
    *,
    batches: slice = ALL,
    computes: bool = False,
    num_tokens: int = NUM_GREEDY,
    **settings: Any,
) -> Served:
    """Load the model on a make-believe GPU and ask it for these of the batches, of all sizes, sampled in every way."""
    forms = patch("pagefleet_engine.engine_core.build._grammars", lambda *_: AnySource())
    with fake_gpu(kind) as gpu, forms, LLM(str(folder), device="cuda", **(LIMITS | settings)) as llm:
        num_forms = len(gpu.launches.forms)
        gpu.ready()
        for batch in _batches()[batches]:
            llm.generate([{"prompt_token_ids": prompt} for prompt, _ in batch], [each for _, each in batch])
        waits, late_forms = list(gpu.waits), gpu.late_forms
        tokens = greedy(llm, gpu, num_tokens) if computes else []
    return Served(waits, late_forms, num_forms, gpu.graphs, tokens)


def _batches() -> list[list[tuple[list[int], SamplingParams]]]:
    rng = random.Random(0)
    common = [rng.randrange(3, VOCABULARY) for _ in range(40)]
    batches = []
    for count in (1, 3, 8, 11):
        for mixed in (False, True):
            batch = []
            for place in range(count):
                length = rng.choice((1, 2, 5, 9, 30, 70))
                start = common if mixed else []  # a prefix for all of them
                prompt = start + [rng.randrange(3, VOCABULARY) for _ in range(length)]
                batch.append((prompt, EVERY_SAMPLING[(place + count if mixed else count) % len(EVERY_SAMPLING)]))
            batches.append(batch)
    return batches


def greedy(llm: LLM, gpu: FakeGpu | None, num_tokens: int) -> list[list[int]]:
    """Tokens for PROMPTS; on the make-believe GPU its kernels compute from here on."""
    if gpu is not None:
        gpu.ready(computes=True)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, **_PLAIN)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="session")
def make_checkpoint(make_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """As everywhere, of `LAYERS` where those are alike."""

    def make(family: str, **overrides: Any) -> Path:
        layers = {} if family in OF_SEVERAL_KINDS else {"num_hidden_layers": LAYERS}
        return make_checkpoint(family, **(layers | overrides))

    return make


@pytest.fixture(scope="session")
def on_cpu() -> Callable[..., list[list[int]]]:
    """Greedy tokens of the same engine on the CPU."""

    def run(folder: Path, num_tokens: int = NUM_GREEDY, **settings: Any) -> list[list[int]]:
        with LLM(str(folder), device="cpu", **(LIMITS | settings)) as llm:
            return greedy(llm, None, num_tokens)

    return run
