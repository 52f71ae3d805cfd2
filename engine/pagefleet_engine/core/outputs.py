"""What the scheduler reports to the engine core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from pagefleet_protocol.kv_handoff import KvFault

from pagefleet_engine.core.request import FinishReason
from pagefleet_engine.core.step import FailureKind, TokenLogprobs


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
    kv_wait_s: float | None = None
    """With the first new token: seconds that the request was parked for K/V from elsewhere, if it was."""
    failure: FailureKind | None = None
    """With FinishReason.ERROR: why."""
    kv_fault: KvFault | None = None
    """With FailureKind.KV_LOAD_FAILED: whose doing it was, where that is known."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges, and totals since the start."""

    requests_running: int
    requests_waiting: int
    kv_usage: float
    """Share of blocks held by requests, 0 to 1."""
    prefix_cache_queries_tokens: int
    """Prompt tokens, and resumed ones, of admitted requests that were looked up."""
    prefix_cache_hits_tokens: int
    """Of those, found."""
    preemptions: int
    steps: int
    nan_requests: int
    """Requests ended because the model's output for them was not a number."""
