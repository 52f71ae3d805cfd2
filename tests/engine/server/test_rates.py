"""The line of rates: what happened between two moments, and silence while nothing does."""

from __future__ import annotations

import asyncio
import logging

import pytest
from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_engine.server import rates
from pagefleet_engine.server.figures import EngineFigures
from pagefleet_engine.server.rates import Totals, rates_line, tell_rates


def stats(running: int = 0, waiting: int = 0, looked_up: int = 0, found: int = 0) -> CoreStats:
    return CoreStats(running, waiting, 0.25, looked_up, found, 0, 0)


def test_rates_are_of_the_time_between() -> None:
    before, now = Totals(5.0, 100, 1000, stats(looked_up=100)), Totals(15.0, 600, 4405, stats(3, 2, 600, 200))
    assert rates_line(before, now) == (
        "340.5 tokens/s generated, 50.0 tokens/s of prompts; requests: 3 run, 2 wait; KV cache 25% full, "
        "40% of prompts found in the prefix cache"
    )


def test_silence_without_traffic() -> None:
    assert rates_line(Totals(0.0, 5, 5, stats(looked_up=5)), Totals(10.0, 5, 5, stats(looked_up=5))) is None


def test_requests_that_wait_for_anything_are_traffic() -> None:
    line = rates_line(Totals(0.0, 5, 5, stats()), Totals(10.0, 5, 5, stats(running=1)))
    assert line == "0.0 tokens/s generated, 0.0 tokens/s of prompts; requests: 1 run, 0 wait; KV cache 25% full"


def test_a_clock_that_stood_still_divides_nothing() -> None:
    assert rates_line(Totals(1.0, 0, 0, stats()), Totals(1.0, 9, 9, stats(1))) is None


def test_the_counters_of_the_metrics_are_what_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rates, "PERIOD_S", 0.01)
    logging.getLogger("pagefleet_engine").propagate = True
    metrics = EngineMetrics("m", lambda: None)

    async def run() -> None:
        telling = asyncio.create_task(tell_rates(EngineFigures(metrics).text, lambda: None))
        await asyncio.sleep(0.05)
        assert not caplog.messages
        metrics.generation_tokens.inc(7)
        while not caplog.messages:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)
        telling.cancel()

    with caplog.at_level(logging.INFO, "pagefleet_engine.server.rates"):
        asyncio.run(run())
    assert "tokens/s generated, 0.0 tokens/s of prompts; requests: 0 run" in caplog.messages[0]
