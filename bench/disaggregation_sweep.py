"""Two engines for whole requests against one that computes prompts and one that decodes: length of prompts x load.

Both fleets stand behind a router each, with all defaults, and are asked the same requests at the same times, in turns;
so the router decides which prompts the prefill engine computes. Loads are shares of what the two engines for whole
requests answer when they always have enough to do. A request is good if its first token and the pace of the others
are within `TTFT_SLACK` and `TPOT_SLACK` times what it gets alone. Figures are those of one run; answers are compared.

python bench/disaggregation_sweep.py --json bench/results/disaggregation_sweep.json --plot docs/disaggregation.svg
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagefleet_engine.bench.goodput import Timing, goodput, meets
from pagefleet_engine.bench.load_client import (
    Answer,
    Asked,
    Failure,
    Outcome,
    Target,
    complete,
    completed,
    drive,
    new_session,
)
from pagefleet_engine.bench.offered_load import arrival_times
from pagefleet_engine.bench.percentiles import percentile
from pagefleet_engine.bench.workloads import FIRST_TOKEN

from bench.disaggregation_fleet import MODEL, VOCAB_SIZE, EngineLimits, EngineSpec, Fleet, Ports, Process, write_model
from bench.report import write_report

TTFT_SLACK, TPOT_SLACK = 5.0, 2.0
AT_ONCE = 8
"""Requests under way while the load of 1 is measured."""
WARM_UP_REQUESTS = 12
"""Of each length, of either fleet: until processes have the memory that they work in they are slower."""
COLOCATED, PAIR = "colocated", "pair"
FLEETS = {
    COLOCATED: (EngineSpec("whole-0", 0), EngineSpec("whole-1", 1)),
    PAIR: (EngineSpec("prefill", 0, "prefill"), EngineSpec("decode", 1, "decode")),
}

ROWS = (("ttft_p90_ms", "TTFT p90, ms"), ("itl_p99_ms", "ITL p99, ms"), ("good_share", "good requests, share"))
STYLES = (("colocated", "two for whole requests", "--"), ("pair", "prefill and decode apart", "-"))


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a run."""

    input_lens: Sequence[int]
    loads: Sequence[float]
    output_len: int
    seconds: float
    """For which requests arrive, per length and load."""
    chunk: int


class Prompts:
    """Requests of random tokens; no two of a run begin alike, and so nothing of them is cached."""

    def __init__(self, output_len: int) -> None:
        self._draw = random.Random(0)
        self._output_len = output_len

    def make(self, input_len: int, times: Sequence[float]) -> list[Asked]:
        """Return one for each time."""
        return [
            Asked([self._draw.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(input_len)], self._output_len, at)
            for at in times
        ]


@dataclass(frozen=True, slots=True)
class Alone:
    """What one request gets that nothing else disturbs, and what the fleet can do."""

    ttft_s: float
    tpot_s: float
    requests_per_s: float
    """Of both engines, with `AT_ONCE` requests under way."""

    @property
    def limits(self) -> dict[str, float]:
        """Return the promise that a good request keeps."""
        return {"ttft": TTFT_SLACK * self.ttft_s, "tpot": TPOT_SLACK * self.tpot_s}


async def calibrate(router: Process, prompts: Prompts, input_len: int, seconds: float) -> Alone:
    """Measure two engines for whole requests with one request, then with many."""
    alone = []
    async with new_session() as web:
        for asked in prompts.make(input_len, [0.0] * 3):
            answer = completed(await complete(web, f"{router.url}/v1", asked, asked.body(MODEL)))
            alone.append(answer.timing)
    ttft_s, tpot_s = (sorted(getattr(one, name) for one in alone)[1] for name in ("ttft", "tpot"))
    count = max(AT_ONCE, min(200, round(2 * seconds / alone[-1].e2e)))
    return Alone(ttft_s, tpot_s, await rate_at_once(router, prompts.make(input_len, [0.0] * count), AT_ONCE))


async def ask_all(
    router: Process, requests: Sequence[Asked], at_once: int | None = None
) -> tuple[list[Outcome], float]:
    """Send each when it is due, or with a limit when a place is free; what came of each, and the seconds until then."""
    found: dict[int, Outcome] = {}
    seconds = await drive(Target(f"{router.url}/v1", MODEL), requests, at_once, found.__setitem__)
    return [found[number] for number in range(len(requests))], seconds


async def rate_at_once(router: Process, requests: Sequence[Asked], at_once: int) -> float:
    """Requests per second with so many under way until all are answered."""
    outcomes, seconds = await ask_all(router, requests, at_once)
    return len(list(map(completed, outcomes))) / seconds


async def run_cell(
    router: Process, requests: Sequence[Asked], limits: dict[str, float]
) -> tuple[Mapping[str, Any], list[str | None]]:
    """Ask one fleet; returns its figures, and the text of each answer that came."""
    before = choices(router)
    outcomes, seconds = await ask_all(router, requests)
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    if not answers:
        raise RuntimeError(f"nothing was answered: {outcomes[0]}")
    figures = figures_of([answer.timing for answer in answers], seconds, limits)
    failures = [outcome.reason for outcome in outcomes if isinstance(outcome, Failure)]
    passed = {name: count - before.get(name, 0.0) for name, count in choices(router).items()}
    texts = [outcome.text if isinstance(outcome, Answer) else None for outcome in outcomes]
    return {**figures, "failures": failures, "choices": passed}, texts


def figures_of(timings: Sequence[Timing], seconds: float, limits: dict[str, float]) -> dict[str, float]:
    """Return latencies in milliseconds, and requests per second."""
    first = [timing.ttft * 1e3 for timing in timings]
    gaps = [gap * 1e3 for timing in timings for gap in timing.itl]
    return {
        "ttft_p50_ms": percentile(first, 50),
        "ttft_p90_ms": percentile(first, 90),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "longest_gap_p90_ms": percentile([max(timing.itl) * 1e3 for timing in timings], 90),
        "requests_per_s": len(timings) / seconds,
        "good_share": sum(meets(timing, limits) for timing in timings) / len(timings),
        "goodput_requests_per_s": goodput(timings, limits, seconds),
    }


def choices(router: Process) -> dict[str, float]:
    """Return how many requests a router has had computed in which way."""
    return router.metric_by("choice", "pagefleet_router_pd_requests_total")


async def sweep(routers: Mapping[str, Process], settings: Settings) -> dict[str, Any]:
    """Run every length and load; returns the figures."""
    found: dict[str, Any] = {}
    prompts = Prompts(settings.output_len)
    for router, input_len in product(routers.values(), settings.input_lens):
        await rate_at_once(router, prompts.make(input_len, [0.0] * WARM_UP_REQUESTS), 4)
    for number, input_len in enumerate(settings.input_lens):
        alone = await calibrate(routers[COLOCATED], prompts, input_len, settings.seconds)
        cells: dict[str, Any] = {}
        for load in settings.loads:
            rate = load * alone.requests_per_s
            times = arrival_times(1_000_000, rate, 1.0, seed=number)
            requests = prompts.make(input_len, list(takewhile(lambda at: at < settings.seconds, times)))
            cells[f"{load:g}"] = await compare(routers, requests, alone.limits) | {"offered_requests_per_s": rate}
            print_row(input_len, load, cells[f"{load:g}"])
        found[str(input_len)] = {
            "alone_ttft_ms": alone.ttft_s * 1e3,
            "alone_tpot_ms": alone.tpot_s * 1e3,
            "most_requests_per_s": alone.requests_per_s,
            "by_load": cells,
        }
    return found


async def compare(
    routers: Mapping[str, Process], requests: Sequence[Asked], limits: dict[str, float]
) -> dict[str, Any]:
    """Ask both fleets the same, one after the other."""
    cell: dict[str, Any] = {"requests": len(requests)}
    texts = []
    for name in (COLOCATED, PAIR) if len(requests) % 2 else (PAIR, COLOCATED):
        cell[name], answered = await run_cell(routers[name], requests, limits)
        texts.append(answered)
    cell["equal_answers"] = sum(one == other is not None for one, other in zip(*texts, strict=True))
    return cell


def print_row(input_len: int, load: float, cell: Mapping[str, Any]) -> None:
    """Print both fleets' figures."""
    for name in FLEETS:
        shown = "  ".join(f"{key} {value:.4g}" for key, value in cell[name].items() if isinstance(value, float))
        print(
            f"{input_len} tokens, load {load:g}, {name}: {shown} {cell[name]['choices']}",
            *cell[name]["failures"],
            flush=True,
        )
    print(f"    {cell['requests']} requests, {cell['equal_answers']} answers equal", flush=True)


async def run(settings: Settings) -> dict[str, Any]:
    """Start both fleets, measure, end them. The one that is not asked is idle meanwhile."""
    longest = max(settings.input_lens) + settings.output_len + 16
    limits = EngineLimits(longest, settings.chunk, 48 * longest // 16)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagefleet-bench-")))
        model, ports = write_model(folder / "model"), Ports()
        fleets = {
            name: stack.enter_context(Fleet(folder / name, model, specs, limits, ports))
            for name, specs in FLEETS.items()
        }
        for fleet in fleets.values():
            fleet.wait_ready()
        return await sweep({name: fleet.start_router() for name, fleet in fleets.items()}, settings)


def plot_sweep(by_length: Mapping[str, Any], path: Path) -> None:
    """Draw a column for each prompt length and a row for each figure, over the load."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(by_length), 2.2 * len(ROWS)), layout="constrained")
    axes = figure.subplots(len(ROWS), len(by_length), sharex=True, sharey="row", squeeze=False)
    for column, (length, found) in enumerate(by_length.items()):
        loads = [float(load) for load in found["by_load"]]
        for row, (name, label) in enumerate(ROWS):
            axis = axes[row][column]
            for fleet, text, style in STYLES:
                axis.plot(
                    loads, [cell[fleet][name] for cell in found["by_load"].values()], style, marker=".", label=text
                )
            if name.endswith("_ms"):
                axis.set_yscale("log")
            if not column:
                axis.set_ylabel(label)
        axes[0][column].set_title(f"{int(length):,} tokens")
        axes[-1][column].set_xlabel("load")
    axes[-1][0].legend(fontsize=7)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pagefleet"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, print, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-lens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which requests arrive, per length and load")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of one step: small ones disturb less")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    names = ("input_lens", "loads", "output_len", "seconds", "chunk")
    chosen = {name: getattr(arguments, name) for name in names}
    by_length = asyncio.run(run(Settings(**chosen)))
    slack = {"ttft_slack": TTFT_SLACK, "tpot_slack": TPOT_SLACK}
    if arguments.json:
        write_report(arguments.json, "disaggregation_sweep", {"settings": chosen | slack, "by_length": by_length})
    if arguments.plot:
        plot_sweep(by_length, arguments.plot)


if __name__ == "__main__":
    main()
