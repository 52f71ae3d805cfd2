"""What it costs to have a prompt computed by the engine that answers, or by another one: pure, in seconds as `cost`."""

from __future__ import annotations

from pagefleet_router.scheduling.cost import ANSWER_TOKENS, place_seconds, predicted_seconds, slowness
from pagefleet_router.scheduling.policy import Choice

STEADY = 4.0
"""Answers of a decode engine that a prompt computed there delays beside those that run now: it is there to answer
steadily, so that also those count that begin meanwhile. An engine for both has no such promise. With none of them an
idle fleet would compute all prompts where they are answered: a transfer never pays for the first request alone."""


def local_seconds(choice: Choice, tokens: int, now: float) -> float:
    """Return what a request costs whose prompt is computed where it is answered.

    To what any policy counts comes the delay of all answers that go on there: each waits for the prompt.
    """
    engine = choice.engine
    delayed = engine.num_requests + (STEADY if engine.role == "decode" else 0.0)
    stall = (tokens - choice.cached_tokens) / engine.rates.prefill.value
    return predicted_seconds(engine, tokens, choice.cached_tokens, now) + delayed * stall


def remote_seconds(prefill: Choice, decode: Choice, tokens: int, now: float) -> float:
    """Return what a request costs whose prompt is computed by another engine than the one that answers it."""
    return (
        predicted_seconds(prefill.engine, tokens, prefill.cached_tokens, now)
        + decode.engine.rates.transfer.handover.value
        + late_seconds(prefill, decode, tokens)
        + _answering_seconds(decode, tokens, now)
    )


def late_seconds(prefill: Choice, decode: Choice, tokens: int) -> float:
    """Return how long K/V still comes after the prompt is computed: blocks travel while later ones are computed."""
    facts = prefill.engine.facts
    assert facts is not None
    assert facts.kv_transfer is not None
    num_bytes = (tokens - decode.cached_tokens) * facts.kv_transfer.bytes_per_token
    # What it has cached travels at once; what the first step computes, after that.
    after_first = tokens - prefill.cached_tokens - (0 if prefill.cached_tokens else facts.max_num_batched_tokens)
    overlap = max(after_first, 0) / prefill.engine.rates.prefill.value
    return decode.engine.rates.transfer.late_seconds(num_bytes, overlap)


def _answering_seconds(decode: Choice, tokens: int, now: float) -> float:
    """Return the wait for the first step, and for a place, at an engine that gets the prompt's K/V."""
    engine = decode.engine
    rates, count = engine.rates, engine.num_requests
    seconds = engine.tally.queued(now) / rates.prefill.value + count / rates.decode.value
    share = (tokens - decode.cached_tokens + ANSWER_TOKENS) / (tokens + ANSWER_TOKENS)
    return (seconds + place_seconds(engine, count) * share) * slowness(engine, now)
