"""The settings with which a server keeps a promised latency at the highest rate, found by starting few servers."""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

from pagefleet_engine.bench.datasets import server_counts
from pagefleet_engine.bench.engine_options import add_engine_arguments, engine_settings, model_folder
from pagefleet_engine.bench.goodput import meets
from pagefleet_engine.bench.load_client import Outcome, Target, drive, require_client
from pagefleet_engine.bench.load_client import served_model as first_served
from pagefleet_engine.bench.measured import Measured
from pagefleet_engine.bench.offered_load import (
    add_load_arguments,
    arrival_times,
    check_above_zero,
    check_load,
    offered_load,
)
from pagefleet_engine.bench.report import Report
from pagefleet_engine.bench.server_process import SERVE_COMMAND, flag, started_server
from pagefleet_engine.bench.settings_search import Ended, Point, SettingsSearch, grid_start
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.settings import ENGINE_SETTINGS

DEFAULT_AXES = ("max_num_batched_tokens=512,1024,2048,4096,8192", "max_num_seqs=32,64,128,256,512")
SHARE = 0.9
"""Of a load's requests, those that must keep the promise."""
_MOST_POINTS = 4096
_FEWEST_REQUESTS, _NUM_PROBES = 20, 3
_EXACTNESS = 1.02
_FIRST_STEP, _MOST_STEPS_DOWN = 1.25, 4

Axes = dict[str, list[Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    add = parser.add_argument
    add("model_to_tune", metavar="MODEL", nargs="?", help="As --model.")
    add("--slo-ttft-ms", type=float, required=True, metavar="MS", help="Promised time to the first token.")
    add("--slo-itl-ms", type=float, required=True, metavar="MS", help="Promised mean gap between a request's tokens.")
    add(
        "--tune",
        action="append",
        metavar="NAME=V1,V2",
        help=f"A setting of the engine and its candidates. Repeatable. Default: {' and '.join(DEFAULT_AXES)}.",
    )
    add("--max-trials", type=int, default=12, help="Servers that are started. Default: 12.")
    add("--load-seconds", type=float, default=20.0, help="Of arrivals per load; a trial has some six. Default: 20.")
    add("--server-command", help="What starts a server, as 'numactl -N 0 pagefleet serve'. Default: pagefleet serve.")
    add_load_arguments(parser)
    add_engine_arguments(parser)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a server did with some settings."""

    settings: Mapping[str, Any]
    goodput: float
    """Highest rate at which the promise was kept, requests/s."""
    num_loads: int
    failure: str = ""
    """Why goodput is 0."""


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark. Ctrl-C ends the search and reports the best so far."""
    axes = _check(arguments)
    defaults = {name: setting.default for name, setting in ENGINE_SETTINGS.items()}
    search = SettingsSearch([len(values) for values in axes.values()], grid_start(axes, defaults), arguments.max_trials)
    trials: dict[Point, Trial] = {}
    print(_row(axes, [*axes, "goodput, 1/s", "loads"]))
    try:
        with model_folder(arguments) as (model, options):
            server = [*_server_command(arguments), model, *map(flag, options, options.values())]
            while not isinstance(point := search.next(), Ended):
                settings = {name: values[place] for (name, values), place in zip(axes.items(), point, strict=True)}
                best_rate = max((trial.goodput for trial in trials.values()), default=0.0)
                trial = _measure(arguments, server, settings, best_rate)
                trials[point] = trial
                search.tell(point, trial.goodput)
                values = [*settings.values(), f"{trial.goodput:.3g}", trial.num_loads]
                print(_row(axes, values), trial.failure, flush=True)
            ended = point.why
    except KeyboardInterrupt:
        ended = "interrupted"
    best = search.best()
    if best is None:
        why = next((trial.failure for trial in trials.values()), "no trial was made")
        raise ConfigError(f"no settings kept the promise ({ended}); the first trial: {why}")
    return _report(arguments, list(trials.values()), trials[best], ended)


def _report(arguments: argparse.Namespace, trials: Sequence[Trial], best: Trial, ended: str) -> Report:
    figures: dict[str, Any] = {"trials": len(trials), "ended": ended, "best": dict(best.settings)}
    figures["best_goodput_requests_per_s"] = best.goodput
    if trials[0].goodput:
        figures["best_over_first_trial"] = best.goodput / trials[0].goodput
    fixed = {**engine_settings(arguments), **best.settings}
    start = arguments.server_command or "pagefleet serve"
    figures["command"] = f"{start} {shlex.join([arguments.model or 'MODEL', *map(flag, fixed, fixed.values())])}"
    names = ("slo_ttft_ms", "slo_itl_ms", "tune", "max_trials", "load_seconds", "burstiness", "dataset_name")
    settings = {name: getattr(arguments, name) for name in (*names, "workload_seed")}
    rows = [
        {
            "settings": dict(trial.settings),
            "goodput_requests_per_s": trial.goodput,
            "loads": trial.num_loads,
            **({"failure": trial.failure} if trial.failure else {}),
        }
        for trial in trials
    ]
    settings["model"] = arguments.shape or arguments.model
    return Report(name="tune", settings=settings, figures=figures, rows=rows)


def _row(axes: Axes, cells: Sequence[object]) -> str:
    widths = [max(len(name), 12) for name in (*axes, "goodput, 1/s", "loads")]
    return "  ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _check(arguments: argparse.Namespace) -> Axes:
    check_above_zero(arguments, "slo_ttft_ms", "slo_itl_ms", "max_trials", "load_seconds", "burstiness", "vocab_size")
    require_client()
    if arguments.model_to_tune and (arguments.model or arguments.shape):
        raise ConfigError("the model is given twice: name it once")
    arguments.model = arguments.model_to_tune or arguments.model
    arguments.tune = arguments.tune or list(DEFAULT_AXES)
    axes: Axes = {}
    for text in arguments.tune:
        name, values = parse_axis(text)
        if name in axes or name in engine_settings(arguments):
            raise ConfigError(f"--tune {name}: it is given already, so take one of the two away")
        axes[name] = values
    if math.prod(map(len, axes.values())) > _MOST_POINTS:
        raise ConfigError(f"--tune asks for more than {_MOST_POINTS} combinations: give fewer candidates")
    arguments.num_requests = _FEWEST_REQUESTS
    check_load(arguments)  # its mistakes are told before a server is started
    return axes


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """From "max_num_seqs=32,64": the setting and its candidates, numbers rising.

    Raises:
        ConfigError: the engine has no such setting, it cannot have such a value, or there is nothing to choose.
    """
    word, _, listed = text.partition("=")
    name = word.strip().removeprefix("--").replace("-", "_")
    setting = ENGINE_SETTINGS.get(name)
    if setting is None or setting.is_list or name == "model":
        raise ConfigError(f"--tune has {text[:60]!r}: give a setting of the engine, as max_num_seqs=32,64,128")
    try:
        values = list(dict.fromkeys(setting.parse(value.strip(), name) for value in listed.split(",")))
    except ValueError as error:
        raise ConfigError(f"--tune: {error}") from None
    if len(values) < 2:
        raise ConfigError(f"--tune has {text[:60]!r}: give at least two candidates, as max_num_seqs=32,64,128")
    return name, sorted(values) if all(isinstance(value, (int, float)) for value in values) else values


def _server_command(arguments: argparse.Namespace) -> list[str]:
    return shlex.split(arguments.server_command) if arguments.server_command else list(SERVE_COMMAND)


def _measure(
    arguments: argparse.Namespace, server: Sequence[str], settings: Mapping[str, Any], best_rate: float
) -> Trial:
    """Start a server with the settings and find its rate; one that fails has goodput 0."""
    with tempfile.TemporaryFile() as log, ExitStack() as stack:
        loads: _Loads | None = None
        try:
            port = stack.enter_context(started_server([*server, *map(flag, settings, settings.values())], log))
            loads = _Loads(arguments, f"http://127.0.0.1:{port}/v1")
            rate = loads.probe()
            goodput = highest_rate(lambda one: loads.share_kept(one) >= SHARE, best_rate or rate, best_rate)
        except (ConfigError, _TrialFailed) as error:
            said = "" if isinstance(error, _PromiseBroken) else _last_line(log)
            return Trial(settings, 0.0, loads.count if loads else 0, said or str(error))
    return Trial(settings, goodput, loads.count, "" if goodput else "the promise was kept at no rate")


class _TrialFailed(Exception):
    """The server answers nothing any more."""


class _PromiseBroken(_TrialFailed):
    """It answers, but too late even with nothing else to do."""


class _Loads:
    """Loads of one server: other prompts each time, which no cache knows, with the same pattern of arrivals."""

    def __init__(self, arguments: argparse.Namespace, base_url: str) -> None:
        self._arguments = arguments
        name = asyncio.run(first_served(base_url, None))
        self._target = Target(base_url, name)
        self._count_tokens = server_counts(base_url, name, None)
        self._slo = {"ttft": arguments.slo_ttft_ms / 1e3, "tpot": arguments.slo_itl_ms / 1e3}
        self._num_asked = 0
        self.count = 0

    def probe(self) -> float:
        """Some requests one after another, the first to warm up; returns the rate at which they were answered."""
        answers = self._measure([0.0] * _NUM_PROBES, max_concurrency=1).answers[1:]
        late = [answer for answer in answers if not meets(answer.timing, self._slo)]
        if len(late) == len(answers):
            timing = late[0].timing
            raise _PromiseBroken(
                f"a request alone breaks the promise: TTFT {timing.ttft * 1e3:.0f} ms, ITL {timing.tpot * 1e3:.0f} ms"
            )
        return 1.0 / min(answer.timing.e2e for answer in answers)

    def share_kept(self, rate: float) -> float:
        """Of the requests of a load at so many per second, those that were served as promised."""
        arguments = self._arguments
        count: int = max(_FEWEST_REQUESTS, round(rate * arguments.load_seconds))
        arrivals = list(arrival_times(count, rate, arguments.burstiness, arguments.workload_seed))
        found = self._measure(arrivals, max_concurrency=None)
        self.count += 1
        kept = sum(meets(timing, self._slo) for timing in found.timings)
        return kept / (len(found.answers) + found.failures.total())

    def _measure(self, arrivals: Sequence[float], max_concurrency: int | None) -> Measured:
        self._num_asked += 1
        requests = offered_load(self._arguments, self._count_tokens, arrivals, self._num_asked)
        outcomes: list[Outcome] = []
        load = drive(self._target, requests, max_concurrency, lambda _, outcome: outcomes.append(outcome))
        found = Measured.of(outcomes, asyncio.run(load))
        if len(found.answers) < min(2, len(arrivals)):
            raise _TrialFailed(f"no request was answered: {found.failures.most_common(1)[0][0]}")
        return found


def highest_rate(holds: Callable[[float], bool], first: float, best: float = 0.0) -> float:
    """The highest rate that holds, within 2 %: growing steps from `first`, then bisection; 0 if even 1/28 of it fails.

    Where the rate is sure to be under `best`, a third of the distance to that is exact enough.
    """
    low, high, rate, step = 0.0, math.inf, first, _FIRST_STEP
    for steps_down in range(1000):
        if holds(rate):
            low = rate
        else:
            high = rate
        if low and high < math.inf:
            if high / low <= max(_EXACTNESS, (best / high) ** (1 / 3)):
                return low
            rate = math.sqrt(low * high)
        elif low == 0.0 and steps_down == _MOST_STEPS_DOWN:
            return 0.0
        else:
            rate = rate * step if low else rate / step
            step *= step
    return low


def _last_line(log: IO[bytes]) -> str:
    """What the server said last."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
