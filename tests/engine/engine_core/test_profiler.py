"""Profiles of the core's thread: what they hold, and when one can begin and end."""

from __future__ import annotations

import gc
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pagefleet_engine.engine_core import profiler
from pagefleet_engine.engine_core.messages import AddRequest, Profiled, StartProfile, StopProfile
from pagefleet_engine.engine_core.process import CoreLoop
from pagefleet_engine.engine_core.profiler import StepProfiler
from pagefleet_engine.engine_core.progress import ProgressReader, ProgressWriter
from pagefleet_engine.errors import ProfileRefused
from pagefleet_engine.executor.trace import ThreadTrace
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.core_wire import Wire
from tests.fakes.scripted_core import CountingExecutor


def operations(trace: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}


def test_a_profile_holds_what_was_done_between_its_ends(tmp_path: Path) -> None:
    made = StepProfiler(tmp_path)
    torch.ones(4).cumsum(0)
    made.start()
    torch.ones(4).cosh()
    first = made.stop()
    torch.ones(4).sinh()
    assert "aten::cosh" in operations(first)
    assert operations(first).isdisjoint({"aten::cumsum", "aten::sinh"})
    made.start()
    assert made.stop() != first
    assert set(tmp_path.iterdir()) > {first}


def test_one_at_a_time(tmp_path: Path) -> None:
    made = StepProfiler(tmp_path)
    with pytest.raises(ProfileRefused, match="begin one by POST /start_profile"):
        made.stop()
    made.start()
    with pytest.raises(ProfileRefused, match="recorded already: end it by POST /stop_profile"):
        made.start()
    assert made.stop().exists()


def test_what_nobody_ends_in_time_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = StepProfiler(tmp_path)
    made.start()
    assert not made.is_full()
    for _ in range(profiler.MAX_STEPS):
        made.count_step()
    assert made.is_full()
    made.end()
    assert not made.is_full()
    made.start()
    assert not made.is_full()
    assert made.stop() == max(tmp_path.iterdir())
    for file in tmp_path.iterdir():
        file.unlink()
    made.start()
    monkeypatch.setattr(profiler, "MAX_S", 0.0)
    assert made.is_full()
    made.end()
    (written,) = tmp_path.iterdir()
    assert made.stop() == written
    with pytest.raises(ProfileRefused):
        made.stop()


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    made = StepProfiler(tmp_path / "gone")
    made.start()
    with pytest.raises(ProfileRefused, match=r"cannot be written to .*gone: No such file"):
        made.stop()
    with pytest.raises(ProfileRefused, match="No profile is being recorded"):
        made.stop()


def test_a_device_that_cannot_be_profiled_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(self: object) -> None:
        raise RuntimeError("CUPTI is in use")

    made = StepProfiler(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(torch.profiler.profile, "start", taken)
        with pytest.raises(ProfileRefused, match="No profile can be recorded: CUPTI is in use"):
            made.start()
    made.start()
    made.stop()


def test_a_core_that_writes_a_profile_does_not_hang(tmp_path: Path, frozen: None) -> None:
    """Writing may take longer than a step ever does."""
    wire = Wire(tmp_path)
    progress = ProgressReader(tmp_path / "progress")
    seen: list[bool] = []

    class Slow(StepProfiler):
        def stop(self) -> Path:
            seen.append(progress.read().busy)
            return super().stop()

    wire.loop = CoreLoop(wire.core, wire, ProgressWriter(tmp_path / "progress"), None, Slow(tmp_path))  # type: ignore[arg-type]
    wire.turn(StartProfile(), StopProfile())
    assert seen == [False]


@pytest.fixture
def frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_a_profile_has_loaded_is_no_garbage_to_look_at(tmp_path: Path, frozen: None) -> None:
    """It is a hundred thousand objects: looked through at each idle moment, they made first tokens wait."""
    wire = Wire(tmp_path)
    wire.loop = CoreLoop(wire.core, wire, ProgressWriter(tmp_path / "progress"), None, StepProfiler(tmp_path))  # type: ignore[arg-type]
    for message in (StartProfile(), StopProfile()):
        loaded = [message]
        wire.turn(message)
        assert not any(found is loaded for found in gc.get_objects())


def test_no_step_is_under_way_when_a_profile_begins_or_ends(tmp_path: Path, frozen: None) -> None:
    """Ranks may take longer than others wait for them in a step; and what the steps gave is told."""
    wire = Wire(tmp_path, max_in_flight=2)
    executor = wire.core.executor
    assert isinstance(executor, CountingExecutor)
    events, seen = executor.events, list[list[str]]()

    class Trace(ThreadTrace):
        def start(self) -> None:
            seen.append([kind for kind, _ in events])

        def stop(self, stem: Path) -> Path:
            seen.append([kind for kind, _ in events])
            return stem

    profiler = StepProfiler(tmp_path, Trace())
    wire.loop = CoreLoop(wire.core, wire, ProgressWriter(tmp_path / "progress"), None, profiler)  # type: ignore[arg-type]
    wire.turn(AddRequest("a", [5], SamplingParams(max_tokens=50), ()))
    for message in (StartProfile(), StopProfile()):
        wire.turn(message)
        assert seen[-1].count("launch") == seen[-1].count("wait") > 0
    told = [token for output in wire.outputs for token in output.new_token_ids]
    assert told == [*range(6, 6 + len(told))]
    assert len(told) == sum(kind == "wait" for kind, _ in events)


def test_the_core_answers_each_message(tmp_path: Path, frozen: None) -> None:
    wire = Wire(tmp_path)
    wire.turn(StartProfile())
    assert wire.sent == [Profiled(refused="This engine records no profiles.")]
    wire.loop = CoreLoop(wire.core, wire, ProgressWriter(tmp_path / "progress"), None, StepProfiler(tmp_path))  # type: ignore[arg-type]
    wire.sent.clear()
    wire.turn(StartProfile(), StartProfile(), StopProfile())
    begun, refused, ended = wire.sent
    assert begun == Profiled()
    assert isinstance(refused, Profiled)
    assert "already" in refused.refused
    assert isinstance(ended, Profiled)
    assert Path(ended.path).parent == tmp_path
    assert Path(ended.path).exists()
