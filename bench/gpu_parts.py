"""What `gpu_check` runs, and the figures that it asks of an H200 (the table of docs/performance.md)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]

BENCH = ("-m", "pagefleet_engine.bench.cli")
# Warnings are errors in our tests, but another torch than ours warns of other things.
PYTEST = ("-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:benchmark", "--maxfail=20")
GPU_TESTS = (
    "tests/kernels",
    "tests/engine/worker",
    "tests/engine/loader",
    "tests/kv/offload/test_host_memory.py",
)
"""Folders, or files, of all tests with the marker `gpu`; other folders may want packages that the machine lacks."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure to reach."""

    what: str
    target: str
    read: Callable[[Figures], float]
    """From a report's figures; KeyError where it was not measured."""
    reached: Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class Part:
    """One child process of Python."""

    name: str
    arguments: Sequence[str]
    seconds: float
    """After which it is stopped."""
    goals: Sequence[Goal] = ()
    reports: bool = True
    """Whether it takes --json."""
    is_test: bool = False


def at_least(value: float) -> Callable[[float], bool]:
    """Whether a figure is that or more."""
    return lambda found: found >= value


def at_most(value: float) -> Callable[[float], bool]:
    """Whether a figure is that or less."""
    return lambda found: found <= value


def figure(*path: str) -> Callable[[Figures], float]:
    """Reads the figure at `path`."""

    def read(figures: Figures) -> float:
        found: Any = figures
        for name in path:
            found = found[name]
        return float(found)

    return read


def test_parts() -> list[Part]:
    """The GPU tests. Those of the kernels mostly wait for compilers, so they run side by side where pytest can."""
    side_by_side = ("-n", "12", "--dist", "worksteal") if importlib.util.find_spec("xdist") else ()
    kernels, *engine = GPU_TESTS
    return [
        Part("tests: kernels", [*PYTEST, *side_by_side, kernels], 120, reports=False, is_test=True),
        Part("tests: engine", [*PYTEST, *engine], 80, reports=False, is_test=True),
    ]


def quick_parts() -> list[Part]:
    """Tests, kernels, and one stream: four minutes at most."""
    prefill = figure("prefill attention", "16384", "times_peer_speed")
    decode = figure("decode attention", "64 x 4096", "share_of_roofline")
    latency = [*BENCH, "latency", "--shape=llama-3.1-8b", "--batch-size=1", "--input-len=500", "--output-len=128"]
    return [
        *test_parts(),
        Part(
            "kernels",
            [*BENCH, "kernels"],
            80,
            [
                Goal("decode attention 64 x 4096: share of copy", ">= 0.90", decode, at_least(0.9)),
                Goal("prefill attention 16k / torch's flash", ">= 0.75", prefill, at_least(0.75)),
            ],
        ),
        Part(
            "latency",
            [*latency, "--repeats=3", "--max-model-len=4096"],
            80,
            [Goal("Llama-3.1-8B, batch 1: ms per token", "<= 3.7", figure("per_token_ms", "p50"), at_most(3.7))],
        ),
    ]


def gpu_parts(checkpoint: Path) -> list[Part]:
    """All; `checkpoint`: where an 8B model with random weights is written, and with that into the page cache."""
    throughput = [*BENCH, "throughput", "--num-requests=256", "--max-model-len=4096", "--max-num-batched-tokens=8192"]
    rate = figure("output_tokens_per_s")
    host = figure("decode", "step_p50_ms")
    make = ["bench/make_checkpoint.py", "llama-3.1-8b", str(checkpoint), "--device=cuda"]
    return [
        *quick_parts(),
        Part(
            "throughput-8b",
            [*throughput, "--shape=qwen3-8b", "--input-len=1024", "--output-len=1024"],
            110,
            [
                Goal("Qwen3-8B, 256 x 1024/1024: output tokens/s", "> 8,500", rate, at_least(8500)),
                Goal("  GPU idle, share of the run", "< 0.02", _idle_share, at_most(0.02)),
            ],
        ),
        Part(
            "throughput-0.6b",
            [*throughput, "--shape=qwen3-0.6b", "--input-len=100:1024", "--output-len=100:1024"],
            60,
            [Goal("Qwen3-0.6B, 256 x 100..1024: tokens/s", "> 28,200", rate, at_least(0.6 * 47_000))],
        ),
        Part(
            "scheduler",
            ["bench/scheduler.py", "--steps=1000"],
            30,
            [Goal("host ms per step, 256 running", "< 0.5", host, at_most(0.5))],
        ),
        Part("checkpoint", make, 45, reports=False),
        Part(
            "startup",
            [*BENCH, "startup", f"--model={checkpoint}", "--repeats=2", "--max-model-len=4096"],
            80,
            [Goal("8B in the page cache: s to first token", "< 10", figure("seconds", "p50"), at_most(10))],
        ),
        Part("kv planes", ["bench/gpu_kv_planes.py", "--seconds=55"], 60, _plane_goals()),
        Part("transformers", ["bench/peers.py"], 150, _peer_goals()),
    ]


def tiny_parts(checkpoint: Path) -> list[Part]:
    """The same in small, to see without a GPU that every part runs; there is nothing to reach."""
    cpu = ["--device=cpu", "--num-threads=1"]
    throughput = [*BENCH, "throughput", "--shape=llama-1m", *cpu, "--num-requests=4", "--input-len=8:16"]
    return [
        Part(
            "tests: kernels", ["-m", "pytest", "-q", "tests/kernels/test_layout.py"], 120, reports=False, is_test=True
        ),
        Part("kernels", [*BENCH, "kernels", "--device=cpu", "--only=norm"], 60),
        Part("throughput", [*throughput, "--output-len=4"], 60, [_any_rate()]),
        Part("scheduler", ["bench/scheduler.py", "--steps=20", "--running=8"], 60),
        Part("checkpoint", ["bench/make_checkpoint.py", "llama-1m", str(checkpoint)], 60, reports=False),
        Part("startup", [*BENCH, "startup", f"--model={checkpoint}", "--repeats=1", *cpu], 90),
        Part("kv planes", ["bench/gpu_kv_planes.py", "--seconds=120"], 150),
        Part("transformers", ["bench/peers.py", "--tiny", "--shape=llama-1m", "--repeats=1"], 200, _peer_goals()),
    ]


def _any_rate() -> Goal:
    return Goal("output tokens/s", "> 0", figure("output_tokens_per_s"), at_least(0))


def _peer_goals() -> list[Goal]:
    names = ("generate, one by one", "generate, static batch", "continuous batching", "static cache, compiled")
    return [Goal(f"x transformers: {name}", "> 1", figure(name, "pagefleet_over_peer"), at_least(1)) for name in names]


def _plane_goals() -> list[Goal]:
    same = [
        Goal(
            f"P and D on one GPU by {plane}: equal answers",
            "3 of 3",
            figure(f"engines: {plane}", "equal_answers"),
            at_least(3),
        )
        for plane in ("cuda_ipc", "nccl")
    ]
    return [*same, Goal("K/V by cuda_ipc on one GPU: GB/s", "> 10", figure("cuda_ipc", "gb_per_s"), at_least(10))]


def _idle_share(figures: Figures) -> float:
    return float(figures["device_idle_seconds"]) / float(figures["seconds"])
