"""Runs the GPU tests and the benchmarks that have figures to reach, each within a time of its own; a table comes last.

A part that fails or takes too long is reported and does not stop the others. The exit status says whether tests failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.gpu_parts import Goal, Part, gpu_parts, quick_parts, tiny_parts

TOTAL_SECONDS = 525.0
"""Under nine minutes with what comes before and after; parts that find less time left than they need get that."""
_TOO_LITTLE = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a part gave."""

    part: Part
    seconds: float
    status: str
    """ok, failed, too slow, or no time left."""
    report: Mapping[str, Any] | None = None
    """Of a part that was stopped: what it had written by then."""

    def value(self, goal: Goal) -> float | None:
        """The figure that a goal is about, if it was measured."""
        try:
            return None if self.report is None else goal.read(self.report["figures"])
        except KeyError:
            return None


def run_parts(parts: Sequence[Part], folder: Path, total_seconds: float) -> list[Outcome]:
    """Run one after the other within the total; the JSON file is written after each."""
    give_up_at = time.monotonic() + total_seconds
    outcomes: list[Outcome] = []
    for part in parts:
        left = give_up_at - time.monotonic()
        if left > _TOO_LITTLE:
            outcomes.append(run_part(part, folder, min(part.seconds, left)))
        else:
            outcomes.append(Outcome(part, 0.0, "no time left"))
        write_json(outcomes, folder)
    return outcomes


def run_part(part: Part, folder: Path, limit: float) -> Outcome:
    """Run one part to its end or for `limit` seconds, after which all its processes are ended."""
    report = folder / (part.name.replace(": ", "-") + ".json")
    command = [sys.executable, *part.arguments, *([f"--json={report}"] if part.reports else [])]
    print(f"=== {part.name} (at most {limit:.0f} s)", flush=True)
    began = time.monotonic()
    threads = {"OMP_NUM_THREADS": "2"} if part.is_test else {}  # twins compute beside each other
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **threads}, start_new_session=True) as process:
        try:
            status = "ok" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "too slow"
        if status != "ok":
            _end_group(process.pid)
    return Outcome(part, time.monotonic() - began, status, json.loads(report.read_text()) if report.exists() else None)


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def table(outcomes: Sequence[Outcome]) -> str:
    """Parts with their times, then the goals."""
    lines = [f"{'part':<18} {'status':<12} seconds"]
    lines += [f"{outcome.part.name:<18} {outcome.status:<12} {outcome.seconds:7.1f}" for outcome in outcomes]
    lines += ["", f"{'goal':<46} {'target':>10} {'reached':>10}"]
    for outcome in outcomes:
        for goal in outcome.part.goals:
            value = outcome.value(goal)
            if value is None:
                lines.append(f"{goal.what:<46} {goal.target:>10} {'-':>10}  not measured: {outcome.status}")
            else:
                verdict = "yes" if goal.reached(value) else "NO"
                lines.append(f"{goal.what:<46} {goal.target:>10} {value:>10,.2f}  {verdict}")
    return "\n".join(lines)


def write_json(outcomes: Sequence[Outcome], folder: Path) -> None:
    """One file with every report."""
    parts = [
        {"part": outcome.part.name, "status": outcome.status, "seconds": outcome.seconds, "report": outcome.report}
        for outcome in outcomes
    ]
    (folder / "gpu_check.json").write_text(json.dumps({"name": "gpu_check", "parts": parts}, indent=2) + "\n")


def chosen(parts: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    """The parts whose names begin with one of `names`; all for None."""
    return [part for part in parts if names is None or any(part.name.startswith(name) for name in names)]


def main() -> int:
    """Returns 1 if tests failed or were too slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="Small parts on the CPU, to try this program itself.")
    parser.add_argument("--quick", action="store_true", help="Only tests, kernels and latency: under four minutes.")
    parser.add_argument("--only", nargs="+", metavar="PART", help="Run the parts whose names begin so.")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="For all parts. Default: %(default)s.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        folder = Path(os.environ.get("OUT") or scratch)
        checkpoint = Path(scratch) / "checkpoint"
        parts = tiny_parts(checkpoint) if arguments.tiny else gpu_parts(checkpoint)
        parts = quick_parts() if arguments.quick else parts
        outcomes = run_parts(chosen(parts, arguments.only), folder, arguments.seconds)
        print("\n" + table(outcomes), flush=True)
    return int(any(outcome.part.is_test and outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
