"""Two tensor ranks, and two stages, with a core each against one process with two threads, in turns on one machine.

With `--vllm-python` vLLM's tensor ranks against its one process too, at the settings that suit it best.
"""

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

from bench.engines.client import EngineProcess, EngineSpec
from bench.models import LLAMA_125M, llama_checkpoint
from bench.report import write_report

VOCAB_SIZE = 32_000
Seconds = dict[str, list[float]]


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


def vllm_ways(arguments: argparse.Namespace, model: Path) -> dict[str, EngineProcess]:
    """One process with a thread per core, and ranks with a core each."""
    cores = [str(core) for core in range(arguments.ranks)]
    preload = {"LD_PRELOAD": ":".join(arguments.vllm_preload)} if arguments.vllm_preload else {}
    options = {"dtype": arguments.dtype, "max_model_len": 2048, "enable_prefix_caching": False}
    found = {}
    for way, size, bound in (("one_process", 1, ",".join(cores)), ("ranks", arguments.ranks, "|".join(cores))):
        env = {"VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_CPU_KVCACHE_SPACE": "1"} | preload
        more = {**options, "tensor_parallel_size": size}
        spec = EngineSpec(f"vllm-{way}", "vllm", arguments.vllm_python, more, env)
        found[way] = EngineProcess(spec, model, Path(tempfile.gettempdir()) / f"bench-{spec.name}.log")
    return found


def speed_of(way: str, seconds: Seconds) -> float:
    """Median over rounds, of one process's."""
    return statistics.median(one / many for one, many in zip(seconds["one_process"], seconds[way], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--vllm-preload", nargs="*", default=[], help="libraries that vLLM advises to preload")
    parser.add_argument("--output", default="tensor_ranks.json")
    args = parser.parse_args()
    ways = {"one_process": {}, "ranks": {"tensor_parallel_size": args.ranks}}
    ways["stages"] = {"pipeline_parallel_size": args.ranks}
    with tempfile.TemporaryDirectory() as folder:
        model = llama_checkpoint(Path(folder) / "llama", LLAMA_125M)
        settings = {"device": "cpu", "dtype": args.dtype, "num_kv_blocks": 1024, "num_threads": args.ranks}
        settings |= {"enable_prefix_caching": False}
        engines = {name: LLM(str(model), **settings, **way) for name, way in ways.items()}
        peers = vllm_ways(args, model) if args.vllm_python else {}
    figures: dict[str, object] = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    for name, workload in workloads(args.requests).items():
        seconds: Seconds = {way: [] for way in ways}
        theirs: Seconds = {way: [] for way in peers}
        for turn in range(args.rounds + 1):  # the first warms up
            for way, engine in engines.items():
                took = run_once(engine, workload)
                seconds[way] += [took] if turn else []
            for way, peer in peers.items():
                took, _ = peer.generate(workload.prompts, workload.output_lens)
                theirs[way] += [took] if turn else []
        found: dict[str, object] = {"ratio": speed_of("ranks", seconds), "stages_ratio": speed_of("stages", seconds)}
        found |= {f"{way}_s": took for way, took in seconds.items()}
        if peers:
            found |= {"vllm_ratio": speed_of("ranks", theirs)} | {f"vllm_{way}_s": took for way, took in theirs.items()}
        figures[name] = found
        print(f"{name}: {found}")
    for engine in engines.values():
        engine.shutdown()
    for peer in peers.values():
        peer.close()
    write_report(args.output, "tensor_ranks", figures)


if __name__ == "__main__":
    main()
