"""The one table of ranges: what it refuses, in OpenAI's words, and that nothing in it makes a logit infinite."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol import sampling_params
from pagefleet_protocol.openai_json import InvalidRequest
from pagefleet_protocol.sampling_params import MIN_TEMPERATURE, RequestOutputKind, SamplingParams
from pagefleet_protocol.thinking import Thinking


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"repetition_penalty": 1e-300}, "repetition_penalty", "decimal_below_min_value"),
        ({"repetition_penalty": 101}, "repetition_penalty", "decimal_above_max_value"),
        ({"temperature": float("nan")}, "temperature", "decimal_above_max_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"top_p": 1e-300}, "top_p", "decimal_below_min_value"),
        ({"n": 129}, "n", "integer_above_max_value"),
        ({"n": None}, "n", "invalid_type"),
        ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
        ({"stop": ["a", ""]}, "stop[1]", "empty_string"),
        ({"stop": ["x"] * 17}, "stop", "array_above_max_length"),
        ({"stop": ["x" * 1025]}, "stop[0]", "string_above_max_length"),
        ({"stop": "x", "detokenize": False}, "stop", "invalid_value"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "integer_below_min_value"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]", "invalid_type"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty_array"),
        ({"bad_words": ["x"] * 129}, "bad_words", "array_above_max_length"),
        ({"bad_words_token_ids": ((),)}, "bad_words_token_ids", "empty_array"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "object_above_max_length"),
        ({"logit_bias": {5: 101}}, "logit_bias.5", "decimal_above_max_value"),
        ({"logit_bias": {-5: 1}}, "logit_bias", "integer_below_min_value"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
        ({"thinking": "yes"}, "thinking", "invalid_type"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_the_same_is_refused_where_bytes_are_decoded() -> None:
    with pytest.raises(InvalidRequest) as refused:
        msgspec.msgpack.decode(msgspec.msgpack.encode({"repetition_penalty": 1e-300}), type=SamplingParams)
    assert refused.value.param == "repetition_penalty"


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, MIN_TEMPERATURE])
def test_a_temperature_over_zero_is_never_too_small(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).temperature == MIN_TEMPERATURE
    assert SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"end": ""}, "thinking.end", "invalid_value"),
        ({"end": "x" * 65}, "thinking.end", "invalid_value"),
        ({"end": "</think>", "start": ""}, "thinking.start", "invalid_value"),
        ({"end": "</think>", "opened": 1}, "thinking.opened", "invalid_type"),
        ({"end": "</think>", "budget": -1}, "thinking.budget", "integer_below_min_value"),
    ],
)
def test_a_thought_without_an_end_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(thinking=Thinking(**fields))
    assert (refused.value.param, refused.value.code) == (param, code)


def test_a_thought_travels_with_its_request() -> None:
    sampling = SamplingParams(thinking=Thinking(end="</think>", opened=False, start="<think>", budget=5))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling


def test_lists_and_strings_of_scripts_are_taken() -> None:
    assert SamplingParams(stop="end", stop_token_ids=[1], bad_words=None) == SamplingParams(  # type: ignore[arg-type]
        stop=("end",), stop_token_ids=(1,)
    )


@given(st.floats(-1e4, 1e4), st.sampled_from(["least", "most"]))
def test_no_value_of_the_table_makes_a_logit_infinite(logit: float, end: str) -> None:
    at = 0 if end == "least" else 1
    penalty, temperature = sampling_params._NUMBERS["repetition_penalty"][at], MIN_TEMPERATURE
    for edited in (logit / penalty, logit * penalty):
        assert abs((edited + 100) / temperature) < 3e38, "the largest number of float32"


def test_parameters_may_be_set_anew() -> None:
    params = SamplingParams(max_tokens=4)
    params.max_tokens, params.stop, params.logit_bias = 8, "x", {1: 2.0}  # type: ignore[assignment]
    assert params == SamplingParams(max_tokens=8, stop=("x",), logit_bias={1: 2.0})
    with pytest.raises(InvalidRequest, match="temperature"):
        params.temperature = 3.0
    assert params.temperature == 1.0
    with pytest.raises(AttributeError):
        params.no_such_field = 1


def test_what_was_set_goes_together_only_when_it_is_taken() -> None:
    params = SamplingParams(max_tokens=4)
    params.min_tokens = 6
    with pytest.raises(InvalidRequest, match="min_tokens"):
        params.clone()
    params.max_tokens = 8
    assert params.clone() == params


def test_a_clone_shares_nothing_that_could_change() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, extra_args={"a": [1]})
    own = params.clone()
    assert params.logit_bias is not None
    assert params.extra_args is not None
    params.logit_bias[1] = 5.0
    params.extra_args["a"].append(2)
    params.n = 3
    assert own == SamplingParams(logit_bias={1: 2.0}, extra_args={"a": [1]})


def test_none_means_the_default_where_it_is_no_value() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, stop=None, max_tokens=None, logit_bias={"7": 300})
    assert params == SamplingParams(max_tokens=None, logit_bias={7: 100.0})
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(TypeError):
        SamplingParams.from_optional(no_such_field=1)


def test_what_outputs_hold_travels_with_the_rest() -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
