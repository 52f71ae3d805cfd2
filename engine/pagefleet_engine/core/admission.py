"""Who may enter the queue: limits of the model and of the engine, checked here again whatever the API has checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.request import Request
from pagefleet_engine.errors import ContextTooLong, InvalidRequest, QueueFull

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model can take."""

    max_model_len: int
    """Prompt and output tokens together."""
    vocab_size: int


def check_request(request: Request, limits: ModelLimits, capacity_tokens: int) -> None:
    """Refuse what can never run: no prompt, one too long for context or KV pool, token ids outside the vocabulary.

    Raises:
        ContextTooLong: the prompt leaves no room for an output token.
        InvalidRequest: anything else, with the field's name.
    """
    num_tokens = request.num_prompt_tokens
    if num_tokens == 0:
        raise InvalidRequest("the prompt has no tokens: give at least one.", "prompt", "invalid_value")
    if num_tokens >= limits.max_model_len:
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens and the context is {limits.max_model_len} with at least one for the "
            "output: shorten the prompt.",
            "prompt",
        )
    if num_tokens >= capacity_tokens:
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens and the KV cache holds {capacity_tokens}, prompt and output together: "
            "shorten the prompt, or give the engine more with num_kv_blocks or kv_cache_memory.",
            "prompt",
        )
    sampling = request.sampling
    if request.num_output_tokens:
        _check_token_ids("resumed_token_ids", request.token_ids[num_tokens:], limits.vocab_size)
    _check_token_ids("prompt", request.token_ids, limits.vocab_size)
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    _check_token_ids("allowed_token_ids", sampling.allowed_token_ids or (), limits.vocab_size)
    _check_token_ids("logit_bias", sampling.logit_bias or (), limits.vocab_size)
    for word in sampling.bad_words_token_ids:
        _check_token_ids("bad_words_token_ids", word, limits.vocab_size)


def _check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(
            f"'{param}' has token id {wrong}: the model's are 0 to {vocab_size - 1}.", param, "invalid_value"
        )


class QueueGate:
    """Bounds the queue, and tells those it turns away when to come back.

    The estimate: each request that is admitted shows how long it waited and how many tokens it had before it. The
    smoothed ratio, times the tokens queued now, is what a newcomer would wait. It follows from whatever slows the
    queue (seats, memory, compute) without a model of any of them.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._max_requests = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._clock = clock
        self._seconds_per_token = 0.0
        self.num_requests = 0
        self.num_tokens = 0

    def check(self, request: Request) -> None:
        """Refuse a request for which there is no place; an empty queue takes a request of any length.

        Raises:
            QueueFull: with an estimate of when there will be one.
        """
        if self.num_requests >= self._max_requests:
            raise QueueFull(f"{self.num_requests} requests are waiting: try again later.", self.estimate_wait())
        num_tokens = self.num_tokens + request.num_tokens
        if self._max_tokens is not None and self.num_requests > 0 and num_tokens > self._max_tokens:
            raise QueueFull(f"{self.num_tokens} prompt tokens are waiting: try again later.", self.estimate_wait())

    def arrive(self, request: Request) -> None:
        """Count a new request in."""
        self.enter(request)
        request.queued_at = self._clock()
        request.queued_tokens_ahead = self.num_tokens

    def enter(self, request: Request) -> None:
        """Count a request in."""
        self.num_requests += 1
        self.num_tokens += request.num_tokens

    def leave(self, request: Request) -> None:
        """Count a request out. Its tokens do not change while it waits."""
        self.num_requests -= 1
        self.num_tokens -= request.num_tokens

    def observe_wait(self, request: Request) -> None:
        """Learn from a request's first admission."""
        seconds_per_token = (self._clock() - request.queued_at) / request.queued_tokens_ahead
        self._seconds_per_token += _SMOOTHING * (seconds_per_token - self._seconds_per_token)

    def estimate_wait(self) -> float:
        """Seconds that a newcomer would wait, between 1 and 60."""
        return min(max(self.num_tokens * self._seconds_per_token, MIN_RETRY_S), MAX_RETRY_S)
