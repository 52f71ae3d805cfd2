"""The content of a message: parts of an answer become blocks, and the events that tell of them as they grow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from pagefleet_engine.parsers.parts import CallArguments, CallBegins, Content, Part, Reasoning

Event = dict[str, Any]
"""`type` comes first."""


class Blocks:
    """The blocks of one message.

    Args:
        number: of the message: the ids of its calls are made of it, so that whoever goes on with it gives the same.
        shows_thinking: whether blocks of thoughts have their text.
    """

    def __init__(self, number: str, shows_thinking: bool = True) -> None:
        self._number = number
        self._shows_thinking = shows_thinking
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []

    @property
    def content(self) -> list[dict[str, Any]]:
        """The blocks that are complete."""
        return list(self._done)

    def take(self, part: Part) -> Iterator[Event]:
        """Add a part; yield what it changes."""
        match part:
            case Reasoning():
                yield from self._grow({"type": "thinking", "thinking": "", "signature": ""}, part.text)
            case Content():
                yield from self._grow({"type": "text", "text": "", "citations": None}, part.text)
            case CallBegins():
                call_id = f"toolu_{self._number}{part.index:04x}"
                yield from self._begin({"type": "tool_use", "id": call_id, "name": part.name, "input": {}})
            case CallArguments():
                self._texts.append(part.text)
                yield self._delta({"type": "input_json_delta", "partial_json": part.text})

    def finish(self) -> Iterator[Event]:
        """End the block that grows; a message without any has one empty text."""
        if self._open is None and not self._done:
            yield from self._begin({"type": "text", "text": "", "citations": None})
        yield from self._end()

    def _grow(self, empty: dict[str, Any], text: str) -> Iterator[Event]:
        kind = empty["type"]
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(empty)
        self._texts.append(text)
        if kind == "text":
            yield self._delta({"type": "text_delta", "text": text})
        elif self._shows_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._end()
        self._open = block
        yield {"type": "content_block_start", "index": len(self._done), "content_block": dict(block)}

    def _end(self) -> Iterator[Event]:
        block, text = self._open, "".join(self._texts)
        if block is None:
            return
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        elif block["type"] == "text":
            block["text"] = text
        else:
            block["thinking"] = text if self._shows_thinking else ""
            block["signature"] = hashlib.sha256(text.encode()).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self._done)}
        self._done.append(block)
        self._open, self._texts = None, []

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._done), "delta": delta}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of one that was cut off there are none that could be told."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
