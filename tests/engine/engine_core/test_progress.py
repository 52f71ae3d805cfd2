import time
from pathlib import Path

from pagefleet_engine.engine_core.progress import ProgressReader, ProgressWriter


def test_the_reader_sees_what_the_writer_stamps(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path / "progress")
    assert (reader.read().steps, reader.read().busy) == (0, False)
    writer = ProgressWriter(tmp_path / "progress")
    before = time.monotonic()
    writer.stamp(busy=True)
    seen = reader.read()
    assert (seen.steps, seen.busy) == (0, True)
    assert before <= seen.stamped_at <= time.monotonic()
    writer.stamp(busy=False, steps=1)
    assert (reader.read().steps, reader.read().busy) == (1, False)
    reader.close()


def test_loading_is_told_beside_steps(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path / "progress")
    assert (reader.loading().phase, reader.loading().share) == ("starting", None)
    writer = ProgressWriter(tmp_path / "progress")
    writer.loading("weights", 2**40, 2**42)
    writer.stamp(busy=True, steps=7)
    seen = reader.loading()
    assert (seen.phase, seen.done, seen.total, seen.share) == ("weights", 2**40, 2**42, 0.25)
    assert seen.seconds >= 0
    assert reader.read().steps == 7
    reader.close()
