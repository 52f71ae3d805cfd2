"""The chat and completions bodies as read. What they refuse is tested over HTTP, in tests/engine/server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.conversation import ROLES
from pagefleet_protocol.openai_chat import read_chat_request
from pagefleet_protocol.openai_common import REFUSED, StreamOptions, usage
from pagefleet_protocol.openai_completions import read_completion_request
from pagefleet_protocol.openai_json import InvalidRequest
from pagefleet_protocol.sampling_params import SamplingParams

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    "model", "messages", "prompt", "n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed",
    "max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias",
    "allowed_token_ids", "bad_words", "stream", "stream_options", "echo", "user", "priority", "cache_salt", "suffix",
    "best_of", "tool_choice", "response_format", "modalities", "add_special_tokens", "ignore_eos", *REFUSED,
]  # fmt: skip


def outcome(read: Callable[[Any], Any], body: Any) -> tuple[Any, InvalidRequest | None]:
    try:
        return read(body), None
    except InvalidRequest as error:
        return None, error


def test_defaults() -> None:
    chat = read_chat_request(CHAT)
    assert (chat.stream, chat.conversation.add_generation_prompt) == (False, True)
    assert chat.sampling == SamplingParams(max_tokens=None)
    completion = read_completion_request(COMPLETION)
    assert (completion.sampling, completion.prompts, completion.echo) == (SamplingParams(), ("hi",), False)
    assert completion.add_special_tokens


def test_both_bodies_read_the_same_sampling_fields() -> None:
    fields = {
        "n": 2, "temperature": 1, "top_p": 0.5, "top_k": -1, "min_p": 0.25, "presence_penalty": -2, "seed": -5,
        "frequency_penalty": 2, "repetition_penalty": 1.5, "stop": "end", "stop_token_ids": [1], "min_tokens": 3,
        "logit_bias": {"7": 100, "8": -100.0}, "allowed_token_ids": [1, 2], "bad_words": ["x"], "ignore_eos": True,
        "include_stop_str_in_output": True, "prompt_logprobs": 2, "skip_special_tokens": False, "vllm_xargs": {"a": 1},
    }  # fmt: skip
    sampling = read_chat_request({**CHAT, **fields}).sampling
    completion = read_completion_request({**COMPLETION, **fields}).sampling
    assert sampling == msgspec.structs.replace(completion, max_tokens=None)
    read = msgspec.structs.asdict(sampling)
    other = {"max_tokens", "logprobs", "detokenize", "bad_words_token_ids", "structured_outputs", "thinking"} | {
        "logits_processors",
        "output_kind",
    }
    assert set(read) - other == (set(fields) - {"vllm_xargs"}) | {"extra_args"}, (
        "a field is read from nowhere, or not tested here"
    )
    assert (read["stop"], read["logit_bias"], read["temperature"]) == (("end",), {7: 100.0, 8: -100.0}, 1.0)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ([0], ((0,),)),
    ],
)
def test_the_four_kinds_of_prompt(prompt: Any, read: tuple[Any, ...]) -> None:
    assert read_completion_request({**COMPLETION, "prompt": prompt}).prompts == read


@pytest.mark.parametrize("role", ROLES)
def test_every_role(role: str) -> None:
    message = {"role": role, "content": "x", "name": "n", "tool_call_id": "t"}
    (read,) = read_chat_request({**CHAT, "messages": [message]}).messages
    assert (read.role, read.content, read.name, read.tool_call_id) == (role, "x", "n", "t")


def test_parts_are_joined_and_tool_calls_kept() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": ""},
    ]
    parts, calls, empty = read_chat_request({**CHAT, "messages": messages}).messages
    assert parts.content == "a\n"
    assert (calls.content, calls.tool_calls) == (None, (call,))
    assert empty.content == ""


def test_the_newer_token_limit_wins() -> None:
    assert read_chat_request({**CHAT, "max_tokens": 5, "max_completion_tokens": 7}).sampling.max_tokens == 7
    assert read_chat_request({**CHAT, "max_tokens": 5, "max_completion_tokens": None}).sampling.max_tokens == 5


def test_stream_options() -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert read_chat_request(body).stream_options == StreamOptions(include_usage=True)
    assert read_completion_request({**COMPLETION, "stream": True}).stream_options == StreamOptions()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields_say_what_to_do_instead(name: str) -> None:
    for read, body in ((read_chat_request, CHAT), (read_completion_request, COMPLETION)):
        with pytest.raises(InvalidRequest, match="not supported") as caught:
            read({**body, name: [1]})
        assert caught.value.param == name
        assert caught.value.message.endswith(REFUSED[name])
        assert read({**body, name: None}).model == "m"


def test_unknown_fields_are_reported() -> None:
    assert read_chat_request({**CHAT, "metadata": {}, "x": 1, "y": None}).ignored == ("x",)
    assert read_completion_request({**COMPLETION, "x": 0}).ignored == ("x",)


@given(fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_any_value_in_any_field_is_read_or_refused(fields: dict[str, Any]) -> None:
    for read, body in ((read_chat_request, CHAT), (read_completion_request, COMPLETION)):
        request, error = outcome(read, {**body, **fields})
        assert error.message if error else isinstance(request.stream, bool)


@given(messages=st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), VALUES)))
def test_any_messages_are_read_or_refused_by_path(messages: list[Any]) -> None:
    request, error = outcome(read_chat_request, {**CHAT, "messages": messages})
    if error is None:
        assert len(request.messages) == len(messages) > 0
    else:
        assert (error.param or "").startswith("messages")


def test_usage_adds_up() -> None:
    assert msgspec.to_builtins(usage(5, 7, 3)) == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
