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

from bench.gpu_parts import Device, Goal, Part, first_parts, quick_parts, second_parts, tiny_parts

CALL_SECONDS = 525.0
"""Of one call: under nine minutes with what comes before and after."""
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
    report = folder / (part.name.replace(": ", "-").replace(" ", "-") + ".json")
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


def find_device() -> Device:
    """The GPU, as torch sees it in a process of its own: this one must hold none of its memory. Exits without one."""
    code = "import torch; of = torch.cuda.get_device_properties(0); print(of.total_memory, of.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit("gpu_check: torch finds no GPU here: --tiny tries this program on the CPU")
    memory, _, name = done.stdout.strip().partition(" ")
    return Device(name, int(memory) / 2**30)


def wanted_parts(arguments: argparse.Namespace, checkpoint: Path, folder: Path) -> list[Part]:
    """The parts of the call, or of both, that were asked for."""
    if arguments.tiny:
        return chosen(tiny_parts(checkpoint), arguments.only)
    device = find_device()
    print(f"{device.name}, {device.memory_gib:.0f} GiB", flush=True)
    if arguments.quick:
        return chosen(quick_parts(device), arguments.only)
    calls = {1: first_parts(device), 2: second_parts(checkpoint, folder)}
    return chosen([part for call in arguments.call or calls for part in calls[call]], arguments.only)


def main() -> int:
    """Returns 1 if tests failed or were too slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="Small parts on the CPU, to try this program itself.")
    parser.add_argument("--quick", action="store_true", help="Only tests, latency and kernels: under six minutes.")
    parser.add_argument("--call", type=int, nargs="+", choices=(1, 2), help="One half alone. Default: both.")
    parser.add_argument("--only", nargs="+", metavar="PART", help="Run the parts whose names begin so.")
    parser.add_argument("--seconds", type=float, help=f"For all parts. Default: {CALL_SECONDS:g} for each call.")
    arguments = parser.parse_args()
    seconds = arguments.seconds or CALL_SECONDS * (len(arguments.call) if arguments.call else 2)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        folder = Path(os.environ.get("OUT") or scratch)
        parts = wanted_parts(arguments, Path(scratch) / "checkpoint", folder)
        outcomes = run_parts(parts, folder, seconds)
        print("\n" + table(outcomes), flush=True)
    return int(any(outcome.part.is_test and outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
