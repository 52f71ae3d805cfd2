"""The core's loop beside a publisher: it rings after each turn, and tells the totals also while it is idle."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagefleet_engine.engine_core.messages import AddRequest, CoreStats, ResetPrefixCache, StepOutputs
from pagefleet_engine.engine_core.process import STATS_INTERVAL_S, CoreLoop
from pagefleet_engine.engine_core.progress import ProgressWriter
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.core_wire import Wire
from tests.fakes.paged_worker import ToldCache
from tests.fakes.scripted_core import BLOCK_SIZE, scripted_core


class CountingPublisher:
    """Remembers what was cached at each flush."""

    def __init__(self, told: ToldCache) -> None:
        self.num_published = 0
        self.num_dropped = 0
        self.flushed: list[int] = []
        self._told = told

    def flush(self) -> None:
        self.flushed.append(len(self._told.contents))


class PublishingWire(Wire):
    """A loop whose core tells its cache's changes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        told = ToldCache()
        self.publisher = CountingPublisher(told)
        self.core = scripted_core(self.config, cache_events=told)
        self.loop = CoreLoop(self.core, self, ProgressWriter(folder / "progress"), self.publisher)  # type: ignore[arg-type]

    @property
    def stats(self) -> list[CoreStats]:
        return [message.stats for message in self.sent if isinstance(message, StepOutputs)]


@pytest.fixture
def wire(tmp_path: Path) -> PublishingWire:
    return PublishingWire(tmp_path)


def test_each_turn_ends_with_a_flush(wire: PublishingWire) -> None:
    wire.turn(AddRequest("a", [5] * (2 * BLOCK_SIZE + 1), SamplingParams(max_tokens=1), ()))
    wire.turn()
    wire.turn(ResetPrefixCache())
    assert wire.publisher.flushed == [2, 2, 0]


def test_totals_are_told_while_nothing_runs(wire: PublishingWire, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    wire.turn()
    assert wire.stats == []
    wire.publisher.num_published, wire.publisher.num_dropped = 3, 2
    wire.turn()
    assert [(stats.kv_events, stats.kv_events_dropped) for stats in wire.stats] == [(3, 2)]
    wire.turn()
    wire.publisher.num_dropped = 4
    now += STATS_INTERVAL_S / 2
    wire.turn()
    assert len(wire.stats) == 1
    now += STATS_INTERVAL_S
    wire.turn()
    assert wire.stats[-1].kv_events_dropped == 4
