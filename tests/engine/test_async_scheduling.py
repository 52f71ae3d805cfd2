"""The whole engine with steps that overlap: the same tokens as one step at a time, whatever the requests ask for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pagefleet_engine.llm import LLM
from pagefleet_engine.results import RequestOutput
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.offline_core import core_of

PROMPTS = ("What is the capital of France?", "Hello", "Who are you?", "One two three", "A long day. " * 12, "Why?")
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=44, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, max_tokens=24, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=12),
    SamplingParams(temperature=1.2, seed=3, max_tokens=40, top_p=0.8, repetition_penalty=1.2, stop=("e",)),
    SamplingParams(temperature=0.7, seed=4, max_tokens=1, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=5, max_tokens=44, ignore_eos=True),
)


def run(overlap: bool) -> tuple[list[RequestOutput], int]:
    """Run all in a pool that is too small for four at once; returns their outputs and the number of preemptions."""
    with LLM(
        "builtin://tiny",
        async_scheduling=overlap,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_kv_blocks=6,
        max_model_len=90,
    ) as llm:
        outputs = llm.generate(PROMPTS, SAMPLINGS, use_tqdm=False)
        assert core_of(llm).executor.max_in_flight == (2 if overlap else 1)
        return outputs, llm.stats().preemptions


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], str, str | None]]:
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


def test_overlapping_steps_give_the_same_answers() -> None:
    alone, _ = run(overlap=False)
    overlapped, num_preemptions = run(overlap=True)
    assert tokens(overlapped) == tokens(alone)
    assert {output.outputs[0].finish_reason for output in alone} == {"stop", "length"}
    assert num_preemptions > 0
    for one, other in zip(alone, overlapped, strict=True):
        assert [len(entry or ()) for entry in one.prompt_logprobs or ()] == [
            len(entry or ()) for entry in other.prompt_logprobs or ()
        ]
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
