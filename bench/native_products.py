"""Compiled products with matrices in 4 and 8 bits against oneDNN's of what they stand for in bfloat16, in turns.

python bench/native_products.py --json bench/results/native_products.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_engine.layers.linear_kernel import LinearKernel, linear_kernel
from pagefleet_engine.layers.quantization.kernels import NativeLinear
from pagefleet_kernels.native.library import load_library
from pagefleet_kernels.native.quantized import PackedProduct
from pagefleet_kernels.packed_matmul import PackedWeights, pack_numbers

from bench.native_kernels import COPIED, in_turns
from bench.report import write_report

SHAPES = [(3072, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
"""Outputs and inputs of a layer's matrices in a Llama of 1B."""
LAYERS = 4
"""Which no cache holds; a model of 1B has 16."""
KINDS: dict[str, tuple[int, int | None, bool]] = {
    "4 bits, groups of 128, zero points (AWQ)": (4, 128, True),
    "4 bits, groups of 32 (Q4_0)": (4, 32, False),
    "8 bits, groups of 32 (Q8_0)": (8, 32, False),
    "8 bits, a scale for each row": (8, None, False),
}
ROWS = (1, 16, 512)


def make_weights(outputs: int, inputs: int, bits: int, group: int | None, has_zeros: bool) -> PackedWeights:
    """Random numbers."""
    numbers = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    shape = outputs, 1 if group is None else inputs // group
    zeros = torch.randint(0, 1 << bits, shape, dtype=torch.uint8) if has_zeros else None
    return PackedWeights(pack_numbers(numbers, bits), torch.rand(shape) / inputs, zeros, bits, group)


@torch.inference_mode()
def measure(kind: tuple[int, int | None, bool], rounds: int) -> dict[str, dict[str, float]]:
    """All matrices of some layers, one after the other."""
    library = load_library()[0]
    ours: list[LinearKernel] = []
    theirs: list[LinearKernel] = []
    read = 0
    for outputs, inputs in SHAPES * LAYERS:
        weights = make_weights(outputs, inputs, *kind)
        product = PackedProduct(library, weights)
        read += product.nbytes
        ours.append(NativeLinear(product))
        theirs.append(linear_kernel(weights.dequantize().bfloat16()))
    source = torch.ones(COPIED, dtype=torch.uint8)
    target = torch.ones_like(source)
    found = {}
    for rows in ROWS:
        x = {inputs: torch.randn(rows, inputs).bfloat16() for _, inputs in SHAPES}

        def multiply(kernels: list[LinearKernel], x: dict[int, torch.Tensor] = x) -> None:
            for kernel, (_, inputs) in zip(kernels, SHAPES * LAYERS, strict=True):
                kernel.linear(x[inputs], None)

        runs: dict[str, Callable[[], object]] = {
            "native": partial(multiply, ours),
            "torch": partial(multiply, theirs),
            "copy": lambda: target.copy_(source),
        }
        for run in runs.values():
            run()
        taken = in_turns(runs, rounds)
        shares = [read / a / (2 * COPIED / copy) for a, copy in zip(taken["native"], taken["copy"], strict=True)]
        products = rows * sum(outputs * inputs for outputs, inputs in SHAPES) * LAYERS
        found[f"{rows} rows"] = {
            "native_ms": round(median(taken["native"]) * 1e3, 3),
            "bf16_ms": round(median(taken["torch"]) * 1e3, 3),
            "times_bf16": round(median(b / a for a, b in zip(taken["native"], taken["torch"], strict=True)), 2),
            "billion_products_per_s": round(products / median(taken["native"]) / 1e9, 1),
            "read_gb_per_s": round(read / median(taken["native"]) / 1e9, 2),
            "share_of_copy": round(median(shares), 2),
        }
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        found[name] = measure(kind, arguments.rounds)
        for rows, figures in found[name].items():
            print(name, rows, figures, f"load {os.getloadavg()[0]:.1f}", flush=True)
    if arguments.json:
        facts = {"threads": arguments.threads, "instruction_set": load_library()[0].instruction_set}
        write_report(arguments.json, "native_products", {**facts, "load": os.getloadavg()[0], "found": found})


if __name__ == "__main__":
    main()
