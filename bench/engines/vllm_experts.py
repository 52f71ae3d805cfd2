"""vLLM's layer of experts on this CPU, in a process of its own Python: `VllmExperts` asks, the rest answers there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any


class VllmExperts:
    """One process that computes a layer when it is told to."""

    def __init__(self, python: str, threads: int) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def make(self, shape: tuple[int, int, int, int], dtype: Any) -> None:
        """A layer with random weights: hidden size, width, experts, experts of a token."""
        self._ask({"shape": shape, "dtype": str(dtype).removeprefix("torch.")})

    def seconds(self, tokens: int) -> float:
        """Of computing it once."""
        return float(self._ask({"tokens": tokens}))

    def _ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve() -> None:
    """Answer until stdin closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints must not mix with the answers
    import torch
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    current_platform.import_kernels()
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight  # type: ignore[import-not-found]

    kind = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    layer: Any = None
    inputs: dict[int, Any] = {}
    with torch.inference_mode():
        for line in sys.stdin:
            question = json.loads(line)
            if "shape" in question:
                hidden, width, experts, top_k = question["shape"]
                shapes = (experts, 2 * width, hidden), (experts, hidden, width)
                dtype = getattr(torch, question["dtype"])
                layer = [cpu_prepack_moe_weight((torch.randn(each) * 0.02).to(dtype), kind) for each in shapes]
                inputs.clear()
                answers.write("null\n")
                continue
            tokens = question["tokens"]
            if tokens not in inputs:
                weights, index = torch.randn(tokens, experts).softmax(-1).topk(top_k, -1)
                x = torch.randn(tokens, hidden).to(dtype)
                inputs[tokens] = torch.empty_like(x), x, *layer, None, None, weights, index.int(), "silu", kind
            started = time.perf_counter()
            cpu_fused_moe(*inputs[tokens])
            answers.write(json.dumps(time.perf_counter() - started) + "\n")


if __name__ == "__main__":
    serve()
