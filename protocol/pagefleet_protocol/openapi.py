"""The description of our HTTP API that `/openapi.json` has, made of what the code checks and answers.

Answers are msgspec types, which describe themselves. Bodies are read by functions: which fields a function reads is
seen by letting it read, and what a field may be by what it says to one value of each JSON type. So nothing is written
twice, and nothing here can be out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pagefleet_protocol.anthropic_messages import read_count_request, read_messages_request
from pagefleet_protocol.console_state import STATE_PATH, ConsoleState
from pagefleet_protocol.errors import ErrorEnvelope
from pagefleet_protocol.openai_chat import ChatCompletion, read_chat_request
from pagefleet_protocol.openai_common import ModelCard, ModelList
from pagefleet_protocol.openai_completions import Completion, read_completion_request
from pagefleet_protocol.openai_json import InvalidRequest
from pagefleet_protocol.openai_responses import read_responses_request
from pagefleet_protocol.version import VERSION

OPENAPI_PATH = "/openapi.json"
Reader = Callable[[Mapping[str, Any]], object]
_REF = "#/components/schemas/{name}"
_SAMPLES: Mapping[str, object] = {
    "boolean": True, "integer": 1, "number": 0.5, "string": "a", "array": [], "object": {},
}  # fmt: skip
"""One value of each JSON type."""
_BOUND = re.compile(r"(>=|<=) (-?[0-9]+)")
_FAR = 2**80
_TURN = [{"role": "user", "content": "a"}]


@dataclass(frozen=True, slots=True)
class _Call:
    """One route: what it is for, what it reads, what it answers."""

    path: str
    summary: str
    answer: type | None = None
    """None: an object that is not described."""
    read: Reader | None = None
    """None: a GET."""
    least: Mapping[str, Any] | None = None
    """The smallest body that `read` takes."""


_CALLS = (
    _Call("/v1/models", "The served models.", ModelList),
    _Call("/v1/models/{model}", "One of them.", ModelCard),
    _Call(
        "/v1/chat/completions", "Go on with a conversation.", ChatCompletion, read_chat_request,
        {"model": "a", "messages": _TURN},
    ),
    _Call("/v1/completions", "Go on with a text.", Completion, read_completion_request, {"model": "a", "prompt": "a"}),
    _Call("/v1/responses", "OpenAI's Responses.", None, read_responses_request, {"model": "a", "input": "a"}),
    _Call(
        "/v1/messages", "Anthropic's Messages.", None, read_messages_request,
        {"model": "a", "messages": _TURN, "max_tokens": 1},
    ),
    _Call(
        "/v1/messages/count_tokens", "Tokens of such a request.", None, read_count_request,
        {"model": "a", "messages": _TURN},
    ),
    _Call(STATE_PATH, "What the console shows.", ConsoleState),
)  # fmt: skip


def openapi_document() -> bytes:
    """Return it as JSON. Making it takes some milliseconds."""
    types = [ErrorEnvelope, *(call.answer for call in _CALLS if call.answer is not None)]
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    bodies = {
        _body_name(call): body_schema(call.read, call.least)
        for call in _CALLS
        if call.read is not None and call.least is not None
    }
    key = {"type": "http", "scheme": "bearer"}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "pagefleet", "version": VERSION},
        "paths": {call.path: {"get" if call.read is None else "post": _operation(call)} for call in _CALLS},
        "components": {"schemas": components | bodies, "securitySchemes": {"key": key}},
        "security": [{"key": []}, {}],
    }
    return msgspec.json.encode(document)


def body_schema(read: Reader, least: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of the bodies that a function reads.

    Args:
        read: raises InvalidRequest.
        least: the smallest body that it takes.
    """
    asked = _Asked(least)
    read(asked)
    fields = {name: _field(read, least, name) for name in sorted(asked.names)}
    return {
        "type": "object",
        "properties": {name: schema for name, schema in fields.items() if schema is not None},
        "required": sorted(name for name in least if _refusal(read, {k: v for k, v in least.items() if k != name})),
    }


class _Asked(dict[str, Any]):
    """A body that remembers which fields it was asked for."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(body)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None, /) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _field(read: Reader, least: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return what a field may be; None: it is refused, whatever it is."""
    refusals = {kind: _refusal(read, {**least, name: value}) for kind, value in _SAMPLES.items()}
    if all(one is not None and one.code == "unsupported_parameter" for one in refusals.values()):
        return None
    kinds = [kind for kind, one in refusals.items() if not (one and one.code == "invalid_type" and one.param == name)]
    if "number" in kinds and "integer" in kinds:
        kinds.remove("integer")
    if len(kinds) in (0, len(_SAMPLES) - 1):
        return {}
    schema: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds}
    if kinds == ["integer"]:
        for value in (-_FAR, _FAR):
            refusal = _refusal(read, {**least, name: value})
            if refusal is not None and (found := _BOUND.search(refusal.message)):
                schema["minimum" if found[1] == ">=" else "maximum"] = int(found[2])
    return schema


def _refusal(read: Reader, body: Mapping[str, Any]) -> InvalidRequest | None:
    try:
        read(body)
    except InvalidRequest as error:
        return error
    return None


def _body_name(call: _Call) -> str:
    return f"Body of {call.path}".replace("/", "_").replace(" ", "_")


def _operation(call: _Call) -> dict[str, Any]:
    answer = {"type": "object"} if call.answer is None else {"$ref": _REF.format(name=call.answer.__name__)}
    error = {"$ref": _REF.format(name=ErrorEnvelope.__name__)}
    operation: dict[str, Any] = {
        "summary": call.summary,
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": answer}}},
            "default": {"description": "An error.", "content": {"application/json": {"schema": error}}},
        },
    }
    if call.read is not None:
        content = {"application/json": {"schema": {"$ref": _REF.format(name=_body_name(call))}}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{model}" in call.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
