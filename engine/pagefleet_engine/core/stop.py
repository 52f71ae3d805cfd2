"""When a request has enough: a pure function of its tokens. Stop strings need text, so they are the client's part."""

from __future__ import annotations

from typing import NamedTuple

from pagefleet_engine.core.request import FinishReason, Request


class Stop(NamedTuple):
    """Why the last token was the last."""

    reason: FinishReason
    token_id: int | None
    """The stop token of the request's own list that was met; None for an end-of-text token or a limit."""


_END_OF_TEXT = Stop(FinishReason.STOP, None)
_LENGTH = Stop(FinishReason.LENGTH, None)


def check_stop(request: Request, max_model_len: int) -> Stop | None:
    """Judge the request by its last token, which must be an output token.

    Before `min_tokens` output tokens only the limits count. `max_tokens` of None means until `max_model_len`, prompt
    and output together.
    """
    sampling = request.sampling
    num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
    if num_output_tokens >= sampling.min_tokens:
        last = request.token_ids[-1]
        if last in request.eos_token_ids and not sampling.ignore_eos:
            return _END_OF_TEXT
        if last in sampling.stop_token_ids:
            return Stop(FinishReason.STOP, last)
    if num_output_tokens == sampling.max_tokens or len(request.token_ids) >= max_model_len:
        return _LENGTH
    return None
