"""From the messages of a chat request to what chat templates expect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from pagefleet_protocol.openai_chat import Message
from pagefleet_protocol.openai_json import InvalidRequest, decode_object


def for_template(message: Message) -> dict[str, Any]:
    """Return a message as the template sees it: a developer's is a system message, content is text at least."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    if message.role == "developer":
        fields["role"] = "system"
    fields.setdefault("content", "")
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _parsed(call["function"]["arguments"])
    return fields


def written(messages: Iterable[Message]) -> str:
    """Return all that a client wrote into messages, whatever the template makes of it."""
    return "".join(map(_text_of, messages))


def _text_of(message: Message) -> str:
    calls = [part for call in message.tool_calls for part in call["function"].values()]
    return "".join([message.content or "", message.name or "", *calls])


def _parsed(arguments: str) -> Any:
    """Return the object that a tool call's arguments spell, as templates expect it; what is no JSON stays text."""
    try:
        return decode_object(arguments.encode())
    except (InvalidRequest, UnicodeEncodeError):
        return arguments
