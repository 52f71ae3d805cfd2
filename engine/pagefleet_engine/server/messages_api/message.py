"""A message as clients get it, and the script that writes one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pagefleet_protocol.openai_common import Usage

from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.parsers.parts import Part
from pagefleet_engine.server.answer_script import AnswerScript, Event
from pagefleet_engine.server.messages_api.blocks import Blocks

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "max_tokens"}


class MessageScript(AnswerScript):
    """Writes one message.

    Args:
        number: 32 hexadecimal digits, of which its ids are made.
        model: as the client called it.
        stop_sequences: as the client gave them.
        shows_thinking: whether blocks of thoughts have their text.
    """

    def __init__(self, number: str, model: str, stop_sequences: Sequence[str], shows_thinking: bool) -> None:
        super().__init__()
        self._message: dict[str, Any] = {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._stop_sequences = stop_sequences
        self._blocks = Blocks(number, shows_thinking)

    def opening(self, usage: Usage) -> Iterator[Event]:
        """See AnswerScript."""
        yield {"type": "message_start", "message": {**self._message, "usage": _usage(usage)}}

    def grow(self, parts: Sequence[Part], chunk: Chunk) -> Iterator[Event]:
        """See AnswerScript."""
        for part in parts:
            yield from self._blocks.take(part)

    def closing(self, reason: str, chunk: Chunk, usage: Usage) -> Iterator[Event]:
        """See AnswerScript."""
        yield from self._blocks.finish()
        stop = chunk.stop_reason if chunk.stop_reason in self._stop_sequences else None
        stop_reason = "stop_sequence" if stop is not None else _STOP_REASONS.get(reason, "end_turn")
        num_thought = usage.completion_tokens_details.reasoning_tokens
        counted = _usage(usage) | {"output_tokens_details": {"thinking_tokens": num_thought}}
        ending = {"stop_reason": stop_reason, "stop_sequence": stop}
        self._message |= {"content": self._blocks.content, "usage": counted, **ending}
        yield {"type": "message_delta", "delta": ending, "usage": counted}
        yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        """See AnswerScript."""
        return self._message


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's counts, of which the cached prompt tokens are apart from the others."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }
