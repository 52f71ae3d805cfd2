"""Runs the GPU tests and the benchmarks that have figures to reach, each within a time of its own; a table comes last.

A part that fails or takes too long is reported and does not stop the others. The exit status says whether tests failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure to reach."""

    what: str
    target: str
    read: Callable[[Figures], float]
    """From a report's figures."""
    reached: Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class Part:
    """One child process."""

    name: str
    arguments: Sequence[str]
    """Of `pagefleet bench`, or of pytest for the tests."""
    seconds: float
    """After which it is stopped."""
    goals: Sequence[Goal] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a part gave."""

    part: Part
    seconds: float
    status: str
    """ok, failed, or too slow."""
    report: Mapping[str, Any] | None = None


def gpu_parts(checkpoint: Path) -> list[Part]:
    """What an H200 is asked for; `checkpoint`: where an 8B model with random weights lies."""
    return [
        Part("tests", ["-m", "gpu", "-q", "-x", "--timeout=110", "tests"], 120),
        Part(
            "latency",
            [
                "latency",
                "--shape=llama-3.1-8b",
                "--batch-size=1",
                "--input-len=500",
                "--output-len=128",
                "--repeats=3",
                "--max-model-len=4096",
            ],
            75,
            [
                Goal(
                    "Llama-3.1-8B, batch 1: ms per token",
                    "<= 3.7",
                    lambda f: f["per_token_ms"]["p50"],
                    lambda x: x <= 3.7,
                )
            ],
        ),
        Part(
            "throughput-8b",
            [
                "throughput",
                "--shape=qwen3-8b",
                "--num-requests=256",
                "--input-len=1024",
                "--output-len=1024",
                "--max-model-len=4096",
                "--max-num-batched-tokens=8192",
            ],
            100,
            [Goal("Qwen3-8B, 256 x 1024/1024: output tokens/s", "> 8,500", _output_rate, lambda x: x > 8500)],
        ),
        Part(
            "throughput-0.6b",
            [
                "throughput",
                "--shape=qwen3-0.6b",
                "--num-requests=256",
                "--input-len=100:1024",
                "--output-len=100:1024",
                "--max-model-len=4096",
                "--max-num-batched-tokens=8192",
            ],
            60,
            [
                Goal("Qwen3-0.6B, 256 x 100..1024: tokens/s", "> 28,200", _output_rate, lambda x: x > 0.6 * 47_000),
                Goal("  device idle, share of the run", "< 0.02", _idle_share, lambda x: x < 0.02),
            ],
        ),
        Part(
            "kernels",
            ["kernels"],
            90,
            [
                Goal(
                    "decode attention 64 x 4096: share",
                    ">= 0.90",
                    _share("decode attention", "64 x 4096"),
                    lambda x: x >= 0.9,
                ),
                Goal(
                    "prefill attention 16k / torch flash",
                    ">= 0.75",
                    _peer("prefill attention", "16384"),
                    lambda x: x >= 0.75,
                ),
            ],
        ),
        Part(
            "startup",
            ["startup", f"--model={checkpoint}", "--repeats=2", "--max-model-len=4096"],
            90,
            [Goal("8B, page cache: seconds to first token", "< 10", lambda f: f["seconds"]["p50"], lambda x: x < 10)],
        ),
    ]


def tiny_parts(checkpoint: Path) -> list[Part]:
    """The same in small, to see without a GPU that every part runs; there is nothing to reach."""
    small = ["--shape=llama-1m", "--device=cpu", "--num-threads=1"]
    return [
        Part("tests", ["-q", "tests/kernels/test_layout.py"], 120),
        Part("latency", ["latency", *small, "--input-len=16", "--output-len=4", "--repeats=1"], 60),
        Part(
            "throughput",
            ["throughput", *small, "--num-requests=4", "--input-len=8:16", "--output-len=4"],
            60,
            [Goal("output tokens/s", "> 0", _output_rate, lambda x: x > 0)],
        ),
        Part("kernels", ["kernels", "--device=cpu", "--only=norm"], 60),
        Part("startup", ["startup", f"--model={checkpoint}", "--repeats=1", "--device=cpu", "--num-threads=1"], 90),
    ]


def run_part(part: Part, folder: Path) -> Outcome:
    """Run one part to its end or its limit."""
    report = folder / f"{part.name}.json"
    command = [sys.executable, "-m", "pytest", *part.arguments]
    if part.name != "tests":
        command = [sys.executable, "-m", "pagefleet_engine.bench.cli", *part.arguments, f"--json={report}"]
    print(f"=== {part.name} (at most {part.seconds:.0f} s)", flush=True)
    began = time.monotonic()
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=part.seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return Outcome(part, part.seconds, "too slow")
    seconds = time.monotonic() - began
    if code != 0:
        return Outcome(part, seconds, "failed")
    return Outcome(part, seconds, "ok", json.loads(report.read_text()) if report.exists() else None)


def table(outcomes: Sequence[Outcome]) -> str:
    """Parts with their times, then the goals."""
    lines = [f"{'part':<18} {'status':<9} seconds"]
    lines += [f"{outcome.part.name:<18} {outcome.status:<9} {outcome.seconds:7.1f}" for outcome in outcomes]
    lines += ["", f"{'goal':<46} {'target':>10} {'reached':>10}"]
    for outcome in outcomes:
        for goal in outcome.part.goals:
            if outcome.report is None:
                lines.append(f"{goal.what:<46} {goal.target:>10} {'-':>10}  not measured: {outcome.status}")
            else:
                value = goal.read(outcome.report["figures"])
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


def make_checkpoint(folder: Path, shape: str, device: str) -> None:
    """An unquantized checkpoint of random weights; freshly written files are in the page cache.

    Where that fails, the part that wants it says so.
    """
    command = [sys.executable, str(ROOT / "bench" / "make_checkpoint.py"), shape, str(folder), f"--device={device}"]
    subprocess.run(command, cwd=ROOT, check=False)


def main() -> int:
    """Returns 1 if tests failed or were too slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="Small parts on the CPU, to try this program itself.")
    parser.add_argument("--only", nargs="+", metavar="PART", help="Run these parts.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        folder = Path(os.environ.get("OUT") or scratch)
        checkpoint = Path(scratch) / "checkpoint"
        parts = tiny_parts(checkpoint) if arguments.tiny else gpu_parts(checkpoint)
        outcomes = []
        for part in parts:
            if arguments.only and part.name not in arguments.only:
                continue
            if part.name == "startup":
                make_checkpoint(
                    checkpoint, "llama-1m" if arguments.tiny else "llama-3.1-8b", "cpu" if arguments.tiny else "cuda"
                )
            outcomes.append(run_part(part, folder))
            write_json(outcomes, folder)
        print("\n" + table(outcomes), flush=True)
    return int(any(outcome.part.name == "tests" and outcome.status != "ok" for outcome in outcomes))


def _output_rate(figures: Figures) -> float:
    return float(figures["output_tokens_per_s"])


def _idle_share(figures: Figures) -> float:
    return float(figures["device_idle_seconds"]) / float(figures["seconds"])


def _share(family: str, size: str) -> Callable[[Figures], float]:
    return lambda figures: float(figures[family][size]["share_of_roofline"])


def _peer(family: str, size: str) -> Callable[[Figures], float]:
    return lambda figures: float(figures[family][size]["times_peer_speed"])


if __name__ == "__main__":
    sys.exit(main())
