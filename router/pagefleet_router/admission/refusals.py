"""What those are told who are not let in."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagefleet_protocol import headers

from pagefleet_router.errors import Refusal

MAX_RETRY_AFTER_S = 50.0
"""With the spread 60 s: the official clients wait for no longer."""


def retry_after(seconds: float, spread: float) -> Mapping[str, str]:
    """Return the header: at least 1 s, whole seconds, and later by up to a fifth.

    Args:
        seconds: predicted.
        spread: 0 to 1, drawn anew for each answer, so that not all come back at once.
    """
    wait = min(MAX_RETRY_AFTER_S, max(1.0, seconds)) * (1.0 + 0.2 * spread)
    return {headers.RETRY_AFTER: str(math.ceil(wait))}


def queue_full(seconds: float, spread: float) -> Refusal:
    """Return the answer when too many wait already."""
    message = "Too many requests are waiting for this model. Try again later."
    return Refusal(429, message, code="queue_full", headers=retry_after(seconds, spread))


def waited_too_long(seconds: float, spread: float) -> Refusal:
    """Return the answer at the deadline of a request that found no room."""
    message = "The request waited too long for an engine with room. Try again later."
    return Refusal(429, message, code="queue_timeout", headers=retry_after(seconds, spread))


def none_started(seconds: float, spread: float) -> Refusal:
    """Return the answer when no engine became ready in time, or too many wait for one."""
    message = "No engine is ready for this model yet. Try again later."
    return Refusal(503, message, code="no_engine_ready", headers=retry_after(seconds, spread))


def rate_limited(seconds: float, limits: Mapping[str, int], remaining: Mapping[str, int]) -> Refusal:
    """Return the answer to a tenant that is over its limit.

    Args:
        seconds: until the request fits.
        limits: per minute, by "requests" and "tokens".
        remaining: of them.
    """
    wait = math.ceil(seconds)
    told = {headers.RETRY_AFTER: str(wait)}
    for kind, limit in limits.items():
        told[f"x-ratelimit-limit-{kind}"] = str(limit)
        told[f"x-ratelimit-remaining-{kind}"] = str(remaining[kind])
    message = f"This API key's limit of requests or tokens per minute is reached. Try again in {wait} s."
    return Refusal(429, message, code="rate_limit_exceeded", headers=told)
