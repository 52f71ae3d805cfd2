"""The output of a response: parts of an answer become items, and the events that tell of them as they grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagefleet_protocol.responses_items import sealed

from pagefleet_engine.parsers.parts import CallArguments, CallBegins, Content, Part, Reasoning

Event = dict[str, Any]
"""Without its sequence number; `type` comes first."""


@dataclass(slots=True)
class _Open:
    """The item that grows."""

    id: str
    kind: str
    """`reasoning`, `message` or `function_call`."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    name: str = ""
    call_id: str = ""

    def item(self, status: str, seals: bool) -> dict[str, Any]:
        """Return the item as it is now."""
        text = "".join(self.texts)
        shaped: dict[str, Any] = {"id": self.id, "type": self.kind}
        if self.kind == "function_call":
            return {**shaped, "call_id": self.call_id, "name": self.name, "arguments": text, "status": status}
        if self.kind == "message":
            content = [] if status == "in_progress" else [self.part()]
            return {**shaped, "role": "assistant", "content": content, "status": status}
        thought = [] if status == "in_progress" else [self.part()]
        shaped |= {"summary": [], "content": thought, "status": status}
        return {**shaped, "encrypted_content": sealed(text)} if seals and thought else shaped

    def part(self) -> dict[str, Any]:
        """Return its one content part, with its text so far."""
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}


class Output:
    """The items of one response.

    Args:
        number: of the response: the ids of its items are made of it, so that whoever goes on with it gives the same.
        seals: whether thoughts come in `encrypted_content` too.
    """

    def __init__(self, number: str, seals: bool = False) -> None:
        self._number = number
        self._seals = seals
        self._done: list[dict[str, Any]] = []
        self._open: _Open | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """Those that are complete."""
        return list(self._done)

    @property
    def text(self) -> str:
        """What the messages say."""
        return "".join(part["text"] for item in self._done if item["type"] == "message" for part in item["content"])

    def take(self, part: Part, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Add a part; yield what it changes. `logprobs` are of a piece of content."""
        match part:
            case Reasoning():
                yield from self._grow("reasoning", part.text, "response.reasoning_text.delta")
            case Content():
                yield from self._grow("message", part.text, "response.output_text.delta", logprobs)
            case CallBegins():
                yield from self._begin("function_call", part.name)
            case CallArguments():
                assert self._open is not None
                self._open.texts.append(part.text)
                yield self._event("response.function_call_arguments.delta", False, delta=part.text)

    def finish(self, status: str) -> Iterator[Event]:
        """End the item that grows; an answer without any is one empty message. `status`: completed or incomplete."""
        if self._open is None and not self._done:
            yield from self._begin("message")
        yield from self._end(status)

    def _grow(self, kind: str, text: str, event: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        grown = self._open
        assert grown is not None
        grown.texts.append(text)
        grown.logprobs += logprobs
        more = {"logprobs": list(logprobs)} if kind == "message" else {}
        yield {**self._event(event, delta=text), **more}

    def _begin(self, kind: str, name: str = "") -> Iterator[Event]:
        yield from self._end("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        index = len(self._done)
        opened = self._open = _Open(f"{prefix}_{self._number}{index:04x}", kind, name=name)
        if kind == "function_call":
            opened.call_id = f"call_{self._number}{index:04x}"
        item = opened.item("in_progress", self._seals)
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        if kind != "function_call":
            yield self._event("response.content_part.added", part=opened.part())

    def _end(self, status: str) -> Iterator[Event]:
        ended = self._open
        if ended is None:
            return
        text = "".join(ended.texts)
        if ended.kind == "function_call":
            yield self._event("response.function_call_arguments.done", False, name=ended.name, arguments=text)
        elif ended.kind == "message":
            yield self._event("response.output_text.done", text=text, logprobs=list(ended.logprobs))
        else:
            yield self._event("response.reasoning_text.done", text=text)
        if ended.kind != "function_call":
            yield self._event("response.content_part.done", part=ended.part())
        item = ended.item(status, self._seals)
        yield {"type": "response.output_item.done", "output_index": len(self._done), "item": item}
        self._done.append(item)
        self._open = None

    def _event(self, kind: str, has_content: bool = True, **fields: Any) -> Event:
        assert self._open is not None
        event: Event = {"type": kind, "item_id": self._open.id, "output_index": len(self._done)}
        if has_content:
            event["content_index"] = 0
        return {**event, **fields}
