"""`LLM.generate` with forms, beside everything else that a request may ask for. The model's weights are random, so that
nothing but the masks makes an answer what it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.results import CompletionOutput
from pagefleet_protocol.structured_outputs import StructuredOutputsParams
from pagefleet_protocol.thinking import Thinking

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA)
NUMBER = StructuredOutputsParams(regex=r"\d{3}-\d{4}")
COLOUR = StructuredOutputsParams(choice=("red", "green", "blue"))
PROMPTS = ["Describe a pet.", "And another one, please, with a longer prompt to begin with."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Few blocks: requests are preempted."""
    with LLM(
        "builtin://tiny", load_format="dummy", max_num_seqs=6, num_kv_blocks=22, block_size=8, max_model_len=170,
        num_threads=1, seed=1,  # numbers that do not fill every gap with white space, up to its limit
    ) as llm:  # fmt: skip
        yield llm


def ask(llm: LLM, sampling: SamplingParams, prompts: Sequence[str] = PROMPTS) -> list[CompletionOutput]:
    results = llm.generate(list(prompts), sampling, use_tqdm=False)
    return [output for result in results for output in result.outputs]


def is_pet(text: str) -> bool:
    pet = json.loads(text)
    return pet.keys() == SCHEMA["properties"].keys() and pet["kind"] in ("cat", "dog") and 0 <= pet["size"] <= 99  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"temperature": 0.0},
        {"logprobs": 2},
        {"prompt_logprobs": 0},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"top_k": 4, "top_p": 0.8, "min_p": 0.01},
        {"logit_bias": {5: 50.0, 300: -50.0}},
        {"min_tokens": 5},
        {"min_tokens": 100},
        {"ignore_eos": True},
        {"detokenize": False},
    ],
    ids=str,
)
def test_an_answer_holds_its_form_whatever_else_is_asked(llm: LLM, fields: dict[str, Any]) -> None:
    outputs = ask(llm, SamplingParams(structured_outputs=JSON, max_tokens=120, **{"seed": 3, **fields}))
    assert len(outputs) == 2 * fields.get("n", 1)
    for output in outputs:
        assert output.finish_reason == "stop"
        text = output.text if fields.get("detokenize", True) else llm.llm_engine.tokenizer.decode(output.token_ids)  # type: ignore[union-attr]
        assert is_pet(text)
        if "logprobs" in fields:
            assert output.logprobs is not None
            assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids


def test_a_seed_gives_the_same_answer_in_any_batch(llm: LLM) -> None:
    sampling = SamplingParams(structured_outputs=JSON, max_tokens=120, seed=7)
    alone = [ask(llm, sampling, [prompt])[0].token_ids for prompt in PROMPTS]
    free = SamplingParams(max_tokens=40, seed=1)
    crowd = llm.generate([*PROMPTS, *PROMPTS * 4], [sampling, sampling, *[free] * 8], use_tqdm=False)
    assert [result.outputs[0].token_ids for result in crowd[:2]] == alone
    llm.reset_prefix_cache()
    assert ask(llm, sampling)[1].token_ids == alone[1]


def test_those_beside_a_form_are_not_touched_by_it(llm: LLM) -> None:
    free = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    alone = [output.token_ids for output in ask(llm, free)]
    preempted_before = llm.stats().preemptions
    params = [free, free, *[SamplingParams(structured_outputs=form, max_tokens=60) for form in (JSON, NUMBER) * 4]]
    mixed = llm.generate([*PROMPTS, *PROMPTS * 4], params, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in mixed[:2]] == alone
    assert llm.stats().preemptions > preempted_before, "the pool is too small for all of them"
    for pet, number in zip(mixed[2::2], mixed[3::2], strict=True):
        assert is_pet(pet.outputs[0].text)
        assert re.fullmatch(r"\d{3}-\d{4}", number.outputs[0].text)


def test_a_stop_string_and_a_limit_end_it_before(llm: LLM) -> None:
    sampling = SamplingParams(structured_outputs=NUMBER, stop=("-",), seed=2)
    for output in ask(llm, sampling):
        assert re.fullmatch(r"\d{3}", output.text)
        assert (output.finish_reason, output.stop_reason) == ("stop", "-")
    for output in ask(llm, SamplingParams(structured_outputs=NUMBER, max_tokens=2)):
        assert output.finish_reason == "length"
    for output in ask(llm, SamplingParams(structured_outputs=COLOUR, include_stop_str_in_output=True)):
        assert output.text in ("red", "green", "blue")


def test_a_form_begins_after_its_thought(llm: LLM) -> None:
    thinking = Thinking(end="</think>", budget=6)
    for output in ask(llm, SamplingParams(structured_outputs=COLOUR, thinking=thinking, max_tokens=40, seed=4)):
        _, end, answer = output.text.partition("</think>")
        assert end
        assert answer in ("red", "green", "blue")
        assert output.finish_reason == "stop"


def test_a_form_that_cannot_be_is_the_askers_mistake_and_the_next_is_answered(llm: LLM) -> None:
    wrong = StructuredOutputsParams(json={"type": "object", "minProperties": "x"})
    with pytest.raises(InvalidRequest) as refused:
        ask(llm, SamplingParams(structured_outputs=wrong))
    assert str(refused.value.param).startswith("structured_outputs.json")
    assert ask(llm, SamplingParams(structured_outputs=COLOUR))[0].text in ("red", "green", "blue")
