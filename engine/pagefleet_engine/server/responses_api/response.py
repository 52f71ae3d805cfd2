"""A response as clients get it, and the script that writes one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet_protocol.openai_chat import ChatRequest
from pagefleet_protocol.openai_common import Usage
from pagefleet_protocol.openai_responses import ENCRYPTED, ResponsesRequest

from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.parsers.parts import Content, Part
from pagefleet_engine.server.answer_script import AnswerScript, Event
from pagefleet_engine.server.responses_api.output import Output

Logprobs = Callable[[Chunk], list[Any]]
"""Returns the log-probabilities of a chunk's tokens as they are told; nothing where they were not asked for."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What is known of a response before its answer."""

    number: str
    """32 hexadecimal digits: the name of its store, and more that nobody can guess."""
    created: int
    asked: ResponsesRequest
    chat: ChatRequest
    is_stored: bool

    @property
    def id(self) -> str:
        """What clients call it."""
        return f"resp_{self.number}"

    def response(self, status: str, output: Sequence[dict[str, Any]] = (), **more: Any) -> dict[str, Any]:
        """Return the response; `more`: usage, error, incomplete_details, completed_at."""
        asked, sampling = self.asked, self.chat.sampling
        text = asked.echo["text"] or {}
        reasoning = asked.echo["reasoning"] or {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": asked.background,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.chat.get("max_completion_tokens"),
            "max_tool_calls": asked.echo["max_tool_calls"],
            "metadata": asked.echo["metadata"],
            "model": asked.model,
            "output": list(output),
            "parallel_tool_calls": self.chat.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.echo["prompt_cache_key"],
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": asked.echo["safety_identifier"],
            "service_tier": "default",
            "store": self.is_stored,
            "temperature": sampling.temperature,
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": asked.echo["tool_choice"],
            "tools": asked.echo["tools"],
            "top_logprobs": sampling.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "auto" if asked.truncates else "disabled",
            "usage": None,
            "user": asked.echo["user"],
            **more,
        }


class ResponseScript(AnswerScript):
    """Writes one response.

    Args:
        head: of the response.
        logprobs: shapes those of a chunk.
    """

    def __init__(self, head: ResponseHead, logprobs: Logprobs) -> None:
        super().__init__()
        self.head = head
        self._logprobs = logprobs
        self._waiting: list[Any] = []
        """Log-probabilities of tokens that have shown no text yet."""
        self._output = Output(head.number, ENCRYPTED in head.asked.include)
        self._ended: dict[str, Any] | None = None
        self._usage: dict[str, Any] | None = None

    def opening(self, usage: Usage) -> Iterator[Event]:
        """See AnswerScript."""
        if not self.head.asked.background:  # else it was told before anything was generated
            yield {"type": "response.created", "response": self.head.response("in_progress")}
        yield {"type": "response.in_progress", "response": self.head.response("in_progress")}

    def grow(self, parts: Sequence[Part], chunk: Chunk) -> Iterator[Event]:
        """See AnswerScript. Log-probabilities go with the first content of their chunk, or of one after it."""
        self._waiting += self._logprobs(chunk)
        for part in parts:
            logprobs: list[Any] = []
            if type(part) is Content:
                logprobs, self._waiting = self._waiting, []
            yield from self._output.take(part, logprobs)
        if parts and type(parts[-1]) is not Content:
            self._waiting = []

    def closing(self, reason: str, chunk: Chunk, usage: Usage) -> Iterator[Event]:
        """See AnswerScript."""
        is_cut = reason not in ("stop", "tool_calls")
        status = "incomplete" if is_cut else "completed"
        self._usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }
        yield from self._output.finish(status)
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {"completed_at": int(time.time())}
        yield from self._end(status, **more)

    def broken(self, status: str, code: str | None = None, message: str = "") -> Iterator[Event]:
        """Yield the last event of a response that failed or was cancelled."""
        error = None if code is None else {"code": code, "message": message}
        yield from self._end(status, error=error)

    def so_far(self, status: str = "in_progress") -> dict[str, Any]:
        """Return the response while it runs."""
        return self.head.response(status, self._output.items)

    def whole(self) -> dict[str, Any]:
        """See AnswerScript."""
        assert self._ended is not None
        return self._ended

    def frame(self, event: Event) -> bytes:
        """Return an event as it is sent, with its number."""
        return super().frame({"type": event["type"], "sequence_number": self.num_events, **event})

    def _end(self, status: str, **more: Any) -> Iterator[Event]:
        self._ended = self.head.response(status, self._output.items, usage=self._usage, **more)
        yield {"type": f"response.{status}", "response": self._ended}
