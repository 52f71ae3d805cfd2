"""Prompts, transformers' greedy tokens for them, and the ways in which the engine must give the same ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.models.config_file import read_arch

from tests.fakes.checkpoints import reference_model

VOCAB = 320
BLOCK_SIZE = 8


@dataclass(frozen=True)
class Mode:
    """One way to run the same prompts."""

    name: str
    one_by_one: bool = False
    repeat: bool = False
    """Ask twice: the second time prefixes come from the cache."""
    is_tight: bool = False
    """Room for the longest request and little more: most requests are preempted, some several times."""
    settings: dict[str, Any] = field(default_factory=dict)


MODES = (
    Mode("alone", one_by_one=True),
    Mode("batched"),
    Mode("chunks of odd size", settings={"max_num_batched_tokens": 61, "max_num_seqs": 32}),
    Mode("prefix cache hits", repeat=True),
    Mode("forced preemption", is_tight=True, settings={"enable_prefix_caching": False}),
    Mode("preemption with prefix cache", is_tight=True),
)


def prompts_of(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens; every fourth shares half of an earlier one."""
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(count - 2))]
    prompts: list[list[int]] = []
    for number, length in enumerate(lengths[:count]):
        shared = rng.choice(prompts)[: length // 2] if number % 4 == 3 else []
        prompts.append(shared + [rng.randrange(3, VOCAB) for _ in range(length - len(shared))])
    return prompts


@torch.inference_mode()
def reference_tokens(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens per prompt by transformers, each prompt alone, in float32."""
    model = reference_model(folder)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@torch.inference_mode()
def reference_choices(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """What transformers takes greedily at each place of the answers, after what stands before it there.

    Answers that equal this are its greedy ones, found in a pass over each instead of one for each of its tokens.
    """
    model = reference_model(folder)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer])
        logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits[:, _end_tokens(model)] = -torch.inf
        found.append(logits.argmax(-1).tolist())
    return found


def _end_tokens(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def engine_tokens(folder: Path, prompts: list[list[int]], count: int, mode: Mode) -> tuple[list[list[int]], int]:
    """The engine's greedy tokens, and how many prompt tokens came from the cache."""
    # transformers' min_new_tokens keeps the end-of-text token out; so does this.
    params = SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": (70 if mode.is_tight else 1200) * len(group_layers(read_arch(folder).kept_windows)),
        "num_threads": 1,
    }
    with LLM(model=str(folder), skip_tokenizer_init=True, **(settings | mode.settings)) as llm:
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        batches = [[one] for one in inputs] if mode.one_by_one else [inputs]
        if mode.repeat:
            llm.generate(inputs, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        results = [result for batch in batches for result in llm.generate(batch, params, use_tqdm=False)]
    return [result.outputs[0].token_ids for result in results], sum(r.num_cached_tokens or 0 for r in results)
