"""What routers cost, ours beside the peers that are installed: requests per CPU-second, added time, hits, memory.

Fake engines, load and routers share this machine, and one router runs at a time. Rounds go through the routers in
turning order; figures are medians over rounds. "Added" is through the router less direct, in the same round.

    python bench/router.py --json bench/results/router.json --sglang-router .peers/bin/sglang-router \\
        --pagefleet-compiled .compiled/bin/pagefleet-route \\
        --vllm-router .peers/bin/vllm-router --production-stack .stack/bin/vllm-router
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import write_report
from bench.router_scenarios import SCENARIOS, Place, Scenario
from bench.routers import ROUTERS, RouterSpec, RunningRouter, installed, raise_open_files

Rounds = dict[str, dict[str, list[float]]]
"""Router -> figure -> its value in each round."""


def measure(scenario: Scenario, specs: Sequence[RouterSpec], programs: Mapping[str, str], rounds: int) -> Rounds:
    """Run one scenario over all routers."""
    figures: Rounds = {spec.name: defaultdict(list) for spec in specs}
    engines = subprocess.Popen(scenario.engines_command(), stdout=subprocess.PIPE, text=True)
    try:
        assert engines.stdout is not None
        ports = [int(word) for word in engines.stdout.readline().split()[1:]]
        for number in range(rounds):
            for at in range(len(specs)):
                spec = specs[(at + number) % len(specs)]
                with (
                    tempfile.TemporaryDirectory() as folder,
                    RunningRouter(spec, programs, ports, Path(folder)) as router,
                ):
                    found = uvloop.run(scenario.run(Place(router, ports)))
                for name, value in found.items():
                    figures[spec.name][name].append(value)
    finally:
        engines.kill()
        engines.wait()
    return figures


def show(name: str, figures: Rounds) -> None:
    """Print one scenario's medians."""
    routers = list(figures)
    print(f"\n{name:46}" + "".join(f"{router:>18}" for router in routers), flush=True)
    for figure in {figure: None for values in figures.values() for figure in values}:
        row = [statistics.median(figures[router][figure]) if figures[router][figure] else None for router in routers]
        print(f"{figure:46}" + "".join(f"{'-' if value is None else f'{value:,.2f}':>18}" for value in row))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for spec in ROUTERS:
        parser.add_argument(f"--{spec.program}", help=f"Program of {spec.name}.")
    parser.add_argument("--only", help="Routers, with commas between.")
    parser.add_argument("--scenarios", help=f"Of {', '.join(one.name for one in SCENARIOS)}; with commas between.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    raise_open_files()
    programs = installed({spec.program: getattr(arguments, spec.program.replace("-", "_")) for spec in ROUTERS})
    wanted = set(arguments.only.split(",")) if arguments.only else {spec.name for spec in ROUTERS}
    specs = [spec for spec in ROUTERS if spec.name in wanted and spec.program in programs]
    chosen = set(arguments.scenarios.split(",")) if arguments.scenarios else {one.name for one in SCENARIOS}
    results = {}
    for scenario in SCENARIOS:
        if scenario.name in chosen:
            results[scenario.name] = measure(scenario, specs, programs, arguments.rounds)
            show(scenario.name, results[scenario.name])
    if arguments.json:
        medians = {
            name: {
                router: {figure: statistics.median(values) for figure, values in found.items()}
                for router, found in rounds.items()
            }
            for name, rounds in results.items()
        }
        write_report(arguments.json, "router", {"median": medians, "rounds": results})


if __name__ == "__main__":
    main()
