"""What it would cost to give a request to an engine, in seconds; the lowest wins. Pure: time comes from the caller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.scheduling.policy import Choice

RECOMPUTE = 6.0
"""What a token costs that this request makes the engine compute, beside one that waits before it: one for the time, the
rest for others. It delays whoever comes next, pushes other prefixes out of a full cache, and from then on two engines
share the prefix. In `bench/router_sim.py` 1 copies prefixes to more engines than their caches hold; 4 and 9 differ
little from it. The part for others is multiplied by what the engine's cache took in lately over the mean: there
what is pushed out is younger. Without that requests that all engines have a part of crowd some caches, and agents lose
4 % of their hits. It holds for new KV as for computation: a copy takes KV away from others where that is short."""
STORED_SLACK = 20_000.0
"""Tokens, added to what each cache took in: a few prompts tell nothing of how soon others are pushed out."""
PRESENT_SLACK = 4.0
"""Requests, added to what each engine has: one more or less of a few says nothing of how fast an engine is."""
SESSION_TOKENS = 256
"""Tokens of a session that its engine has and no index knows: the last answer, pictures."""
CROWD_RATIO = 1.5
CROWD_SLACK = 8.0
"""An engine is crowded with more than CROWD_RATIO x the mean + CROWD_SLACK requests, and then no cache makes up for it:
consistent hashing with bounded loads has the same rule (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350). With 1.25,
which KubeAI has, prefixes are copied more than pays where KV is short (`bench/router_sim.py`)."""
SHARE_RATIO = 1.15
SHARE_SLACK = 16.0
"""The same for what an engine was sent lately: few requests at a time can pin a fleet's traffic to one engine too.
What leaves takes its prefix along, so that from then on two engines share it."""
ANSWER_TOKENS = 512
"""KV that an answer is expected to need beside its prompt's."""
NEGLIGIBLE = 0.1
LEAST_FREE = 0.1
"""Where KV is fuller the wait grows no more: with 0.01 prefixes flee from full engines to others, and fill those."""
SLOW_START_S = 20.0
SLOW_START_MOST = 10.0
"""A new engine counts as ten times slower at first (Envoy's least weight in its slow start is 10 % too), and less so
during 20 s: kernels get compiled, graphs captured, and what is predicted of it is its siblings' speed."""


class Bounds(NamedTuple):
    """The most that one engine may have beside the others."""

    requests: float
    recent: float
    all_requests: float
    """No bound but the sum of all, PRESENT_SLACK of each included."""
    stored: float
    """No bound but the mean: tokens that caches took in lately, STORED_SLACK included."""
    slowness: float
    """The highest of any."""


def bounds_of(engines: Sequence[EngineView], now: float) -> Bounds:
    """Return the bounds among these engines, whose tallies are settled by it."""
    requests = recent = stored = 0.0
    latest = -math.inf
    for engine in engines:
        requests += engine.num_requests
        latest = max(latest, engine.usable_since)
        tally = engine.tally
        recent += tally.settle(now)
        stored += tally.stored
    num = len(engines)
    return Bounds(
        CROWD_RATIO * requests / num + CROWD_SLACK,
        SHARE_RATIO * recent / num + SHARE_SLACK,
        requests + num * PRESENT_SLACK,
        stored / num + STORED_SLACK,
        slowness_at(now - latest),
    )


def predicted_seconds(engine: EngineView, tokens: int, cached: int, now: float, share: float = 1.0) -> float:
    """Return the time to first token, with what the request costs others.

    Args:
        engine: where it would go.
        tokens: of the prompt.
        cached: leading ones of them that the engine has.
        now: on the clock of tallies and table.
        share: what its cache took in lately over the mean.
    """
    tally, rates = engine.tally, engine.rates
    count = engine.num_requests
    prefill = rates.prefill.value
    new = (1.0 + (RECOMPUTE - 1.0) * share) * (tokens - cached)
    # It waits for a step that gives a token to everyone who runs.
    seconds = rates.overhead.value + (tally.queued(now) + new) / prefill + count / rates.decode.value
    # It waits for KV as far as it needs new KV, and lets others wait for that: what is cached is shared.
    seconds += place_seconds(engine, count) * (new + ANSWER_TOKENS) / (tokens + ANSWER_TOKENS)
    return seconds if now - engine.usable_since >= SLOW_START_S else seconds * slowness(engine, now)


def slowness(engine: EngineView, now: float) -> float:
    """Return how many times slower an engine counts as because it is new; 1 for those that are not."""
    return slowness_at(now - engine.usable_since)


def slowness_at(age: float) -> float:
    """Return the slowness of an engine of this age, in seconds."""
    return 1.0 if age >= SLOW_START_S else min(SLOW_START_S / max(age, 1e-3), SLOW_START_MOST)


def place_seconds(engine: EngineView, count: float) -> float:
    """Return how long a request waits for a place: for one of `max_num_seqs`, or for KV that others hold.

    The mean wait before as many servers as there are places, each busy for the time that a request takes, by
    Sakasegawa's approximation (1977): next to nothing at half of the KV, the time of several requests when it is full.
    """
    facts = engine.facts
    busy = engine.kv_usage
    if facts is not None and (share := count / facts.max_num_seqs) > busy:
        busy = share
    if busy < NEGLIGIBLE:
        return 0.0
    places = (count if count > 1.0 else 1.0) / busy  # no calls of max and min: this is a third of a choice
    if busy >= 1.0:
        wait = 1.0 / LEAST_FREE + max(count - places, 0.0)
    else:
        free = 1.0 - busy if busy < 1.0 - LEAST_FREE else LEAST_FREE
        wait = math.pow(busy, math.sqrt(2.0 * (places + 1.0))) / free
    return engine.rates.request_seconds.value / places * wait


def crowding_seconds(engine: EngineView, tokens: int, bounds: Bounds) -> float:
    """Return what is added where an engine is over a bound: all that its cache would save, and a bit per request.

    It is as dear as the newest engine counts as slow: else the one that came first would keep everything in a fleet
    that has just started. The rate is the engine's own: what is slow must not get more because others are crowded.
    """
    overhead = engine.rates.overhead.value
    excess = max(engine.num_requests - bounds.requests, 0.0)
    return (RECOMPUTE * tokens / engine.rates.prefill.value + overhead * (1.0 + excess)) * bounds.slowness


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
