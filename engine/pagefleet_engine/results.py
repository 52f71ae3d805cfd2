"""What offline use returns: the shapes that scripts for vLLM expect, and how they grow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet_protocol.sampling_params import RequestOutputKind, SamplingParams
from pagefleet_text.tokenizer import Tokenizer

from pagefleet_engine.engine_core.messages import WireLogprobs
from pagefleet_engine.engine_core.output_text import Chunk, merge_chunks


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position."""

    logprob: float
    rank: int
    """1 is the most likely."""
    decoded_token: str | None
    """None without a tokenizer."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a prompt's `n` outputs."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum over all tokens so far, in deltas too, where log-probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None
    """Per token: id -> candidate, the sampled one first."""
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestStateStats:
    """When a request was where, by vLLM's names."""

    arrival_time: float
    """Seconds since the epoch. All others are of this machine's monotonic clock, 0 before they are known."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """When it first ran."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """Seconds from its arrival to its first token."""
    num_generation_tokens: int = 0
    """Over all outputs."""


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its outputs."""

    request_id: str
    prompt: str | None
    """Text of the prompt, for a conversation with its template; None where only token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """Per prompt token; the first has none."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None
    metrics: RequestStateStats | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search."""

    tokens: list[int]
    """The prompt's, then the answer's."""
    cum_logprob: float
    """Of the answer."""
    text: str | None
    finish_reason: str
    """`stop` or `length`."""


@dataclass(slots=True)
class BeamSearchOutput:
    """One prompt's answers, the best first."""

    sequences: list[BeamSearchSequence]


def candidates(entry: WireLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return one position's candidates: the chosen token with its own rank, the others as they rank from 1."""
    found: dict[int, Logprob] = {}
    for place, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        rank = entry.rank if place == 0 else place
        found.setdefault(token_id, Logprob(logprob, rank, tokenizer.token_text(token_id) if tokenizer else None))
    return found


def all_candidates(
    entries: Sequence[WireLogprobs] | None, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]] | None:
    """Return the candidates of several positions; None stays None."""
    return None if entries is None else [candidates(entry, tokenizer) for entry in entries]


@dataclass(slots=True)
class GrowingRequest:
    """One prompt and the chunks of its outputs, as they come."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    """Seconds since the epoch."""
    arrived_at: float = field(default_factory=time.monotonic)
    chunks: list[list[Chunk]] = field(init=False)
    """Per output, those that were not shown, or all where outputs show all."""
    logprob_sums: list[float] = field(init=False)
    """Per output, over its tokens so far; 0 where no log-probabilities were asked for."""
    num_open: int = field(init=False)
    metrics: RequestStateStats = field(init=False)
    num_cached_tokens: int | None = field(init=False, default=None)
    _fresh: set[int] = field(init=False, default_factory=set)
    """Outputs with something new since the last look."""

    def __post_init__(self) -> None:
        self.chunks = [[] for _ in range(self.sampling.n)]
        self.logprob_sums = [0.0] * self.sampling.n
        self.num_open = self.sampling.n
        self.metrics = RequestStateStats(self.arrival_time)

    @property
    def is_finished(self) -> bool:
        """Whether all outputs have ended."""
        return self.num_open == 0

    def take(self, index: int, chunk: Chunk) -> None:
        """Take the next chunk of an output."""
        self.chunks[index].append(chunk)
        self._fresh.add(index)
        if chunk.logprobs:
            self.logprob_sums[index] += sum(entry.logprobs[0] for entry in chunk.logprobs)
        if chunk.finish_reason is not None:
            self.num_open -= 1
        metrics = self.metrics
        if chunk.token_ids:
            metrics.last_token_ts = time.monotonic()
            metrics.num_generation_tokens += len(chunk.token_ids)
        if chunk.num_cached_tokens is not None and self.num_cached_tokens is None:
            self._begin(chunk, chunk.num_cached_tokens)

    def _begin(self, chunk: Chunk, num_cached_tokens: int) -> None:
        """Note what comes with the first token of all outputs."""
        metrics = self.metrics
        self.num_cached_tokens = num_cached_tokens
        metrics.first_token_ts = metrics.last_token_ts or time.monotonic()
        metrics.first_token_latency = metrics.first_token_ts - self.arrived_at
        if chunk.waits is not None:
            metrics.queued_ts, metrics.scheduled_ts = chunk.waits.queued_at, chunk.waits.scheduled_at

    def show(self, tokenizer: Tokenizer | None) -> RequestOutput | None:
        """Return what the request's `output_kind` shows now; None for nothing."""
        kind = self.sampling.output_kind
        if kind == RequestOutputKind.DELTA:
            fresh, self._fresh = sorted(self._fresh), set()
            return self._output(fresh, tokenizer, is_delta=True)
        if kind == RequestOutputKind.FINAL_ONLY and not self.is_finished:
            return None
        return self.whole(tokenizer)

    def whole(self, tokenizer: Tokenizer | None) -> RequestOutput:
        """Return all so far."""
        return self._output(range(len(self.chunks)), tokenizer, is_delta=False)

    def _output(self, indexes: Sequence[int], tokenizer: Tokenizer | None, is_delta: bool) -> RequestOutput:
        shown = [(index, merge_chunks(self.chunks[index])) for index in indexes if self.chunks[index]]
        for index, chunk in shown:
            self.chunks[index] = [] if is_delta else [chunk]
        prompt_logprobs = None
        if self.sampling.prompt_logprobs is not None and not (is_delta and shown[0][1].prompt_logprobs is None):
            prompt_logprobs = [None, *(all_candidates(shown[0][1].prompt_logprobs, tokenizer) or [])]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            prompt_logprobs,
            [completion(index, chunk, self.logprob_sums[index], tokenizer) for index, chunk in shown],
            self.is_finished,
            self.num_cached_tokens,
            self.metrics,
        )


def completion(index: int, chunk: Chunk, logprob_sum: float, tokenizer: Tokenizer | None) -> CompletionOutput:
    """Return the output number `index` as a chunk has it; `logprob_sum` is over all tokens up to its end."""
    entries = chunk.logprobs
    return CompletionOutput(
        index,
        chunk.text,
        list(chunk.token_ids),
        None if entries is None else logprob_sum,
        all_candidates(entries, tokenizer),
        chunk.finish_reason,
        chunk.stop_reason,
    )
