"""How the router learns that an engine hangs: from its own word, or from its silence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop
from pagefleet_router.signals import monitor
from pagefleet_router.signals.monitor import MonitorTiming

from tests.fakes.faulty_engine import fleet, whole

FAST = MonitorTiming(period=0.02, unready_period=0.02, timeout=0.05, stuck=10.0)


def test_an_engine_is_stuck_when_it_says_so_or_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def scenario() -> None:
        async with fleet(tmp_path, whole(), monitor=FAST) as f:
            [engine], table = f.engines, f.router.table

            def seen() -> tuple[str, bool]:
                return table.snapshot.engines[0].state, table.snapshot.engines[0].stuck

            engine.ready = 503
            await f.until(lambda: seen() == ("unready", False))
            engine.readiness = b'{"error":{"code":"engine_stalled"}}'
            await f.until(lambda: seen() == ("unready", True))
            engine.ready, engine.readiness = 200, b"{}"
            await f.until(lambda: seen() == ("ready", False))
            engine.is_hung = True
            await f.until(lambda: seen() == ("unready", False))
            clock.now += 10.0
            await f.until(lambda: seen() == ("unready", True))
            engine.is_hung = False
            await f.until(lambda: seen() == ("ready", False))

    uvloop.run(scenario())
