"""What `gpu_check` runs, and the figures that it asks of a device (the table of docs/performance.md).

Two calls, because a machine is lent for ten minutes at a time: the limits of each call's parts fit into its time.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    "tests/engine/ranks/test_gpu_ranks.py",
    "tests/engine/ranks/test_gpu_peers.py",
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


@dataclass(frozen=True, slots=True)
class Targets:
    """Absolute figures that a kind of device is asked for."""

    per_token_ms: float
    """Llama-3.1-8B, one stream."""
    rate_8b: float
    """Qwen3-8B, output tokens/s with as many requests as `Device.num_requests` says."""
    rate_small: float
    """Qwen3-0.6B, output tokens/s."""


TARGETS = {"H200": Targets(3.7, 8_500, 28_200), "H100": Targets(5.1, 5_000, 20_000)}


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU that the parts are for: its name sets absolute targets, its memory the sizes."""

    name: str
    memory_gib: float

    @property
    def targets(self) -> Targets | None:
        """None for a device of which nothing absolute is asked."""
        return next((targets for name, targets in TARGETS.items() if name in self.name), None)

    @property
    def num_requests(self) -> int:
        """How many requests of 2,048 tokens Qwen3-8B holds at once: a power of two, 256 at most."""
        room = (0.9 * self.memory_gib - _QWEN3_8B_GIB) / _QWEN3_8B_REQUEST_GIB
        return max((count for count in (1 << n for n in range(9)) if count <= room), default=1)


_QWEN3_8B_GIB = 17.5  # weights, activations and graphs
_QWEN3_8B_REQUEST_GIB = 2048 * 144 / 2**20


def absolute(
    device: Device, what: str, sign: str, limit: Callable[[Targets], float], read: Callable[[Figures], float]
) -> Goal:
    """A goal that each kind of device has of its own, `sign` "<=" or ">="; of an unknown one any figure will do."""
    if device.targets is None:
        return Goal(what, "any", read, at_least(0))
    target = limit(device.targets)
    return Goal(what, f"{sign} {target:,}", read, (at_most if sign == "<=" else at_least)(target))


def test_parts() -> list[Part]:
    """The GPU tests. They mostly wait for compilers, so they run side by side where pytest can."""
    kernels, *engine = GPU_TESTS
    return [
        Part("tests: kernels", [*PYTEST, *_side_by_side(12), kernels], 120, reports=False, is_test=True),
        Part("tests: engine", [*PYTEST, *_side_by_side(6), *engine], 60, reports=False, is_test=True),
    ]


def _side_by_side(processes: int) -> Sequence[str]:
    if not importlib.util.find_spec("xdist"):
        return ()
    return "-n", str(min(processes, os.cpu_count() or 1)), "--dist", "worksteal"


def first_parts(device: Device) -> list[Part]:
    """What matters most, in one call: tests, one stream, throughput, kernels."""
    latency = [*BENCH, "latency", "--shape=llama-3.1-8b", "--batch-size=1", "--input-len=500", "--output-len=128"]
    per_token, rate = figure("per_token_ms", "p50"), figure("output_tokens_per_s")
    count = device.num_requests
    return [
        *test_parts(),
        Part(
            "latency",
            [*latency, "--repeats=3", "--max-model-len=4096"],
            80,
            [absolute(device, "Llama-3.1-8B, batch 1: ms per token", "<=", lambda of: of.per_token_ms, per_token)],
        ),
        Part(
            "kernels",
            [*BENCH, "kernels"],
            80,
            [
                Goal(
                    "decode attention 64 x 4096: share of copy", ">= 0.90", _decode("decode attention"), at_least(0.9)
                ),
                Goal("prefill attention 16k / torch's flash", ">= 0.75", _PREFILL, at_least(0.75)),
                Goal("decode, pool by layer / by block (or turn it)", "<= 1.05", _orders, at_most(1.05)),
            ],
        ),
        Part(
            "throughput-8b",
            [*_throughput(count), "--shape=qwen3-8b", "--input-len=1024", "--output-len=1024"],
            110,
            [
                absolute(device, f"Qwen3-8B, {count} x 1024/1024: output tokens/s", ">=", lambda of: of.rate_8b, rate),
                Goal("  GPU idle, share of the run", "< 0.02", _idle_share, at_most(0.02)),
            ],
        ),
        Part(
            "throughput-0.6b",
            [*_throughput(256), "--shape=qwen3-0.6b", "--input-len=100:1024", "--output-len=100:1024"],
            60,
            [absolute(device, "Qwen3-0.6B, 256 x 100..1024: tokens/s", ">=", lambda of: of.rate_small, rate)],
        ),
    ]


def second_parts(checkpoint: Path, folder: Path) -> list[Part]:
    """The rest, in another call.

    `checkpoint`: where an 8B model with random weights is written, and with that into the page cache; `folder`: where
    the launch table goes.
    """
    make = ["bench/make_checkpoint.py", "llama-3.1-8b", str(checkpoint), "--device=cuda"]
    fast = Goal("K/V by cuda_ipc on one GPU: GB/s", "> 10", figure("cuda_ipc", "gb_per_s"), at_least(10))
    tune = ["kernels", f"--tune={folder / 'launch_table.json'}", "--only=decode attention"]
    return [
        Part("kv planes", ["bench/gpu_kv_planes.py", "--seconds=85"], 90, [*_plane_goals("cuda_ipc", "nccl"), fast]),
        Part("checkpoint", make, 40, reports=False),
        Part(
            "startup",
            [*BENCH, "startup", f"--model={checkpoint}", "--repeats=2", "--max-model-len=4096"],
            60,
            [Goal("8B in the page cache: s to first token", "< 10", figure("seconds", "p50"), at_most(10))],
        ),
        Part("transformers", ["bench/peers.py", "--repeats=1", "--seconds=135"], 145, _peer_goals()),
        Part(
            "scheduler",
            ["bench/scheduler.py", "--steps=1000"],
            25,
            [Goal("host ms per step, 256 running", "< 0.5", figure("decode", "step_p50_ms"), at_most(0.5))],
        ),
        Part("attention", [*BENCH, "kernels", f"--only={_FLASH}"], 40, _flash_goals()),
        Part("tuning", [*BENCH, *tune], 115),
    ]


def quick_parts(device: Device) -> list[Part]:
    """Tests, one stream and the kernels: six minutes at most."""
    return first_parts(device)[:4]


_PATIENCE_S = 900.0
"""For a small part, which computes for seconds: a busy machine takes its time."""


def tiny_parts(checkpoint: Path) -> list[Part]:
    """The same in small, to see without a GPU that every part runs; there is nothing to reach."""
    cpu = ["--device=cpu", "--num-threads=1"]
    shape = ["--shape=llama-1m", *cpu]
    rate = [*BENCH, "throughput", *shape, "--num-requests=4", "--input-len=8:16", "--output-len=4"]
    startup = [*BENCH, "startup", f"--model={checkpoint}", "--repeats=1", *cpu]
    peers = ["bench/peers.py", "--tiny", "--shape=llama-1m", "--repeats=1"]
    return [
        *(replace(part, seconds=_PATIENCE_S) for part in test_parts()),
        Part("latency", [*BENCH, "latency", *shape, "--input-len=8", "--output-len=4", "--repeats=1"], _PATIENCE_S),
        Part("kernels", [*BENCH, "kernels", "--device=cpu", "--only=attention"], _PATIENCE_S),
        Part("throughput", rate, _PATIENCE_S, [_any_rate()]),
        Part("kv planes", ["bench/gpu_kv_planes.py", "--seconds=600"], _PATIENCE_S, _plane_goals("tcp")),
        Part("checkpoint", ["bench/make_checkpoint.py", "llama-1m", str(checkpoint)], _PATIENCE_S, reports=False),
        Part("startup", startup, _PATIENCE_S),
        Part("transformers", peers, _PATIENCE_S, _peer_goals()),
        Part("scheduler", ["bench/scheduler.py", "--steps=20", "--running=8"], _PATIENCE_S),
    ]


def _throughput(num_requests: int) -> list[str]:
    sizes = [f"--num-requests={num_requests}", "--max-model-len=4096", "--max-num-batched-tokens=8192"]
    return [*BENCH, "throughput", *sizes]


_FLASH = "attention beside flash"


def _flash_goals() -> list[Goal]:
    """Where `--attention-backend auto` rightly stays with our kernels; `FLASH_IS_FASTER` says where it does not."""
    sizes = [("decode", "1 x 4096"), ("decode", "64 x 4096"), ("decode", "256 x 2048"), ("prefill", "16384")]
    return [
        Goal(
            f"our attention / flash, {kind} {size}",
            ">= 1",
            figure(f"{_FLASH}: {kind}", size, "times_peer_speed"),
            at_least(1),
        )
        for kind, size in sizes
    ]


_PREFILL = figure("prefill attention", "16384", "times_peer_speed")


def _decode(family: str) -> Callable[[Figures], float]:
    return figure(family, "64 x 4096", "share_of_roofline")


def _orders(figures: Figures) -> float:
    return _decode("decode attention, pool by layer")(figures) / _decode("decode attention")(figures)


def _any_rate() -> Goal:
    return Goal("output tokens/s", "> 0", figure("output_tokens_per_s"), at_least(0))


def _peer_goals() -> list[Goal]:
    names = ("generate, one by one", "generate, static batch", "continuous batching", "static cache, compiled")
    return [Goal(f"x transformers: {name}", "> 1", figure(name, "pagefleet_over_peer"), at_least(1)) for name in names]


def _plane_goals(*planes: str) -> list[Goal]:
    """Of a prefill and a decode engine by each plane."""
    return [
        Goal(
            f"P and D here by {plane}: equal answers, by blocks",
            "3 of 3",
            figure(f"engines: {plane}", "equal_answers_from_blocks"),
            at_least(3),
        )
        for plane in planes
    ]


def _idle_share(figures: Figures) -> float:
    return float(figures["device_idle_seconds"]) / float(figures["seconds"])
