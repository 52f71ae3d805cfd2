"""The whole engine, paged, against transformers: the same greedy tokens however the work is cut.

`bench/parity.py` does the same with more prompts and tokens, and writes down what it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.checkpoints import FAMILIES
from tests.fakes.greedy_parity import MODES, Mode, engine_tokens, prompts_of, reference_tokens

PROMPTS = prompts_of(count=16, longest=300)
NUM_TOKENS = 32


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> tuple[Path, list[list[int]]]:
    folder = make_checkpoint(request.param)
    return folder, reference_tokens(folder, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_greedy_tokens_equal_those_of_transformers(case: tuple[Path, list[list[int]]], mode: Mode) -> None:
    folder, expected = case
    tokens, num_cached = engine_tokens(folder, PROMPTS, NUM_TOKENS, mode)
    assert tokens == expected
    if mode.repeat:
        assert num_cached > sum(map(len, PROMPTS)) // 2
