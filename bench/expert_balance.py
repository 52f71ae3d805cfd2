"""How even ranks' work on experts becomes when these move by load (EPLB), on made-up traces. Needs no model.

    python bench/expert_balance.py

Each layer's experts are wanted by a law of their own: shares fall by a power of their order, which drifts from one
interval to the next. Experts are placed by what a window of steps wanted, and judged by what the next interval wants.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_engine.layers.moe.expert_places import busiest_over_mean, first_places, place_experts, slot_ranges

from bench.report import write_report

INTERVALS, LAYERS, TOKENS = 6, 3, 16_384
"""Tokens of a window, and of what it is judged by."""


@dataclass(frozen=True)
class Shape:
    """Of a model, and of its ranks."""

    experts: int
    top_k: int
    ranks: int
    redundant: int


SHAPES = {
    "DeepSeek V3, 32 ranks": Shape(256, 8, 32, 32),
    "DeepSeek V3, 32 ranks, none redundant": Shape(256, 8, 32, 0),
    "Qwen3 235B, 8 ranks": Shape(128, 8, 8, 16),
    "gpt-oss 120B, 4 ranks": Shape(128, 4, 4, 8),
    "Mixtral, 4 ranks": Shape(8, 2, 4, 4),
}
SKEWS = {"mild": 0.4, "strong": 0.8}
DRIFT = 0.05
"""Deviation by which the logarithm of a share changes from one interval to the next."""


def wanted(logs: np.ndarray, top_k: int, dice: np.random.Generator) -> list[int]:
    """How many of the tokens want each expert: as many different ones each, drawn by their shares."""
    keys = logs + dice.gumbel(size=(TOKENS, len(logs)))
    chosen = np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k]
    counts: list[int] = np.bincount(chosen.ravel(), minlength=len(logs)).tolist()
    return counts


def measure(shape: Shape, skew: float) -> dict[str, float]:
    """Means over layers and intervals but the first, and the worst."""
    dice, slots = np.random.default_rng(0), slot_ranges(shape.experts, shape.redundant, shape.ranks)
    start = first_places(shape.experts, slots)
    before, after, moved, seconds = [], [], [], []
    for _ in range(LAYERS):
        logs, held = dice.permutation(-skew * np.log(np.arange(1, shape.experts + 1))), start
        for _ in range(INTERVALS):
            seen, began = wanted(logs, shape.top_k, dice), time.perf_counter()
            found = place_experts(seen, slots, held)
            seconds.append(time.perf_counter() - began)
            moved.append(sum(one != other for one, other in zip(held, found, strict=True)))
            held = found
            logs = logs + dice.normal(0.0, DRIFT, shape.experts)
            later = wanted(logs, shape.top_k, dice)
            before.append(busiest_over_mean(later, slots, start))
            after.append(busiest_over_mean(later, slots, held))
    return {
        "busiest over mean before": round(float(np.mean(before)), 3),
        "worst before": round(max(before), 3),
        "busiest over mean after": round(float(np.mean(after)), 3),
        "worst after": round(max(after), 3),
        "slots that change in an interval": round(float(np.mean(moved)), 1),
        "ms to plan a layer": round(1000 * float(np.mean(seconds)), 2),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name, shape in SHAPES.items():
        figures = {kind: measure(shape, skew) for kind, skew in SKEWS.items()}
        found[name] = {**asdict(shape), **figures}
        print(name, found[name], flush=True)
    if arguments.json:
        write_report(arguments.json, "expert_balance", {"skews": SKEWS, "drift": DRIFT, "shapes": found})


if __name__ == "__main__":
    main()
