"""Servers under a load that arrives as users do: latencies by percentile, goodput at a target, one beside the other."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefleet_engine.bench.comparison import Cell, draw, in_turns, named_urls, ratios, rows, table
from pagefleet_engine.bench.datasets import CountTokens, server_counts
from pagefleet_engine.bench.engine_options import add_engine_arguments, model_folder
from pagefleet_engine.bench.goodput import parse_slo
from pagefleet_engine.bench.load_client import Asked, Outcome, Target, drive, require_client, served_model
from pagefleet_engine.bench.measured import Measured
from pagefleet_engine.bench.offered_load import (
    LoadPoint,
    add_load_arguments,
    arrival_times,
    check_above_zero,
    check_load,
    load_points,
    offered_load,
)
from pagefleet_engine.bench.plot import require_matplotlib
from pagefleet_engine.bench.profiled import profiled
from pagefleet_engine.bench.report import Report
from pagefleet_engine.bench.server_process import SERVE_COMMAND, flag, started_server
from pagefleet_engine.errors import ConfigError

if TYPE_CHECKING:
    from pagefleet_engine.bench.offline import Subject

_WARM_UP = 1_000_000
"""Number of a run before all others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    add = parser.add_argument
    add(
        "--base-url",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="Of a running OpenAI server, ending in /v1; several as NAME=URL are measured in turns. Default: one is "
        "started with --model or --shape.",
    )
    add("--served-name", help="Model to ask for. Default: the first that the server lists.")
    add("--api-key", help="Default: the environment's OPENAI_API_KEY.")
    add("--num-requests", "--num-prompts", type=int, default=200, help="Or conversations, of each run. Default: 200.")
    add("--num-warmups", type=int, default=0, help="Requests to each server before all that counts. Default: 0.")
    add(
        "--request-rate",
        default="inf",
        metavar="R",
        help="Requests per second, or several as 1,2,4. Default: all at once.",
    )
    add("--max-concurrency", metavar="N", help="Requests (conversations) on their way, or several. Default: no limit.")
    add("--rounds", type=int, metavar="N", help="Runs of each server at each load. Default: 1; of several servers, 3.")
    add_load_arguments(parser)
    add(
        *("--slo", "--goodput"),
        nargs="+",
        default=[],
        metavar="MEASURE:MS",
        help="Promised latencies, as ttft:500 tpot:50 e2e:9000.",
    )
    add("--plot", metavar="FILE", help="Draw the distributions, or of several loads latency over throughput, as PNG.")
    add("--profile", action="store_true", help="Have the server record a profile: it needs --profiler-dir.")
    add("--profile-delay", type=float, default=0.0, metavar="S", help="Seconds of the load before it. Default: 0.")
    add("--profile-seconds", type=float, default=5.0, metavar="S", help="That are recorded. Default: 5.")
    add_engine_arguments(parser)


@dataclass(frozen=True, slots=True)
class _Server:
    target: Target
    count: CountTokens


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark."""
    urls, points = _check(arguments)
    slo = parse_slo(arguments.slo)
    api_key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    rounds = arguments.rounds or (3 if len(urls) > 1 else 1)
    with ExitStack() as stack:
        subject = None
        if not urls:
            model, options = stack.enter_context(model_folder(arguments))
            subject = _subject(model, options)
            command = [*SERVE_COMMAND, model, *map(flag, options, options.values())]
            if arguments.profile:
                command.append(f"--profiler-dir={Path('profiles').absolute()}")
            port = stack.enter_context(started_server(command))
            urls = {"server": f"http://127.0.0.1:{port}/v1"}
        servers = {name: _server(url, arguments.served_name, api_key) for name, url in urls.items()}
        session = _Session(arguments, servers)
        for name in servers if arguments.num_warmups else ():
            session.warm_up(name)
        measured: dict[Cell, Measured] = {}
        for number, cell in in_turns(points, list(servers), rounds):
            found = session.measure(number, cell)
            measured[cell] = measured[cell].with_more(found) if cell in measured else found
    measured = {(point, name): measured[point, name] for point in points for name in servers}
    _check_answered(measured)
    if arguments.plot:
        draw(measured, Path(arguments.plot))
    model_name = arguments.shape or next(iter(servers.values())).target.model
    settings = _settings(arguments, rounds) | session.lengths_asked | {"model": model_name, "slo_ms": arguments.slo}
    profile = {"profile": session.profile} if arguments.profile else {}
    roofline = None if subject is None else subject.roofline
    if len(measured) > 1:
        print(table(measured, slo))
        figures = {"runs": rounds * len(measured), **_peaks(measured), **ratios(measured, slo)}
        return Report(name="serve", settings=settings, figures=figures, rows=rows(measured, slo), roofline=roofline)
    (only,) = measured.values()
    figures = only.figures(slo) | profile
    if subject is not None:
        output_lens = [timing.num_output_tokens for timing in only.timings]
        input_lens = [timing.num_input_tokens for timing in only.timings]
        figures["share_of_roofline"] = (
            subject.cost.batch_seconds(subject.roofline, input_lens, output_lens) / only.seconds
        )
    return Report(name="serve", settings=settings, figures=figures, roofline=roofline)


def _server(base_url: str, served_name: str | None, api_key: str | None) -> _Server:
    name = served_name or asyncio.run(served_model(base_url, api_key))
    return _Server(Target(base_url, name, api_key), server_counts(base_url, name, api_key))


class _Session:
    """Measures servers, and remembers what it has asked."""

    def __init__(self, arguments: argparse.Namespace, servers: Mapping[str, _Server]) -> None:
        self._arguments = arguments
        self._servers = servers
        self.profile: str | None = None
        """Where the server has put it."""
        self.lengths_asked: dict[str, Any] = {}
        """Means, as far as they are known before the server counts texts."""

    def warm_up(self, name: str) -> None:
        """Send requests that do not count, all at once."""
        server = self._servers[name]
        requests = offered_load(self._arguments, server.count, [0.0] * self._arguments.num_warmups, _WARM_UP)
        asyncio.run(drive(server.target, requests, None, lambda number, outcome: None))

    def measure(self, number: int, cell: Cell) -> Measured:
        """Measure a server at a load, with the prompts of this number."""
        arguments, (point, name) = self._arguments, cell
        server, outcomes = self._servers[name], list[Outcome]()
        arrivals = arrival_times(arguments.num_requests, point.rate, arguments.burstiness, arguments.workload_seed)
        requests = offered_load(arguments, server.count, list(arrivals), number)
        self.lengths_asked = _lengths_asked(requests)
        total = sum(1 + len(asked.then) for asked in requests)
        with _progress(total, f"{name}, {point}") as advance:

            def done(_: int, outcome: Outcome) -> None:
                outcomes.append(outcome)
                advance()

            seconds = asyncio.run(
                self._timed(server.target, drive(server.target, requests, point.max_concurrency, done))
            )
        return Measured.of(outcomes, seconds)

    async def _timed(self, target: Target, load: Coroutine[Any, Any, float]) -> float:
        if not self._arguments.profile:
            return await load
        delay_s, seconds = self._arguments.profile_delay, self._arguments.profile_seconds
        took, self.profile = await profiled(target, load, delay_s, seconds)
        return took


def _check_answered(measured: Mapping[Cell, Measured]) -> None:
    for server in {server for _, server in measured}:
        found = [one for (_, name), one in measured.items() if name == server]
        if not any(one.answers for one in found):
            reason = found[0].failures.most_common(1)[0][0]
            who = f"{server}: " if len(measured) > 1 else ""
            raise ConfigError(f"{who}no request was answered; most often: {reason}")


def _peaks(measured: Mapping[Cell, Measured]) -> Mapping[str, Any]:
    """The highest throughput of each server, and the load that had it."""
    peaks: dict[str, Any] = {}
    for (point, server), found in measured.items():
        rate = found.num_output_tokens / found.seconds
        if rate > peaks.get(server, {}).get("output_tokens_per_s", -1.0):
            peaks[server] = {"output_tokens_per_s": rate, "at": str(point)}
    return {"peak": peaks}


def _settings(arguments: argparse.Namespace, rounds: int) -> dict[str, Any]:
    names = ("num_requests", "request_rate", "burstiness", "max_concurrency", "workload_seed", "dataset_name")
    turns = ("num_turns", "think_time", "conversation_prefix_len") if arguments.multi_turn else ()
    found = {name: getattr(arguments, name) for name in (*names, *turns)} | {"rounds": rounds}
    return found | ({"request_rate": "all at once"} if arguments.request_rate == "inf" else {})


def _lengths_asked(requests: Sequence[Asked]) -> dict[str, Any]:
    asked = [length for one in requests for length in (one.max_tokens, *(turn.max_tokens for turn in one.then))]
    ids = [len(one.prompt) for one in requests if not isinstance(one.prompt, str)]
    return {"mean_output_len": sum(asked) / len(asked)} | ({"mean_input_len": sum(ids) / len(ids)} if ids else {})


def _subject(model: str, options: dict[str, Any]) -> Subject:
    """The model and this machine, measured before the server takes its memory."""
    from pagefleet_engine.bench.offline import Subject  # noqa: PLC0415 torch

    return Subject.of(model, options)


def _check(arguments: argparse.Namespace) -> tuple[Mapping[str, str], Sequence[LoadPoint]]:
    """Return the servers' URLs and the loads; what cannot work is told before anything is started."""
    check_above_zero(arguments, "num_requests", "burstiness", "vocab_size", "profile_seconds")
    if arguments.rounds is not None:
        check_above_zero(arguments, "rounds")
    urls, points = named_urls(arguments.base_url), load_points(arguments)
    if arguments.profile and (len(urls) > 1 or len(points) > 1 or (arguments.rounds or 1) > 1):
        raise ConfigError("--profile is of one run: give one server, one load and one round")
    require_client()
    if arguments.plot:
        require_matplotlib()
    check_load(arguments)
    return urls, points


@contextmanager
def _progress(total: int, what: str) -> Iterator[Any]:
    from tqdm import tqdm  # noqa: PLC0415 --help must not wait for it

    with tqdm(total=total, unit="request", desc=what, disable=not sys.stderr.isatty()) as bar:
        yield lambda: bar.update(1)
