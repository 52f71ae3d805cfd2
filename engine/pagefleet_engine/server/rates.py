"""A line of the log every ten seconds while there is traffic: what the engine does, in rates."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.exposition import metric_mark, sample_values

from pagefleet_engine.engine_core.messages import CoreStats

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
_MARKS = metric_mark(names.ENGINE_PROMPT_TOKENS), metric_mark(names.ENGINE_GENERATION_TOKENS)
_NOTHING = CoreStats(0, 0, 0.0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Totals:
    """What was counted up to a moment."""

    at: float
    """Seconds, monotonic."""
    prompt_tokens: float
    generation_tokens: float
    stats: CoreStats


def rates_line(before: Totals, now: Totals) -> str | None:
    """Return what happened between two moments; None where nothing did and nothing is under way."""
    seconds = now.at - before.at
    prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generation_tokens - before.generation_tokens
    stats = now.stats
    looked_up = stats.prefix_cache_queries_tokens - before.stats.prefix_cache_queries_tokens
    found = stats.prefix_cache_hits_tokens - before.stats.prefix_cache_hits_tokens
    if seconds <= 0 or not (prompt or generated or stats.requests_running or stats.requests_waiting):
        return None
    hits = f", {found / looked_up:.0%} of prompts found in the prefix cache" if looked_up > 0 else ""
    return (
        f"{generated / seconds:.1f} tokens/s generated, {prompt / seconds:.1f} tokens/s of prompts; requests: "
        f"{stats.requests_running} run, {stats.requests_waiting} wait; KV cache {stats.kv_usage:.0%} full{hits}"
    )


async def tell_rates(figures: Callable[[], Awaitable[bytes]], stats: Callable[[], CoreStats | None]) -> None:
    """Log a line every ten seconds in which there was traffic, until cancelled.

    Args:
        figures: returns the engine's exposition.
        stats: returns the core's latest figures.
    """
    before = _totals(await figures(), stats())
    while True:
        await asyncio.sleep(PERIOD_S)
        now = _totals(await figures(), stats())
        if (line := rates_line(before, now)) is not None:
            logger.info("%s", line)
        before = now


def _totals(text: bytes, stats: CoreStats | None) -> Totals:
    prompt, generated = (sum(map(float, sample_values(b"\n" + text, mark))) for mark in _MARKS)
    return Totals(time.monotonic(), prompt, generated, stats or _NOTHING)
