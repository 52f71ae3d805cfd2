"""A crash of a task that nobody waits for is logged, e.g. of the one that watches an engine."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_router import app
from pagefleet_router.config import RouterConfig
from pagefleet_router.engines.endpoints import EndpointTable
from pagefleet_router.signals.monitor import Monitor

from tests.fakes.faulty_engine import FAST_MONITOR, FaultyEngine


def test_a_watch_that_crashes_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def fail(engine_id: str) -> None:
        raise ZeroDivisionError  # a bug that nobody foresaw

    async def scenario() -> None:
        engine = FaultyEngine()
        await engine.start()
        table = EndpointTable()
        monitor = Monitor(table, fail, FAST_MONITOR)
        with caplog.at_level(logging.CRITICAL):
            table.replace([Endpoint("e0", engine.url, "m")])
            async with asyncio.timeout(60):
                while not caplog.records:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        await monitor.stop()
        await engine.kill()

    asyncio.run(scenario())
    assert "an engine is not watched any more" in caplog.text
    assert "ZeroDivisionError" in caplog.text


class BrokenSource:
    """A source with a bug."""

    async def run(self, table: EndpointTable) -> None:
        raise RuntimeError("a bug")


def test_a_router_that_cannot_follow_its_engines_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "make_source", lambda config: BrokenSource())
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    config = RouterConfig(engine=("http://127.0.0.1:9",), model_name="m", port=0, drain_timeout=0.0)
    assert asyncio.run(app.serve(config)) == 1
    assert "it drains and ends too" in caplog.text
