"""Prompts by the numbers."""

from __future__ import annotations

import pytest
from pagefleet_engine.bench.workloads import FIRST_TOKEN, Lengths, make_workload, parse_lengths
from pagefleet_engine.errors import ConfigError


def test_lengths_lie_in_their_ranges_and_prompts_share_what_they_should() -> None:
    workload = make_workload(50, Lengths(3, 9), Lengths(2, 4), 100, shared_prefix=5, seed=1)
    assert {len(prompt) for prompt in workload.prompts} <= set(range(8, 15))
    assert set(workload.output_lens) == {2, 3, 4}
    assert len({tuple(prompt[:5]) for prompt in workload.prompts}) == 1
    assert len({tuple(prompt) for prompt in workload.prompts}) == 50
    assert all(FIRST_TOKEN <= token < 100 for prompt in workload.prompts for token in prompt)
    assert workload.num_input_tokens == sum(map(len, workload.prompts))
    assert workload.num_output_tokens == sum(workload.output_lens)


def test_the_same_seed_gives_the_same_workload() -> None:
    first, again, other = (make_workload(3, Lengths(1, 50), Lengths(1, 50), 1000, seed=seed) for seed in (4, 4, 5))
    assert first == again != other


def test_lengths_are_a_number_or_a_range() -> None:
    assert parse_lengths("input-len", "512") == Lengths(512, 512)
    assert parse_lengths("input-len", "100:1024") == Lengths(100, 1024)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "5:2", "1:2:3", "1.5"])
def test_a_length_that_cannot_be_names_its_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--output-len is"):
        parse_lengths("output-len", text)
