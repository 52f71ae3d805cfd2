"""The one command for a GPU machine, in small, and its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_check import Goal, Outcome, Part, gpu_parts, table, tiny_parts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.fleet
def test_the_whole_check_in_small(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    command = [str(ROOT / "bench" / "gpu_check.sh"), "--tiny", "--only", "tests", "throughput", "startup"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {part["part"]: part["status"] for part in written["parts"]} == dict.fromkeys(
        ("tests", "throughput", "startup"), "ok"
    )
    assert "output tokens/s" in done.stdout


def test_all_parts_together_stay_under_nine_minutes() -> None:
    assert sum(part.seconds for part in gpu_parts(Path("checkpoint"))) <= 540
    assert {part.name for part in gpu_parts(Path("c"))} >= {"tests", "latency", "kernels", "startup"}
    assert all(part.seconds > 0 for part in tiny_parts(Path("c")))


def test_the_table_says_what_was_reached_missed_and_not_measured() -> None:
    goals = [
        Goal("speed", ">= 2", lambda figures: figures["speed"], lambda value: value >= 2),
        Goal("size", "<= 1", lambda figures: figures["size"], lambda value: value <= 1),
    ]
    part = Part("demo", [], 10, goals)
    lines = table([Outcome(part, 1.0, "ok", {"figures": {"speed": 3.0, "size": 4.0}})]).splitlines()
    assert lines[-2].split()[-2:] == ["3.00", "yes"]
    assert lines[-1].split()[-2:] == ["4.00", "NO"]
    assert "not measured: too slow" in table([Outcome(part, 10.0, "too slow")])
