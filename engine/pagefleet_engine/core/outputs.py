"""What the scheduler reports to the engine core, at once or when K/V is where it should be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from pagefleet_kv.port import AnswerDone
from pagefleet_protocol.kv_handoff import KvFault

from pagefleet_engine.config import MAX_STEP_TOKENS
from pagefleet_engine.core.prefix_lookups import PrefixLookups
from pagefleet_engine.core.request import FinishReason
from pagefleet_engine.core.step import FailureKind, TokenLogprobs
from pagefleet_engine.errors import InvalidRequest


class Waits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When a request was queued and when it first ran, in seconds of this machine's monotonic clock."""

    queued_at: float
    scheduled_at: float
    kv_s: float | None = None
    """Seconds that it was parked for K/V from elsewhere, if it was."""


class RequestUpdate(msgspec.Struct, frozen=True, gc=False):
    """What one step gave one request. A msgspec struct because one is made per running request and step."""

    request_id: str
    new_token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    """None while the request goes on."""
    stop_token_id: int | None = None
    """The stop token (not the end-of-text token) that ended it."""
    logprobs: Sequence[TokenLogprobs] | None = None
    """One entry per new token, where asked for."""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """The next prompt positions' entries, each position once."""
    num_cached_tokens: int | None = None
    """With the first new token: prompt tokens that came from the prefix cache."""
    waits: Waits | None = None
    """With the first new token."""
    failure: FailureKind | None = None
    """With FinishReason.ERROR: why."""
    kv_fault: KvFault | None = None
    """With FailureKind.KV_LOAD_FAILED: whose doing it was, where that is known."""
    form_complete: bool = False
    """With FinishReason.STOP: the last token is of the text, which has its form with it."""
    refusal: InvalidRequest | None = None
    """The request was wrong after all, as only its compiled form shows; nothing else is told."""


class StepSizes:
    """How many tokens the steps computed, as a histogram.

    Attributes:
        counts: of steps with more tokens than half a bucket's limit and no more than it; the limits are 1, 2, 4, 8, ...
        num_tokens: over all steps.
    """

    __slots__ = ("counts", "num_tokens")

    def __init__(self) -> None:
        self.counts = [0] * (MAX_STEP_TOKENS.bit_length())
        self.num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Count one step, if it has tokens."""
        if num_tokens:
            self.counts[(num_tokens - 1).bit_length()] += 1
            self.num_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges, and totals since the start."""

    requests_running: int
    requests_waiting: int
    kv_usage: float
    """Share of blocks held by requests, 0 to 1."""
    lookups: PrefixLookups
    """Prompt tokens, and resumed ones, that admitted requests looked up."""
    step_sizes: StepSizes
    preemptions: int
    steps: int
    nan_requests: int
    """Requests ended because the model's output for them was not a number."""
    form_requests: int
    """Requests that asked for a form."""
    forced_tokens: int
    """Output tokens that were not sampled, as their form left no other."""


class HeldAnswers:
    """By the numbers that the connector gave. A request whose answer is held has no blocks and is in no step."""

    def __init__(self) -> None:
        self._held: dict[int, RequestUpdate] = {}
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._numbers

    def hold(self, number: int, update: RequestUpdate) -> None:
        """Keep the last update of a request."""
        self._held[number] = update
        self._numbers[update.request_id] = number

    def drop(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        del self._held[self._numbers.pop(request_id)]

    def settle(self, done: Iterable[AnswerDone]) -> list[RequestUpdate]:
        """Return what can be told now: the answer as it was, or an error. Numbers that were dropped are ignored."""
        told = []
        for answer in done:
            update = self._held.pop(answer.number, None)
            if update is None:
                continue
            del self._numbers[update.request_id]
            if answer.failure is not None:
                kind = FailureKind.KV_SEND_FAILED
                update = RequestUpdate(update.request_id, (), FinishReason.ERROR, failure=kind)
            told.append(update)
        return told
