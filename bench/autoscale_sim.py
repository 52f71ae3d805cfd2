"""Simulates autoscaling: pagefleet's own decision beside peers and a fixed number of engines, on the same arrivals.

    python bench/autoscale_sim.py --seeds 5 --json bench/results/autoscale_sim.json --plot docs

Engines take 60 to 120 s to start. Nothing is tuned per trace or per seed for pagefleet; peers that need a number of
requests per engine get the one that eight engines have at the edge of the targets, measured beforehand for each trace.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagefleet_operator.autoscale.decide import decide
from pagefleet_operator.autoscale.demand import EnginesSeen
from pagefleet_operator.autoscale.policy import ScalingPolicy
from pagefleet_operator.autoscale.signals import FleetWindow
from pagefleet_operator.autoscale.state import begin

from bench.autoscale_fleet import ITL_S, TICK_S, TTFT_S, Fleet
from bench.autoscale_peers import PEERS, Peer
from bench.autoscale_traces import Trace, traces
from bench.report import write_report

START_UP_S = (60.0, 120.0)
MOST = 8
FLAP_S = 600.0
"""Engines that go and come back, or come and go, within so long a time, though the load did not."""
LOOK_AHEAD_S = 180.0
"""Load that engines are fetched for before it comes: two starts of an engine."""
_LOOK_TICKS = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one policy on one trace."""

    trace: str
    policy: str
    seed: int
    requests: int
    within_targets: float
    late_first_tokens: float
    mean_engines: float
    most_engines: int
    changes: int
    turns: int
    """Changes of direction."""
    quick_turns: int
    """Those within FLAP_S, whatever the load did."""
    flaps: int
    """Those within FLAP_S that no change of the load by an engine's worth explains."""
    line: list[tuple[float, int]] = field(default_factory=list)
    """Wanted engines over time."""


class Pagefleet:
    """The real decision, fed as the operator feeds it."""

    def __init__(self, engines: int) -> None:
        self._window = FleetWindow()
        self._policy = ScalingPolicy(min=1, max=MOST, ttft_s=TTFT_S, itl_s=ITL_S)
        self._state = begin(engines, 0.0)

    def wanted(self, fleet: Fleet, now: float) -> int:
        self._window.add("router", fleet.reading(now), now)
        ready = len(fleet.ready(now))
        seen = EnginesSeen(
            ready=ready,
            warming=len(fleet.serving()) - ready,
            start_up_s=max(fleet.started[-3:]) if fleet.started else None,
        )
        decision = decide(self._policy, self._window.signals(["router"], now), seen, self._state, now)
        self._state = decision.state
        return decision.desired


Scaler = Callable[[Fleet, float], int]


def simulate(trace: Trace, name: str, seed: int, begin_with: int, scaler: Scaler | None) -> tuple[Outcome, Fleet]:
    """Run one policy; without a scaler the number stays as it is."""
    fleet = Fleet(begin_with, START_UP_S, random.Random(f"fleet {trace.name} {seed}"))
    arrivals = trace.requests(seed)
    coming = next(arrivals, None)
    line = [(0.0, begin_with)]
    for tick in range(int((trace.seconds + 60) / TICK_S)):
        now = tick * TICK_S
        while coming is not None and coming.at <= now:
            fleet.arrive(coming)
            coming = next(arrivals, None)
        fleet.advance(now)
        if scaler is not None and tick % _LOOK_TICKS == 0:
            wanted = max(1, min(MOST, scaler(fleet, now)))
            if wanted != line[-1][1]:
                line.append((now, wanted))
                fleet.scale(wanted, now)
    return _outcome(trace, name, seed, fleet, line), fleet


def _outcome(trace: Trace, name: str, seed: int, fleet: Fleet, line: list[tuple[float, int]]) -> Outcome:
    steps = [(at, after - before) for (_, before), (at, after) in pairwise(line)]
    turns = [(before_at, at, step) for (before_at, before), (at, step) in pairwise(steps) if before * step < 0]
    quick = [turn for turn in turns if turn[1] - turn[0] < FLAP_S]
    load = trace.load(seed)
    seen = fleet.seen
    return Outcome(
        trace=trace.name,
        policy=name,
        seed=seed,
        requests=seen.arrivals,
        within_targets=seen.good / seen.arrivals,  # what has not ended a minute after the last arrival is late
        late_first_tokens=seen.late_first / max(1, seen.done),
        mean_engines=fleet.paid_s / (trace.seconds + 60),
        most_engines=max(count for _, count in line),
        changes=len(steps),
        turns=len(turns),
        quick_turns=len(quick),
        flaps=sum(not _explained(load, *turn) for turn in quick),
        line=line,
    )


def _explained(load: Callable[[float], float], before_at: float, at: float, step: int) -> bool:
    """Return whether the load itself turned by an engine's worth between two opposite steps, or soon after a rise."""
    between = [load(before_at + share * (at - before_at) / 20) for share in range(21)]
    if step < 0:
        return (max(between) - between[-1]) * MOST >= 1
    coming = [load(at + share * LOOK_AHEAD_S / 20) for share in range(21)]
    return (max(coming) - min(between)) * MOST >= 1


def _edge(trace: Trace, seed: int) -> float:
    """Return the requests per engine that eight engines have in the busiest tenth of the trace."""
    counts: list[float] = []

    def watch(fleet: Fleet, now: float) -> int:
        counts.append(sum(one.requests for one in fleet.ready(now)) / MOST)
        return MOST

    simulate(trace, "edge", seed, MOST, watch)
    busiest = sorted(counts)[-len(counts) // 10 :]
    return sum(busiest) / len(busiest)


def run_case(trace_name: str, seed: int, only: Sequence[str]) -> list[Outcome]:
    """Run every policy on one trace with one seed."""
    (trace,) = (one for one in traces() if one.name == trace_name)
    begin_with = 2 if trace.name != "bursts" else 4
    outcomes = []
    if not only or "pagefleet" in only:
        outcomes.append(simulate(trace, "pagefleet", seed, begin_with, Pagefleet(begin_with).wanted)[0])
    for count in (7, 8):
        if not only or f"static {count}" in only:
            outcomes.append(simulate(trace, f"static {count}", seed, count, None)[0])
    edge = _edge(trace, seed) if any(not only or name in only for name in PEERS) else 0.0
    for name, make in PEERS.items():
        if not only or name in only:
            peer: Peer = make(edge, begin_with)
            outcomes.append(simulate(trace, name, seed, begin_with, peer.wanted)[0])
    return outcomes


def _summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by policy and trace, means over the seeds, and the worst of what has to hold."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    policies = list(dict.fromkeys(one.policy for one in outcomes))
    for policy in policies:
        mine = [one for one in outcomes if one.policy == policy]
        for trace in [*dict.fromkeys(one.trace for one in mine), "all"]:
            rows = [one for one in mine if trace in ("all", one.trace)]
            count = len(rows)
            table.setdefault(policy, {})[trace] = {
                "within_targets": sum(one.within_targets for one in rows) / count,
                "within_targets_worst_seed": min(one.within_targets for one in rows),
                "mean_engines": sum(one.mean_engines for one in rows) / count,
                "mean_engines_worst_seed": max(one.mean_engines for one in rows),
                "changes": sum(one.changes for one in rows) / count,
                "turns": sum(one.turns for one in rows) / count,
                "quick_turns": sum(one.quick_turns for one in rows) / count,
                "flaps": sum(one.flaps for one in rows) / count,
            }
    return table


def plot(folder: Path, outcomes: Sequence[Outcome], traces: Sequence[Trace]) -> None:
    """Write docs/autoscaling-engines.svg and docs/autoscaling-peers.svg into a folder."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "pagefleet", "font.size": 8, "axes.spines.top": False})
    figure, axes = plt.subplots(len(traces), 1, figsize=(8, 2 * len(traces)), layout="constrained")
    for axis, trace in zip(axes, traces, strict=True):
        for policy in ("pagefleet", "hpa, requests", "llm-d token-aware"):
            for one in outcomes:
                if (one.trace, one.policy, one.seed) == (trace.name, policy, 1):
                    times, counts = zip(*one.line, strict=True)
                    ends = [at / 60 for at in (*times, trace.seconds)]
                    axis.step(ends, [*counts, counts[-1]], where="post", label=policy)
        axis.set(title=trace.name, ylabel="engines wanted", ylim=(0, 8.5))
    axes[0].legend(ncols=3, frameon=False, loc="upper left")
    axes[-1].set_xlabel("minutes")
    figure.savefig(folder / "autoscaling-engines.svg", metadata={"Date": None})
    figure, axes = plt.subplots(1, len(traces), figsize=(3 * len(traces), 3), sharey=True, layout="constrained")
    for axis, trace in zip(axes, traces, strict=True):
        for policy in dict.fromkeys(one.policy for one in outcomes):
            mine = [one for one in outcomes if (one.trace, one.policy) == (trace.name, policy)]
            paid = sum(one.mean_engines for one in mine) / len(mine)
            reached = sum(one.within_targets for one in mine) / len(mine)
            axis.scatter(paid, 100 * reached, label=policy)
        axis.axhline(96, linewidth=0.5, color="grey")
        axis.set(title=trace.name, xlabel="mean engines")
    axes[0].set_ylabel("% of requests within targets")
    axes[-1].legend(frameon=False)
    figure.savefig(folder / "autoscaling-peers.svg", metadata={"Date": None})
    plt.close("all")


def main() -> None:
    """Run what the command line asks for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="policy; repeatable")
    parser.add_argument("--trace", action="append", default=[], help="trace; repeatable")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="folder for the plots")
    arguments = parser.parse_args()
    names = arguments.trace or [trace.name for trace in traces()]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        cases = [
            pool.submit(run_case, name, seed, tuple(arguments.only))
            for name in names
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        ]
        outcomes = [outcome for case in cases for outcome in case.result()]
    summary = _summary(outcomes)
    shown = ("turns", "quick_turns", "flaps")
    head = f"{'policy':18} {'trace':18} {'within':>7} {'worst':>7} {'engines':>8} {'worst':>6}"
    print(head, *(f"{name:>11}" for name in shown))
    for policy, by_trace in summary.items():
        for trace, row in by_trace.items():
            within = f"{row['within_targets']:7.1%} {row['within_targets_worst_seed']:7.1%}"
            paid = f"{row['mean_engines']:8.2f} {row['mean_engines_worst_seed']:6.2f}"
            print(f"{policy:18} {trace:18} {within} {paid}", *(f"{row[name]:11.1f}" for name in shown))
    if arguments.json:
        rows = [{key: value for key, value in asdict(one).items() if key != "line"} for one in outcomes]
        write_report(arguments.json, "autoscale_sim", {"summary": summary, "runs": json.loads(json.dumps(rows))})
    if arguments.plot:
        plot(arguments.plot, outcomes, traces())


if __name__ == "__main__":
    main()
