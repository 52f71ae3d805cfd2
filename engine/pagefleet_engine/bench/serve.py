"""A server under a load that arrives as users do: latencies by percentile, and goodput at a target."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefleet_engine.bench.engine_options import add_engine_arguments, model_folder
from pagefleet_engine.bench.goodput import Timing, goodput, meets, parse_slo
from pagefleet_engine.bench.load_client import Answer, Asked, Failure, Outcome, Target, drive, served_model
from pagefleet_engine.bench.percentiles import summary
from pagefleet_engine.bench.plot import plot_distributions, require_matplotlib
from pagefleet_engine.bench.report import Report
from pagefleet_engine.bench.workloads import make_workload, parse_lengths
from pagefleet_engine.errors import ConfigError

if TYPE_CHECKING:
    from pagefleet_engine.bench.offline import Subject
import random

_START_TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    add = parser.add_argument
    add("--base-url", help="Of a running OpenAI server, ending in /v1; default: start one with --model or --shape.")
    add("--served-name", help="Model to ask for. Default: the first that the server lists.")
    add("--api-key", help="Default: the environment's OPENAI_API_KEY.")
    add("--num-requests", type=int, default=200, help="Default: 200.")
    add("--request-rate", type=float, default=math.inf, help="Requests per second. Default: all at once.")
    add("--burstiness", type=float, default=1.0, help="1: Poisson arrivals; less: bursts; more: steadier. Default: 1.")
    add("--max-concurrency", type=int, help="Requests on their way at once. Default: no limit.")
    add("--input-len", default="512", help="Tokens per prompt, or a range as 100:1024. Default: 512.")
    add("--output-len", default="128", help="Tokens per answer, or a range. Default: 128.")
    add("--shared-prefix", type=int, default=0, help="Tokens that all prompts begin with. Default: 0.")
    add("--vocab-size", type=int, default=1000, help="Prompts are of ids under this. Default: 1000.")
    add("--slo", nargs="+", default=[], metavar="MEASURE:MS", help="Promised latencies, as ttft:500 tpot:50 e2e:9000.")
    add("--workload-seed", type=int, default=0, help="Of prompts and arrivals. Default: 0.")
    add("--plot", metavar="FILE", help="Draw the distributions as PNG.")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark."""
    _check(arguments)
    slo = parse_slo(arguments.slo)
    inputs = parse_lengths("input-len", arguments.input_len)
    outputs = parse_lengths("output-len", arguments.output_len)
    count, seed = arguments.num_requests, arguments.workload_seed
    workload = make_workload(
        count, inputs, outputs, arguments.vocab_size, shared_prefix=arguments.shared_prefix, seed=seed
    )
    arrivals = arrival_times(count, arguments.request_rate, arguments.burstiness, seed)
    requests = list(map(Asked, workload.prompts, workload.output_lens, arrivals))
    api_key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    with ExitStack() as stack:
        subject = None
        if arguments.base_url:
            base_url = arguments.base_url.rstrip("/")
        else:
            model, options = stack.enter_context(model_folder(arguments))
            subject = _subject(model, options)
            base_url = stack.enter_context(_server(model, options))
        name = arguments.served_name or asyncio.run(served_model(base_url, api_key))
        outcomes: list[Outcome] = []
        with _progress(count) as advance:

            def done(_: int, outcome: Outcome) -> None:
                outcomes.append(outcome)
                advance()

            target = Target(base_url, name, api_key)
            seconds = asyncio.run(drive(target, requests, arguments.max_concurrency, done))
    timings = [outcome.timing for outcome in outcomes if isinstance(outcome, Answer)]
    failures = Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Failure))
    if not timings:
        raise ConfigError(f"no request was answered; most often: {failures.most_common(1)[0][0]}")
    if arguments.plot:
        plot_distributions(_latencies_ms(timings), "pagefleet bench serve", Path(arguments.plot))
    names = ("num_requests", "request_rate", "burstiness", "max_concurrency", "input_len", "output_len")
    settings = {key: _plain(getattr(arguments, key)) for key in (*names, "shared_prefix", "workload_seed")}
    settings["model"] = arguments.shape or name
    figures = _figures(timings, failures, slo, seconds)
    if subject is not None:
        output_lens = [len(timing.token_times) for timing in timings]
        input_lens = [timing.num_input_tokens for timing in timings]
        floor = subject.cost.batch_seconds(subject.roofline, input_lens, output_lens)
        figures["share_of_roofline"] = floor / seconds
    return Report(
        name="serve",
        settings=settings | {"slo_ms": arguments.slo},
        figures=figures,
        roofline=None if subject is None else subject.roofline,
    )


def _subject(model: str, options: dict[str, Any]) -> Subject:
    """The model and this machine, measured before the server takes its memory."""
    from pagefleet_engine.bench.offline import Subject  # noqa: PLC0415 torch

    return Subject.of(model, options)


def _figures(
    timings: Sequence[Timing], failures: Counter[str], slo: dict[str, float], seconds: float
) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "completed": len(timings),
        "failed": sum(failures.values()),
        "seconds": seconds,
        "requests_per_s": len(timings) / seconds,
        "output_tokens_per_s": sum(len(timing.token_times) for timing in timings) / seconds,
        "input_tokens_per_s": sum(timing.num_input_tokens for timing in timings) / seconds,
    }
    figures |= {f"{name}_ms": summary(values) for name, values in _latencies_ms(timings).items()}
    if slo:
        figures["goodput_requests_per_s"] = goodput(timings, slo, seconds)
        kept = sum(meets(timing, slo) for timing in timings)
        figures["goodput_share"] = kept / (len(timings) + figures["failed"])
    if failures:
        figures["failures"] = dict(failures.most_common(5))
    return figures


def _latencies_ms(timings: Sequence[Timing]) -> dict[str, list[float]]:
    return {
        "ttft": [timing.ttft * 1e3 for timing in timings],
        "tpot": [timing.tpot * 1e3 for timing in timings if len(timing.token_times) > 1],
        "itl": [gap * 1e3 for timing in timings for gap in timing.itl],
        "e2e": [timing.e2e * 1e3 for timing in timings],
    }


def _check(arguments: argparse.Namespace) -> None:
    for flag in ("num_requests", "request_rate", "burstiness", "vocab_size"):
        if getattr(arguments, flag) <= 0:
            raise ConfigError(f"--{flag.replace('_', '-')} is {getattr(arguments, flag)}: give more than 0")
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {arguments.max_concurrency}: give at least 1")
    try:
        import aiohttp  # noqa: F401, PLC0415 an extra
    except ImportError:
        raise ConfigError("this benchmark needs aiohttp: pip install 'pagefleet-engine[bench]'") from None
    if arguments.plot:
        require_matplotlib()


@contextmanager
def _server(model: str, options: dict[str, Any]) -> Iterator[str]:
    """The base URL of a server that lives as long as this."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [_flag(name, value) for name, value in options.items()]
    process = subprocess.Popen([sys.executable, "-m", "pagefleet_engine.cli", model, "--port", str(port), *flags])
    try:
        _wait_until_ready(process, port)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def _flag(name: str, value: object) -> str:
    """A setting as `pagefleet serve` takes it."""
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{word}" if value else f"--no-{word}"
    return f"--{word}={value}"


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    give_up_at = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise ConfigError("the server did not start: what it said stands above")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ConfigError(f"the server was not ready within {_START_TIMEOUT_S:.0f} s")


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    from tqdm import tqdm  # noqa: PLC0415 --help must not wait for it

    with tqdm(total=total, unit="request", disable=not sys.stderr.isatty()) as bar:
        yield lambda: bar.update(1)


def _plain(value: object) -> object:
    """As JSON can say it."""
    return "all at once" if value == math.inf else value


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start, rising.

    Gaps are gamma distributed with mean 1 / rate and shape `burstiness`: 1 is a Poisson process, less is burstier,
    more is steadier. An infinite rate sends everything at 0.
    """
    generator = random.Random(seed)  # noqa: S311 nothing is kept secret
    now = 0.0
    for _ in range(num_requests):
        yield now
        if not math.isinf(rate):
            now += generator.gammavariate(burstiness, 1.0 / (rate * burstiness))
