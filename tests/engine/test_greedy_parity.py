"""The whole engine, paged, against transformers: the same greedy tokens however the work is cut.

`bench/parity.py` does the same with more prompts and tokens, and writes down what it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import FAMILIES
from tests.fakes.greedy_parity import MODES, Mode, engine_tokens, prompts_of, reference_choices

PROMPTS = prompts_of(count=16, longest=300)
NUM_TOKENS = 32


OF_ALL_MODES = ("llama", "gemma3_text", "gemma3n_text", "gpt_oss", "llama4_text", "deepseek_v3")
"""One for each kind of K/V: of all positions, of windows, of layers before, beside sinks, of chunks, latent. Of the
others one mode each runs daily."""


Answers = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def choices_of() -> Callable[[Path, Answers], list[list[int]]]:
    """What transformers takes along a model's answers, found once for all modes that give the same."""
    return cache(lambda folder, answers: reference_choices(folder, PROMPTS, list(map(list, answers))))


def cases() -> list[Any]:
    return [
        pytest.param(
            family,
            mode,
            id=f"{family}-{mode.name}",
            marks=() if family in OF_ALL_MODES or at == place % len(MODES) else pytest.mark.nightly,
        )
        for place, family in enumerate(FAMILIES)
        for at, mode in enumerate(MODES)
    ]


@pytest.mark.parametrize(("family", "mode"), cases())
def test_greedy_tokens_equal_those_of_transformers(
    family: str,
    mode: Mode,
    make_checkpoint: Callable[..., Path],
    choices_of: Callable[[Path, Answers], list[list[int]]],
) -> None:
    folder = make_checkpoint(family)
    tokens, num_cached = engine_tokens(folder, PROMPTS, NUM_TOKENS, mode)
    assert [len(answer) for answer in tokens] == [NUM_TOKENS] * len(PROMPTS)
    assert tokens == choices_of(folder, tuple(map(tuple, tokens)))
    if mode.repeat:
        assert num_cached > sum(map(len, PROMPTS)) // 2
