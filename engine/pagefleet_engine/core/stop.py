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


def check_stop(request: Request) -> Stop | None:
    """Judge the request by its last token, which must be an output token.

    Before `min_tokens` output tokens only the limit counts.
    """
    token = request.token_ids[-1]
    if token in request.ending_token_ids and request.num_output_tokens >= request.sampling.min_tokens:
        if token in request.eos_token_ids and not request.sampling.ignore_eos:
            return _END_OF_TEXT
        return Stop(FinishReason.STOP, token)
    return _LENGTH if len(request.token_ids) >= request.ends_at else None
