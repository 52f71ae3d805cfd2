"""docs/openai-api.md names what the code has."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagefleet_protocol import openai_common, openai_completions, sampling_params
from pagefleet_protocol.openai_common import REFUSED
from pagefleet_protocol.sampling_params import SamplingParams

OFFLINE = {"detokenize", "bad_words_token_ids", "thinking", "extra_args", "output_kind"}
TEXT = (Path(__file__).parents[2] / "docs" / "openai-api.md").read_text()
OPENAI_FIELDS = {
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias",
    "max_tokens", "logprobs",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields_are_named(name: str) -> None:
    assert f"`{name}`" in TEXT


@pytest.mark.parametrize("name", sorted(set(SamplingParams.__struct_fields__) - OPENAI_FIELDS - OFFLINE))
def test_fields_that_openai_lacks_are_named(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_limits_are_those_of_the_code() -> None:
    assert f"`n` up to {sampling_params.MAX_N}, prompts times `n` up to {openai_completions.MAX_CHOICES}" in TEXT
    assert (
        f"{openai_common.MAX_STOP_STRINGS} stop strings, {sampling_params.MAX_LOGIT_BIAS} `logit_bias` entries" in TEXT
    )
    assert f"{sampling_params.MAX_LOGPROBS} log-probabilities" in TEXT
    assert f"`max_tokens` defaults to {openai_completions.DEFAULT_MAX_TOKENS} for completions" in TEXT
