"""How new tokens move a request on: appended, followed through its form, judged, and made an update."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_engine.core.outputs import RequestUpdate, Waits
from pagefleet_engine.core.request import FinishReason, Request
from pagefleet_engine.core.step import FailureKind, StepResult, TokenLogprobs
from pagefleet_engine.core.stop import FORM_COMPLETE, Stop, check_stop
from pagefleet_engine.core.thoughts import ThoughtFirst
from pagefleet_engine.errors import GrammarFailed
from pagefleet_engine.grammars.port import Matcher


def advance(
    request: Request,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] | None = None,
    prompt_logprobs: Sequence[TokenLogprobs] | None = None,
) -> RequestUpdate:
    """Append tokens, and drop those after the one that ends the request; returns what there is to tell.

    `logprobs`: one entry per token, where asked for. The update has `failure` where a token does not fit the form.
    """
    known, matcher = request.token_ids, request.matcher
    num_before = len(known)
    num_cached = waits = None
    if num_before == request.num_given_tokens:
        num_cached = request.num_cached_tokens
        waits = Waits(request.queued_at, request.scheduled_at, request.kv_wait_s or None)
    stop = None
    for token in token_ids:
        known.append(token)
        if token in request.ending_token_ids or len(known) >= request.ends_at:  # few tokens are worth a call
            stop = check_stop(request)
        if stop is None and matcher is not None:
            try:
                stop = _follow(matcher, token)
            except Exception:  # whatever a library may raise, the other requests must go on
                return form_failed(request)
        if stop is not None:
            break
    if isinstance(matcher, ThoughtFirst):
        request.matcher = matcher.after_thought
    if stop is None:
        return RequestUpdate(request.request_id, token_ids, None, None, logprobs, prompt_logprobs, num_cached, waits)
    kept = token_ids[: len(known) - num_before]
    logprobs = logprobs[: len(kept)] if logprobs is not None else None
    return RequestUpdate(
        request.request_id,
        kept,
        stop.reason,
        stop.token_id,
        logprobs,
        prompt_logprobs,
        num_cached,
        waits,
        form_complete=stop.form_complete,
    )


def _follow(matcher: Matcher, token: int) -> Stop | None:
    """Raises GrammarFailed where the form does not allow the token, or cannot be followed."""
    if not matcher.accept(token):
        raise GrammarFailed("a token was sampled that the form does not allow")
    return FORM_COMPLETE if matcher.is_finished else None


def form_failed(request: Request) -> RequestUpdate:
    """The end of a request whose form cannot be followed."""
    return RequestUpdate(request.request_id, (), FinishReason.ERROR, failure=FailureKind.FORM_FAILED)


def new_prompt_logprobs(request: Request, result: StepResult) -> Sequence[TokenLogprobs] | None:
    """Return the entries of a step that were not reported before a preemption."""
    entries = result.prompt_logprobs.get(request.request_id)
    if entries is None:
        return None
    num_repeated = min(request.num_repeated_prompt_logprobs, len(entries))
    request.num_repeated_prompt_logprobs -= num_repeated
    request.num_prompt_logprobs += len(entries) - num_repeated
    return entries[num_repeated:] or None
