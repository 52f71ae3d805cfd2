"""Compiled products with matrices in 4 and 8 bits, and layers of experts in them, against what they stand for in
bfloat16, by the fastest products and experts of the processor; in turns.

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
from pagefleet_engine.layers.matrix import PlainMatrix
from pagefleet_engine.layers.moe.native_experts import NativeExperts
from pagefleet_engine.layers.moe.routing import Routes
from pagefleet_engine.layers.quantization.coded import TABLES
from pagefleet_engine.layers.quantization.kernels import NativeLinear
from pagefleet_kernels.coded_matmul import CodedWeights
from pagefleet_kernels.native.experts import PackedExperts, RoundedExperts
from pagefleet_kernels.native.library import load_library
from pagefleet_kernels.native.quantized import PackedProduct
from pagefleet_kernels.packed_matmul import PackedWeights, pack_numbers

from bench.native_kernels import COPIED, in_turns
from bench.report import write_report

SHAPES = [(3072, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
"""Outputs and inputs of a layer's matrices in a Llama of 1B."""
LAYERS = 4
"""Which no cache holds; a model of 1B has 16."""
Weights = PackedWeights | CodedWeights
Make = Callable[[int, int], Weights]
"""Of outputs and inputs."""
ROWS = (1, 16, 512)
EXPERTS, HIDDEN, WIDTH, TOP_K = 128, 2048, 768, 8
"""A layer of Qwen3 30B A3B."""


def numbers_of(bits: int, group: int | None, has_zeros: bool, outputs: int, inputs: int) -> PackedWeights:
    """Random ones."""
    numbers = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    shape = outputs, 1 if group is None else inputs // group
    zeros = torch.randint(0, 1 << bits, shape, dtype=torch.uint8) if has_zeros else None
    return PackedWeights(pack_numbers(numbers, bits), torch.rand(shape) / inputs, zeros, bits, group)


def codes_of(table: torch.Tensor | None, group: int, scale: torch.dtype, outputs: int, inputs: int) -> CodedWeights:
    """Random ones; scales of uint8 are powers of two."""
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // group) + 0.5
    scales = (120 + scales).to(scale) if scale == torch.uint8 else scales.to(scale)
    return CodedWeights(pack_numbers(codes, 4), table, scales, None, group)


KINDS: dict[str, Make] = {
    "4 bits, groups of 128, zero points (AWQ)": partial(numbers_of, 4, 128, True),
    "4 bits, groups of 32 (Q4_0)": partial(numbers_of, 4, 32, False),
    "8 bits, groups of 32 (Q8_0)": partial(numbers_of, 8, 32, False),
    "8 bits, a scale for each row": partial(numbers_of, 8, None, False),
    "codes of 4 bits, groups of 32 (MXFP4)": partial(codes_of, None, 32, torch.uint8),
    "codes of 4 bits, groups of 16 (NVFP4)": partial(codes_of, None, 16, torch.float8_e4m3fn),
    "codes of 4 bits, groups of 64 (nf4)": partial(codes_of, torch.tensor(TABLES["nf4"]), 64, torch.float32),
}
EXPERT_KINDS = (
    "4 bits, groups of 128, zero points (AWQ)",
    "4 bits, groups of 32 (Q4_0)",
    "codes of 4 bits, groups of 32 (MXFP4)",
    "8 bits, a scale for each row",
)


@torch.inference_mode()
def measure(make: Make, rounds: int) -> dict[str, dict[str, float]]:
    """All matrices of some layers, one after the other."""
    library = load_library()[0]
    ours: list[LinearKernel] = []
    theirs: list[LinearKernel] = []
    read = 0
    for outputs, inputs in SHAPES * LAYERS:
        weights = make(outputs, inputs)
        product = PackedProduct(library, weights)
        read += product.nbytes
        ours.append(NativeLinear(product))
        theirs.append(linear_kernel(weights.dequantize().bfloat16(), library))
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


@torch.inference_mode()
def measure_experts(make: Make, rounds: int) -> dict[str, dict[str, float]]:
    """A layer of experts, each row by its own; the memory of all is more than caches hold."""
    library = load_library()[0]
    ours = RoundedExperts(library, EXPERTS, HIDDEN, WIDTH, "silu", torch.bfloat16)
    theirs = NativeExperts(PackedExperts(library, EXPERTS, HIDDEN, WIDTH, "silu", torch.bfloat16), EXPERTS)
    read = 0
    for expert in range(EXPERTS):
        weights = [make(WIDTH, HIDDEN), make(WIDTH, HIDDEN), make(HIDDEN, WIDTH)]
        products = [PackedProduct(library, one) for one in weights]
        read += sum(product.nbytes for product in products)
        ours.put_gate_up(expert, products[0], products[1])
        ours.put_down(expert, products[2])
        gate, up, down = (one.dequantize().bfloat16() for one in weights)
        theirs.install_gate_up(expert, PlainMatrix(torch.cat((gate, up))))
        theirs.install_down(expert, PlainMatrix(down))
    found = {}
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN).bfloat16()
        chosen = torch.rand(rows, EXPERTS).topk(TOP_K).indices.to(torch.int32)
        routes = Routes(torch.rand(rows, TOP_K), chosen)
        runs: dict[str, Callable[[], object]] = {
            "native": partial(ours, x, routes.weights_TK, routes.experts_TK),
            "bf16": partial(theirs, x, routes),
        }
        for run in runs.values():
            run()
        taken = in_turns(runs, rounds)
        used = read * len(set(chosen.flatten().tolist())) / EXPERTS
        found[f"{rows} rows"] = {
            "native_ms": round(median(taken["native"]) * 1e3, 3),
            "bf16_ms": round(median(taken["bf16"]) * 1e3, 3),
            "times_bf16": round(median(b / a for a, b in zip(taken["native"], taken["bf16"], strict=True)), 2),
            "read_gb_per_s": round(used / median(taken["native"]) / 1e9, 2),
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
    named = {name: partial(measure, make) for name, make in KINDS.items()}
    named |= {f"experts, {name}": partial(measure_experts, KINDS[name]) for name in EXPERT_KINDS}
    for name, run in named.items():
        found[name] = run(arguments.rounds)
        for rows, figures in found[name].items():
            print(name, rows, figures, f"load {os.getloadavg()[0]:.1f}", flush=True)
    if arguments.json:
        facts = {"threads": arguments.threads, "instruction_set": load_library()[0].instruction_set}
        write_report(arguments.json, "native_products", {**facts, "load": os.getloadavg()[0], "found": found})


if __name__ == "__main__":
    main()
