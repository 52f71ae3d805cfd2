"""A line of the log every ten seconds while there is traffic: what the engine does, in rates."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.metrics import EngineMetrics

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
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


async def tell_rates(metrics: EngineMetrics, stats: Callable[[], CoreStats | None]) -> None:
    """Log a line every ten seconds in which there was traffic, until cancelled."""
    before = _totals(metrics, stats)
    while True:
        await asyncio.sleep(PERIOD_S)
        now = _totals(metrics, stats)
        if (line := rates_line(before, now)) is not None:
            logger.info("%s", line)
        before = now


def _totals(metrics: EngineMetrics, stats: Callable[[], CoreStats | None]) -> Totals:
    counted = _value(metrics.prompt_tokens), _value(metrics.generation_tokens)
    return Totals(time.monotonic(), *counted, stats() or _NOTHING)


def _value(counter: Counter) -> float:
    samples = (sample for family in counter.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))
