"""Compiled kernels of the CPU against torch's way, in turns, and against what the memory gives.

python bench/native_kernels.py --json bench/results/native_kernels.json

With --threads 1 the thread's own CPU time counts, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_engine.attention.backend import AttentionBackend, AttentionSpec, AttentionStep, BatchGeometry
from pagefleet_engine.attention.native_backend import NativeBackend
from pagefleet_engine.attention.torch_backend import TorchBackend
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.layers.norm import RMSNorm
from pagefleet_engine.layers.rotary import Heads, RotaryEmbedding
from pagefleet_engine.layers.rotary_frequencies import RopeParameters
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.worker.runner_factory import allocate_kv_pool
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.native.library import load_library

from bench.report import write_report

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK_SIZE = 12, 4, 64, 12, 16
"""Of the 125M Llama shape."""
CASES: dict[str, list[tuple[int, int]]] = {
    "decode, 1 row of 128": [(127, 1)],
    "decode, 1 row of 1,024": [(1023, 1)],
    "decode, 16 rows of 128": [(127, 1)] * 16,
    "decode, 32 rows of 1,024": [(1023, 1)] * 32,
    "prompt of 1,088": [(0, 1088)],
    "64 after 1,024": [(1024, 64)],
    "mixed: 31 decodes of 300, 256 after 256": [(299, 1)] * 31 + [(256, 256)],
}
"""Rows of (computed, new) tokens."""
COPIED = 256 << 20


def make_batch(rows: list[tuple[int, int]]) -> BatchGeometry:
    """Blocks in random order, as in a pool that has served for a while."""
    lens, new = [sum(row) for row in rows], [row[1] for row in rows]
    blocks = [-(-length // BLOCK_SIZE) for length in lens]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    table = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
    slots, used = [], 0
    for row, (computed, count) in enumerate(rows):
        table[row, : blocks[row]] = order[used : used + blocks[row]]
        used += blocks[row]
        position = torch.arange(computed, computed + count)
        slots.append(table[row, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    return BatchGeometry(
        starts, torch.tensor(lens, dtype=torch.int32), (table,), (torch.cat(slots),), max(new), new, lens
    )


def in_turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run, one after the other in each round, so that other work meets all alike."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(rounds):
        for name, run in runs.items():
            started = clock()
            run()
            taken[name].append(clock() - started)
    return taken


def compared(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Medians of "native" and "torch", and of their ratio in each round."""
    taken = in_turns(runs, rounds)
    ratios = [theirs / ours for ours, theirs in zip(taken["native"], taken["torch"], strict=True)]
    times = {f"{name}_ms": round(median(seconds) * 1e3, 4) for name, seconds in taken.items()}
    return times | {"times_torch": round(median(ratios), 2)}


@torch.inference_mode()
def measure(rows: list[tuple[int, int]], dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """A step's attention over all layers: each reads other pages, as in a model."""
    batch, groups = make_batch(rows), group_layers([None] * LAYERS)
    num_blocks = sum(-(-sum(row) // BLOCK_SIZE) for row in rows)
    layout = KVLayout(num_blocks, LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    pool = allocate_kv_pool(layout, dtype, torch.device("cpu")).normal_()
    q = torch.randn(sum(row[1] for row in rows), HEADS, HEAD_DIM).to(dtype)
    specs = [AttentionSpec(layer=layer, scale=HEAD_DIM**-0.5) for layer in range(LAYERS)]
    backends: dict[str, AttentionBackend] = {
        "native": NativeBackend(pool, layout, groups, load_library()[0]),
        "torch": TorchBackend(pool, layout, groups),
    }

    def attend(backend: AttentionBackend) -> list[torch.Tensor]:
        step = backend.begin(batch)
        return [step.attend(spec, q) for spec in specs]

    source = torch.ones(COPIED, dtype=torch.uint8)
    target = torch.ones_like(source)
    runs: dict[str, Callable[[], object]] = {
        name: lambda backend=backend: attend(backend)  # type: ignore[misc]
        for name, backend in backends.items()
    }
    runs["copy"] = lambda: target.copy_(source)
    for _ in range(2):
        both = [attend(backend) for backend in backends.values()]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    taken = in_turns(runs, rounds)
    read = sum(map(sum, rows)) * layout.bytes_per_block(dtype) / BLOCK_SIZE
    shares = [(read / ours) / (2 * COPIED / copy) for ours, copy in zip(taken["native"], taken["copy"], strict=True)]
    return {
        "native_ms": round(median(taken["native"]) * 1e3, 3),
        "torch_ms": round(median(taken["torch"]) * 1e3, 3),
        "times_torch": round(median(b / a for a, b in zip(taken["native"], taken["torch"], strict=True)), 2),
        "read_gb_per_s": round(read / median(taken["native"]) / 1e9, 2),
        "copy_gb_per_s": round(2 * COPIED / median(taken["copy"]) / 1e9, 2),
        "share_of_copy": round(median(shares), 2),
    }


@torch.inference_mode()
def measure_layers(num_tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """A norm of the 125M shape's hidden states, and what stands between its projection and attention, of each kind 100
    times."""
    library, cpu = load_library()[0], torch.device("cpu")
    places = {
        "native": Placement(dtype, cpu, use_kernels=False, native=library),
        "torch": Placement(dtype, cpu, use_kernels=False),
    }
    x = torch.randn(num_tokens, HEADS * HEAD_DIM).to(dtype)
    qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    layout, groups = KVLayout(num_tokens, 1, KV_HEADS, BLOCK_SIZE, HEAD_DIM), group_layers([None])
    pool, batch = torch.zeros(layout.shape).to(dtype), make_batch([(0, num_tokens)])
    steps: dict[str, AttentionStep] = {
        "native": NativeBackend(pool, layout, groups, library).begin(batch),
        "torch": TorchBackend(pool, layout, groups).begin(batch),
    }
    heads = Heads(HEADS, KV_HEADS, None, AttentionSpec(layer=0, scale=1.0))
    norms: dict[str, Callable[[], object]] = {}
    rotations: dict[str, Callable[[], object]] = {}
    for name, place in places.items():
        norm = RMSNorm(x.shape[1], 1e-5, place)
        dict(norm.weights())["weight"].fill(0, torch.ones(x.shape[1], dtype=dtype))
        norms[name] = partial(_repeat, partial(norm, x))
        rotary = RotaryEmbedding(RopeParameters(), HEAD_DIM, num_tokens, place).at(torch.arange(num_tokens))
        rotations[name] = partial(_repeat, partial(rotary.prepare, heads, qkv, steps[name]))
    return {"100 norms": compared(norms, rounds), "100 rotations with K/V writes": compared(rotations, rounds)}


def _repeat(run: Callable[[], object]) -> None:
    for _ in range(100):
        run()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        for name, rows in CASES.items():
            figures = measure(rows, dtype, arguments.rounds)
            found.setdefault(kind, {})[name] = figures
            print(kind, name, figures, f"load {os.getloadavg()[0]:.1f}", flush=True)
        for tokens in (1, 16, 256):
            layers = measure_layers(tokens, dtype, arguments.rounds)
            found[kind][f"layers, {tokens} tokens"] = layers
            print(kind, tokens, layers, flush=True)
    if arguments.json:
        facts = {"threads": arguments.threads, "instruction_set": load_library()[0].instruction_set}
        write_report(arguments.json, "native_kernels", {**facts, "load": os.getloadavg()[0], "found": found})


if __name__ == "__main__":
    main()
