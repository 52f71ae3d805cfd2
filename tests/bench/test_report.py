"""A benchmark's report can be judged: it says where, from which commit and how it was made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.report import write_report


def test_a_report_names_machine_commit_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setattr(sys, "argv", [str(root / "bench" / "scheduler.py"), "--steps", "2 3"])
    path = tmp_path / "results" / "scheduler.json"
    write_report(path, "scheduler", {"step_p50_ms": 0.4})
    report = json.loads(path.read_text())
    assert report["name"] == "scheduler"
    assert report["command"] == "python bench/scheduler.py --steps '2 3'"
    assert report["figures"] == {"step_p50_ms": 0.4}
    assert report["commit"]
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["python"].count(".") == 2
    assert report["machine"]["cpu"]
