"""What may run and who may enter the queue: limits of the model and of the engine.

The API checks a request by these functions, once and off its event loop; the core checks it by them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pagefleet_protocol.openai_json import checked_integer
from pagefleet_protocol.sampling_params import MAX_LOGPROBS, SamplingParams

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
    max_logprobs: int = MAX_LOGPROBS
    """Alternatives per token; -1: as many as there are."""


def check_prompt(token_ids: Sequence[int], limits: ModelLimits, param: str = "prompt") -> None:
    """Refuse a prompt that can never run; one that fits leaves room for a token of output.

    Raises:
        ContextTooLong: it is too long for the context.
        InvalidRequest: it is empty, or has a token id outside the vocabulary.
    """
    if not token_ids:
        raise InvalidRequest("The prompt has no tokens: give at least one.", param, "empty_prompt")
    if len(token_ids) >= limits.max_model_len:
        raise ContextTooLong(
            f"This model's context is {limits.max_model_len} tokens, one of them at least for the answer; the prompt "
            f"has {len(token_ids)}. Shorten it.",
            param,
        )
    check_token_ids(token_ids, limits, param)


def check_token_ids(token_ids: Collection[int], limits: ModelLimits, param: str) -> None:
    """Refuse what is no token id of the model. A bool is an integer in Python, and as a token a mistake.

    Raises:
        InvalidRequest: `param` has such a one.
    """
    if not token_ids:
        return
    if not set(map(type, token_ids)) <= {int}:
        raise InvalidRequest(f"Invalid '{param}': token ids are integers.", param, "invalid_type")
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(
            f"Invalid '{param}': token id {str(wrong)[:24]} is outside the vocabulary of {limits.vocab_size} tokens.",
            param,
            "token_id_out_of_range",
        )


def check_sampling(sampling: SamplingParams, limits: ModelLimits) -> None:
    """Refuse parameters with token ids outside the vocabulary, or too many alternatives per token.

    Raises:
        InvalidRequest: with the field's name.
    """
    most = limits.vocab_size if limits.max_logprobs < 0 else limits.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        checked_integer(getattr(sampling, name) or 0, name, 0, most)
    check_token_ids(sampling.stop_token_ids, limits, "stop_token_ids")
    check_token_ids(sampling.allowed_token_ids or (), limits, "allowed_token_ids")
    check_token_ids(sampling.logit_bias or (), limits, "logit_bias")
    for word in sampling.bad_words_token_ids:
        check_token_ids(word, limits, "bad_words_token_ids")


def fitting_max_tokens(
    asked: int | None, num_prompt_tokens: int, limits: ModelLimits, param: str = "max_tokens"
) -> int:
    """Return how many tokens a prompt's output may have: `asked`, or what is left of the context where None.

    Raises:
        ContextTooLong: the prompt and what is asked for do not fit together.
    """
    left = limits.max_model_len - num_prompt_tokens
    if asked is None:
        return left
    if asked > left:
        raise ContextTooLong(
            f"This model's context is {limits.max_model_len} tokens; the prompt has {num_prompt_tokens}, so '{param}' "
            f"can be {left} at most, but is {asked}.",
            param,
        )
    return asked


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
        """Note a request's first admission, and learn from it."""
        request.scheduled_at = self._clock()
        seconds_per_token = (request.scheduled_at - request.queued_at) / request.queued_tokens_ahead
        self._seconds_per_token += _SMOOTHING * (seconds_per_token - self._seconds_per_token)

    def estimate_wait(self) -> float:
        """Seconds that a newcomer would wait, between 1 and 60."""
        return min(max(self.num_tokens * self._seconds_per_token, MIN_RETRY_S), MAX_RETRY_S)
