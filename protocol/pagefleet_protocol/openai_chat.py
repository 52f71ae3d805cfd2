"""Bodies of `/v1/chat/completions`: the request as read and checked, the whole answer, the stream's chunks.

Source: OpenAI API reference, "Chat". Content is text only; tools, audio and structured output are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pagefleet_protocol.openai_common import (
    TEXT_FORMAT_ONLY,
    CommonFields,
    Usage,
    open_body,
    read_common,
    unsupported,
)
from pagefleet_protocol.openai_json import Fields, InvalidRequest, checked_string, shown, wrong_type
from pagefleet_protocol.sampling_params import MAX_LOGPROBS, MAX_TOKENS

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128
MAX_NAME_CHARS = 256
MAX_CONTENT_CHARS = 2**31 - 1
"""Of one text; what really bounds it are the body's size and the context."""

ROLES = ("system", "developer", "user", "assistant", "tool")


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of the conversation; content parts of type text are joined by line feeds."""

    role: str
    """One of ROLES."""
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Of an earlier assistant turn, as given; `arguments` stays text, whatever it holds."""


class ChatRequest(CommonFields, frozen=True, kw_only=True):
    """A checked request."""

    messages: tuple[Message, ...]
    max_tokens_param: str = "max_tokens"
    """Which field gave `sampling.max_tokens`: `max_completion_tokens` wins."""
    add_generation_prompt: bool = True


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token, its log-probability and its UTF-8 bytes (a token may be part of a character)."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """One output token with the most likely alternatives at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs`."""

    content: list[ChatLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    """`choices[].message`."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of `n`. `stop_reason` (vLLM) is the stop string or token id that ended it."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: list[dict[str, Any] | None] | None = None


def read_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Check a decoded body.

    Raises:
        InvalidRequest: the first thing wrong with it, by the order of the fields here.
    """
    fields, model = open_body(body)
    _refuse_modes(fields)
    messages = read_messages(fields)
    newer = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    older = fields.integer("max_tokens", 1, MAX_TOKENS)
    wants_logprobs = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wants_logprobs:
        message = "'top_logprobs' is only allowed with 'logprobs': true."
        raise InvalidRequest(message, "top_logprobs", "invalid_value")
    return ChatRequest(
        model=model,
        messages=messages,
        max_tokens_param="max_tokens" if newer is None else "max_completion_tokens",
        add_generation_prompt=fields.boolean("add_generation_prompt") is not False,
        **read_common(fields, older if newer is None else newer, (top or 0) if wants_logprobs else None),
    )


def _refuse_modes(fields: Fields) -> None:
    choice = fields.raw("tool_choice")
    if choice not in (None, "none"):
        raise unsupported("tool_choice", 'Tool calling is not supported yet; only "none" is accepted.')
    fields.boolean("parallel_tool_calls")
    response_format = fields.object("response_format")
    if response_format is not None and response_format.get("type") != "text":
        raise unsupported("response_format", TEXT_FORMAT_ONLY)
    modalities = fields.array("modalities", 8)
    if modalities is not None and modalities != ["text"]:
        raise unsupported("modalities", 'Only ["text"] is accepted.')
    if fields.boolean("continue_final_message"):
        raise unsupported("continue_final_message", "Send the text so far to /v1/completions.")


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """Read `messages`, of any body that has them."""
    messages = fields.array("messages", MAX_MESSAGES, min_items=1)
    if messages is None:
        raise fields.missing("messages")
    return tuple(_read_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _read_message(message: object, path: str) -> Message:
    if not isinstance(message, dict):
        raise wrong_type(path, "an object", message)
    fields = Fields(message, path + ".")
    role = _read_role(fields)
    tool_calls = _read_tool_calls(fields) if role == "assistant" else ()
    content = _read_content(fields)
    if content is None and not tool_calls:
        raise fields.missing("content")
    tool_call_id = fields.string("tool_call_id", MAX_NAME_CHARS, min_chars=1)
    if role == "tool" and tool_call_id is None:
        raise fields.missing("tool_call_id")
    return Message(
        role=role,
        content=content,
        name=fields.string("name", MAX_NAME_CHARS),
        tool_call_id=tool_call_id,
        tool_calls=tool_calls,
    )


def _read_role(fields: Fields) -> str:
    role = fields.string("role", MAX_CONTENT_CHARS)
    if role is None:
        raise fields.missing("role")
    if role not in ROLES:
        allowed = ", ".join(f"'{known}'" for known in ROLES)
        message = f"Invalid value: {shown(role)}. Supported values are: {allowed}."
        raise InvalidRequest(message, fields.path("role"), "invalid_value")
    return role


def _read_content(fields: Fields) -> str | None:
    content = fields.raw("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(fields.path("content"), "a string or an array of parts", content)
    parts = fields.array("content", MAX_PARTS, min_items=1) or []
    return "\n".join(_read_part(part, f"{fields.path('content')}[{i}]") for i, part in enumerate(parts))


def _read_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object", part)
    fields = Fields(part, path + ".")
    kind = fields.string("type", MAX_CONTENT_CHARS)
    if kind is None:
        raise fields.missing("type")
    if kind != "text":
        message = f"Invalid value: {shown(kind)}. This model reads text only; supported values are: 'text'."
        raise InvalidRequest(message, fields.path("type"), "invalid_value")
    text = fields.string("text", MAX_CONTENT_CHARS)
    if text is None:
        raise fields.missing("text")
    return text


def _read_tool_calls(fields: Fields) -> tuple[dict[str, Any], ...]:
    calls = fields.array("tool_calls", MAX_TOOL_CALLS)
    read = []
    for i, call in enumerate(calls or ()):
        path = f"{fields.path('tool_calls')}[{i}]"
        if not isinstance(call, dict):
            raise wrong_type(path, "an object", call)
        outer = Fields(call, path + ".")
        function = outer.object("function")
        if function is None:
            raise outer.missing("function")
        inner = Fields(function, path + ".function.")
        named = {
            "name": checked_string(inner.raw("name"), inner.path("name"), MAX_NAME_CHARS, 1),
            "arguments": checked_string(inner.raw("arguments"), inner.path("arguments"), MAX_CONTENT_CHARS),
        }
        read.append({"id": outer.string("id", MAX_NAME_CHARS), "type": "function", "function": named})
    return tuple(read)
