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
