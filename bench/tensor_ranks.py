"""Two ranks with a core each against one process with two threads, in turns on the same machine: 125M Llama shape."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagefleet_engine import LLM
from pagefleet_engine.bench.offline import run_once
from pagefleet_engine.bench.workloads import Workload

from bench.models import LLAMA_125M, llama_checkpoint
from bench.report import write_report

VOCAB_SIZE = 32_000


def workloads() -> dict[str, Workload]:
    """By name; greedy and to the full lengths."""
    rng = random.Random(0)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))

    mixed = [(prompt(rng.randint(32, 256)), rng.randint(16, 128)) for _ in range(32)]
    return {
        "requests_32": Workload([p for p, _ in mixed], [n for _, n in mixed]),
        "one_stream": Workload([prompt(32)], [64]),
        "first_token_of_1088": Workload([prompt(1088)], [1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", default="tensor_ranks.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(llama_checkpoint(Path(folder) / "llama", LLAMA_125M))
        settings = {"device": "cpu", "dtype": args.dtype, "num_kv_blocks": 1024, "num_threads": args.ranks}
        settings |= {"enable_prefix_caching": False}
        alone = LLM(model, **settings)
        ranks = LLM(model, tensor_parallel_size=args.ranks, **settings)
    figures: dict[str, object] = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    for name, workload in workloads().items():
        seconds: list[tuple[float, float]] = []
        for turn in range(args.rounds + 1):
            one, many = run_once(alone, workload), run_once(ranks, workload)
            if turn:
                seconds.append((one, many))
        ratio = statistics.median(one / many for one, many in seconds)
        figures[name] = {"ratio": ratio, "one_process_s": [a for a, _ in seconds], "ranks_s": [b for _, b in seconds]}
        print(f"{name}: {ratio:.2f} of one process's speed; seconds {seconds}")
    ranks.shutdown()
    alone.shutdown()
    write_report(args.output, "tensor_ranks", figures)


if __name__ == "__main__":
    main()
