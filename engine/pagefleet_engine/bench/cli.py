"""`pagefleet bench WHAT`: one program, a benchmark per word. Torch is imported by the benchmark that needs it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from pagefleet_protocol.settings.program import FlagError, OneLineParser

from pagefleet_engine.bench.report import Report
from pagefleet_engine.errors import ConfigError, InvalidRequest

BENCHMARKS = {
    "latency": "a batch alone: time to the first token, time per token",
    "throughput": "many requests at once: tokens per second",
    "prefix": "prompts with a common beginning: what the prefix cache saves",
    "startup": "fresh processes: from start to the first token, by phase",
    "serve": "a server under load: latencies by percentile, goodput at a target",
    "tune": "the settings that keep a promised latency at the highest rate, in few trials",
    "kernels": "the GPU kernels one by one, against torch; --tune fills the launch table",
}

_COUNTS = ("batch_size", "num_requests", "repeats")


class Benchmark(Protocol):
    """What the module of a benchmark offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Its own flags."""
        ...

    def run(self, arguments: argparse.Namespace) -> Report:
        """Measure.

        Raises:
            ConfigError: a flag cannot work; the message says what to give.
        """
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit status, 2 for a mistake in the flags."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except (FlagError, ConfigError, InvalidRequest) as error:
        print(f"pagefleet bench: error: {error}", file=sys.stderr)
        return 2


def _run(given: Sequence[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    name, *rest = given
    if name not in BENCHMARKS:
        raise ConfigError(f"{ascii(name)[:80]} is no benchmark: give one of {', '.join(BENCHMARKS)}")
    benchmark: Benchmark = importlib.import_module(f"pagefleet_engine.bench.{name}")
    parser = OneLineParser(prog=f"pagefleet bench {name}", description=BENCHMARKS[name].capitalize() + ".")
    parser.add_argument("--json", metavar="FILE", help="Write the report there.")
    benchmark.add_arguments(parser)
    parsed = parser.parse_args(rest)
    for count in _COUNTS:
        if getattr(parsed, count, 1) < 1:
            raise ConfigError(f"--{count.replace('_', '-')} is {getattr(parsed, count)}: give at least 1")
    folder = os.path.dirname(os.path.abspath(parsed.json or "."))
    if not os.path.isdir(folder):
        raise ConfigError(f"--json: there is no folder {folder}: make it, or give another FILE")
    report = replace(benchmark.run(parsed), command=("pagefleet", "bench", *given))
    print(report.table())
    if parsed.json:
        report.write(parsed.json)
        print(f"written to {os.path.relpath(parsed.json)}")
    return 0


def _usage() -> str:
    lines = [f"  {name:<11} {text}" for name, text in BENCHMARKS.items()]
    return "\n".join(["usage: pagefleet bench WHAT [flags]", "", *lines, "", "Each has a --help of its own."])


if __name__ == "__main__":
    sys.exit(main())
