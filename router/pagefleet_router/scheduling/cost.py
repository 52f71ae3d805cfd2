"""What it would cost to give a request to an engine, in seconds; the lowest wins. Pure: time comes from the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_router.endpoints import EngineView

RECOMPUTE = 2.0
"""What a token costs that this request makes the engine compute, beside one that waits before it. Above one, because it
also delays whoever comes next and pushes other prefixes out of the cache: with 1, `bench/router_sim.py` copies prefixes
to more engines than their caches hold."""
SESSION_TOKENS = 256
"""Tokens of a session that its engine has and no index knows: the last answer, pictures."""
CROWD_RATIO = 1.25
CROWD_SLACK = 4.0
"""An engine is crowded with more than CROWD_RATIO x the mean + CROWD_SLACK requests, and then no cache makes up for it:
consistent hashing with bounded loads has the same rule (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350), KubeAI the
same ratio."""
SHARE_RATIO = 1.15
SHARE_SLACK = 16.0
"""The same for what an engine was sent lately: few requests at a time can pin a fleet's traffic to one engine too.
What leaves takes its prefix along, so that from then on two engines share it."""
KV_FULL = 0.9
"""Share of KV blocks from which on a new request risks to be preempted or to wait: KV is not freed before one ends."""
SLOW_START_S = 20.0
SLOW_START_MOST = 10.0
"""A new engine counts as ten times slower at first (Envoy's least weight in its slow start is 10 % too), and less so
during 20 s: kernels get compiled, graphs captured, and what is predicted of it is its siblings' speed."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that one engine may have beside the others."""

    requests: float
    recent: float


def bounds_of(engines: Sequence[EngineView], now: float) -> Bounds:
    """Return the bounds among these engines."""
    requests = recent = 0.0
    for engine in engines:
        requests += engine.num_requests
        recent += engine.tally.settle(now)
    num = len(engines)
    return Bounds(CROWD_RATIO * requests / num + CROWD_SLACK, SHARE_RATIO * recent / num + SHARE_SLACK)


def predicted_seconds(engine: EngineView, tokens: int, cached: int, now: float) -> float:
    """Return the time to first token, with what the request costs others.

    Args:
        engine: where it would go.
        tokens: of the prompt.
        cached: leading ones of them that the engine has.
        now: on the clock of tallies and table.
    """
    tally, rates, load, facts = engine.tally, engine.rates, engine.load, engine.facts
    count = engine.num_requests
    prefill = rates.prefill.value
    work = tally.queued(now) + RECOMPUTE * (tokens - cached)
    # It waits for a step that gives a token to everyone who runs.
    seconds = rates.overhead.value + work / prefill + count / rates.decode.value
    if facts is not None and count >= facts.max_num_seqs:
        seconds += rates.request_seconds.value * (count + 1 - facts.max_num_seqs) / facts.max_num_seqs
    if load is not None and load.kv_usage > KV_FULL:
        # The more likely it has to wait for one to end, or to be computed twice.
        risk = (load.kv_usage - KV_FULL) / (1.0 - KV_FULL)
        seconds += risk * (rates.request_seconds.value / max(count, 1.0) + tokens / prefill)
    age = now - engine.usable_since
    if age < SLOW_START_S:
        seconds *= min(SLOW_START_S / max(age, 1e-3), SLOW_START_MOST)
    return seconds


def crowding_seconds(engine: EngineView, tokens: int, bounds: Bounds, now: float) -> float:
    """Return what is added where an engine has too much: all that its cache would save, and more the more crowded."""
    whole = RECOMPUTE * tokens / engine.rates.prefill.value + engine.rates.overhead.value
    excess = engine.num_requests - bounds.requests
    if excess > 0:
        return whole + excess * engine.rates.overhead.value
    return whole if engine.tally.settle(now) > bounds.recent else 0.0
