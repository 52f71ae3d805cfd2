"""A core that was built says where its start's time went, to the client and in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.startup import StartupTimes

from tests.fakes.small_model import write_small_model


def test_the_start_is_broken_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = ModelConfig(model=str(write_small_model(tmp_path / "model")), load_format="dummy", device="cpu")
    config = EngineConfig(model=model, cache=CacheConfig(num_kv_blocks=32), scheduler=SchedulerConfig(max_num_seqs=4))
    times = StartupTimes()
    with times.phase("imports"):
        pass
    with caplog.at_level(logging.INFO):
        core, ready = build_core(config, times)
    core.shutdown()
    seconds = ready.startup_seconds
    assert {"imports", "config", "weights", "kv_pool", "warm_up", "total"} <= seconds.keys()
    assert "profile" not in seconds  # the size was given
    assert sum(value for name, value in seconds.items() if name != "total") == pytest.approx(seconds["total"])
    assert [record.message for record in caplog.records if record.message.startswith("started in ")]
