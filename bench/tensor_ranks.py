"""Two tensor ranks, and two stages, with a core each against one process with two threads, in turns on one machine."""

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


def workloads(num_requests: int) -> dict[str, Workload]:
    """By name; greedy and to the full lengths."""
    rng = random.Random(0)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))

    mixed = [(prompt(rng.randint(32, 256)), rng.randint(16, 128)) for _ in range(num_requests)]
    return {
        f"requests_{num_requests}": Workload([p for p, _ in mixed], [n for _, n in mixed]),
        "one_stream": Workload([prompt(32)], [64]),
        "first_token_of_1088": Workload([prompt(1088)], [1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output", default="tensor_ranks.json")
    args = parser.parse_args()
    ways = {"one_process": {}, "ranks": {"tensor_parallel_size": args.ranks}}
    ways["stages"] = {"pipeline_parallel_size": args.ranks}
    with tempfile.TemporaryDirectory() as folder:
        model = str(llama_checkpoint(Path(folder) / "llama", LLAMA_125M))
        settings = {"device": "cpu", "dtype": args.dtype, "num_kv_blocks": 1024, "num_threads": args.ranks}
        settings |= {"enable_prefix_caching": False}
        engines = {name: LLM(model, **settings, **way) for name, way in ways.items()}
    figures: dict[str, object] = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    for name, workload in workloads(args.requests).items():
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(args.rounds + 1):
            for way, engine in engines.items():
                took = run_once(engine, workload)
                if turn:
                    seconds[way].append(took)
        alone = seconds["one_process"]
        ratios = {
            way: statistics.median(one / many for one, many in zip(alone, seconds[way], strict=True)) for way in ways
        }
        figures[name] = {
            "ratio": ratios["ranks"],
            "stages_ratio": ratios["stages"],
            **{f"{way}_s": found for way, found in seconds.items()},
        }
        print(f"{name}: {ratios['ranks']:.2f}, in stages {ratios['stages']:.2f} of one process's speed; {seconds}")
    for engine in engines.values():
        engine.shutdown()
    write_report(args.output, "tensor_ranks", figures)


if __name__ == "__main__":
    main()
