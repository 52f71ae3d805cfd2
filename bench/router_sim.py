"""Routing policies against simulated engines: ours, by the router's own classes, and others by their descriptions.

No sockets and no GPU: `fleet_sim/engine.py` says what an engine is here, `fleet_sim/peers.py` where the other policies
come from. A run is a few seconds; the same seed gives the same figures.

    python bench/router_sim.py --replicas --json bench/results/router_sim.json --plot docs
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from pagefleet_router.config import PolicyName

from bench.fleet_sim.engine import EngineModel
from bench.fleet_sim.ours import OurRouter
from bench.fleet_sim.peers import PEERS
from bench.fleet_sim.plot import plot_rates, plot_traces
from bench.fleet_sim.run import Fleet, Outcome, Replicas, SimRouter, Simulation, outcome_of
from bench.fleet_sim.traces import TRACES
from bench.report import write_report

NUM_ENGINES = 8
WARM_UP = 0.3
"""Share of the time that is not measured."""
FIRST_SEED = 10
"""Seeds below it, 100, 101 and 200 to 311 were used to choose rules and constants: the report comes from others."""
OURS: dict[str, tuple[PolicyName, bool]] = {
    "auto, KV events": ("auto", True),
    "auto, approximate": ("auto", False),
    "prefix, KV events": ("prefix", True),
    "session": ("session", True),
    "least-load": ("least-load", False),
    "round-robin": ("round-robin", False),
}
"""Policy, and whether engines publish events."""
SWEEP = (
    "auto, KV events",
    "auto, approximate",
    "llm-d precise",
    "llm-d approximate",
    "llm-d estimated (2025)",
    "SGLang cache_aware",
    "least-load",
)
SWEEP_RATES = (6.0, 8.0, 10.0, 12.0, 13.0, 14.0, 16.0)
SHARED = "shared prefixes"
REPLICATED = ("auto, KV events", "auto, approximate", "llm-d precise", "llm-d approximate", "llm-d estimated (2025)")
NUM_REPLICAS = (1, 2, 3)


def make_router(name: str, models: Sequence[EngineModel], seed: int) -> SimRouter:
    """Return a router by the name of its row."""
    if name in OURS:
        return OurRouter(*OURS[name], models, seed)
    return PEERS[name](len(models), models[0].num_blocks, seed)


def fleet_of(trace: str) -> Sequence[EngineModel]:
    """Return the engines: equal, but for the trace in which one is ten times slower."""
    models = [EngineModel()] * NUM_ENGINES
    if trace == "slow engine":
        usual = models[0]
        models[0] = replace(usual, prefill_rate=usual.prefill_rate / 10, step=usual.step * 10)
    return models


def play(name: str, trace: str, rate: float, seconds: float, seed: int, num_replicas: int = 1) -> Outcome:
    """Run one policy on one trace."""
    models = fleet_of(trace)
    make, _ = TRACES[trace]
    router = make_router(name, models, seed)
    if num_replicas > 1:
        others = [make_router(name, models, 1_000 * number + seed) for number in range(1, num_replicas)]
        router = Replicas([router, *others], seed)
    simulation = Simulation(Fleet(models, limit=seconds), router)
    jobs = simulation.run(make(random.Random(seed), rate, seconds))
    return outcome_of(jobs, WARM_UP * seconds, seconds, len(models))


def mean_outcome(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the mean of each figure."""
    figures = [asdict(outcome) for outcome in outcomes]
    return {key: round(fmean(one[key] for one in figures), 4) for key in figures[0]}


def line_of(name: str, figures: dict[str, float]) -> str:
    """Return a row of the table."""
    return (
        f"| {name} | {100 * figures['hit_rate']:.1f} | {figures['ttft_p50']:.2f} | {figures['ttft_p90']:.2f}"
        f" | {figures['ttft_p99']:.2f} | {figures['output_rate']:,.0f} | {figures['imbalance']:.2f} |"
    )


def compare(traces: Sequence[str], names: Sequence[str], seconds: float, seeds: range) -> dict[str, Any]:
    """Run every policy on every trace, and print a table for each."""
    results: dict[str, Any] = {}
    for trace in traces:
        rate = TRACES[trace][1]
        print_head(f"{trace}, {rate:g} conversations/s, {NUM_ENGINES} engines")
        results[trace] = {}
        for name in names:
            figures = mean_outcome([play(name, trace, rate, seconds, seed) for seed in seeds])
            results[trace][name] = figures
            print(line_of(name, figures), flush=True)
    return results


def print_head(title: str) -> None:
    """Begin a table."""
    print(f"\n{title}\n")
    print("| policy | hits, % | TTFT p50, s | p90 | p99 | tokens/s | busiest / mean |")
    print("|---|---:|---:|---:|---:|---:|---:|")


def sweep(names: Sequence[str], seconds: float, seeds: range) -> dict[str, Any]:
    """Run the shared prefixes at rising rates."""
    return {
        name: {
            f"{rate:g}": mean_outcome([play(name, SHARED, rate, seconds, seed) for seed in seeds])
            for rate in SWEEP_RATES
        }
        for name in names
    }


def replicate(names: Sequence[str], seconds: float, seeds: range) -> dict[str, Any]:
    """Run the shared prefixes through one and several replicas of the router."""
    rate = TRACES[SHARED][1]
    results: dict[str, Any] = {}
    for count in NUM_REPLICAS:
        print_head(f"{SHARED}, {rate:g} conversations/s, {count} replicas of the router")
        results[str(count)] = {}
        for name in names:
            figures = mean_outcome([play(name, SHARED, rate, seconds, seed, count) for seed in seeds])
            results[str(count)][name] = figures
            print(line_of(name, figures), flush=True)
    return results


def main() -> None:
    """Run what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=TRACES, action="append", help="Repeatable; default: all.")
    parser.add_argument("--policy", choices=[*OURS, *PEERS], action="append", help="Repeatable; default: all.")
    parser.add_argument("--seconds", type=float, default=200.0, help="Simulated; the first 30 %% are not measured.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--replicas", action="store_true", help="Also with two and three replicas of the router.")
    parser.add_argument("--json", type=Path, help="Write the figures.")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="Draw the traces and a sweep of rates there.")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    results: dict[str, Any] = {
        "traces": compare(args.trace or list(TRACES), args.policy or [*OURS, *PEERS], args.seconds, seeds)
    }
    if args.replicas:
        results["replicas"] = replicate(REPLICATED, args.seconds, seeds)
    if args.plot:
        results["sweep"] = sweep(SWEEP, args.seconds, seeds)
    if args.json:  # before the plots, which would make the commit that it names one with changes
        write_report(args.json, "router_sim", results)
    if args.plot:
        plot_rates(results["sweep"], args.plot / "routing-rates.svg")
        plot_traces(results["traces"], args.plot / "routing-traces.svg")


if __name__ == "__main__":
    main()
