"""What a server is offered: the requests of a dataset, or conversations, and when each of them arrives."""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pagefleet_engine.bench.conversations import add_conversation_arguments, read_conversations
from pagefleet_engine.bench.datasets import CountTokens, add_dataset_arguments, check_dataset, read_dataset
from pagefleet_engine.bench.load_client import Asked
from pagefleet_engine.errors import ConfigError


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """What requests ask, and how they arrive."""
    add = parser.add_argument
    add("--burstiness", type=float, default=1.0, help="1: Poisson arrivals; less: bursts; more: steadier. Default: 1.")
    add("--input-len", default="512", help="Tokens per prompt, or a range as 100:1024. Default: 512.")
    add("--output-len", default="128", help="Tokens per answer, or a range. Default: 128.")
    add("--shared-prefix", type=int, default=0, help="Tokens that all prompts begin with. Default: 0.")
    add("--vocab-size", type=int, default=1000, help="Prompts are of ids under this. Default: 1000.")
    add("--workload-seed", type=int, default=0, help="Of prompts and arrivals. Default: 0.")
    add_dataset_arguments(add)
    add_conversation_arguments(add)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """How hard a server is pressed."""

    rate: float
    """Requests per second; infinite: all at once."""
    max_concurrency: int | None

    def __str__(self) -> str:
        parts = [] if math.isinf(self.rate) else [f"{self.rate:g}/s"]
        if self.max_concurrency is not None:
            parts.append(f"{self.max_concurrency} at once")
        return ", ".join(parts) or "all at once"


def load_points(arguments: argparse.Namespace) -> Sequence[LoadPoint]:
    """Every rate with every concurrency, in the order given.

    Raises:
        ConfigError: one is no number, or not over 0.
    """
    rates, limits = _numbers("request-rate", arguments.request_rate), list[int | None]([None])
    if arguments.max_concurrency is not None:
        numbers = _numbers("max-concurrency", arguments.max_concurrency)
        if any(number < 1 or number % 1 for number in numbers):
            raise ConfigError(f"--max-concurrency is {arguments.max_concurrency}: give whole numbers of at least 1")
        limits = [int(number) for number in numbers]
    return [LoadPoint(rate, limit) for rate, limit in itertools.product(rates, limits)]


def _numbers(flag: str, text: str) -> list[float]:
    """From "1,2,4".

    Raises:
        ConfigError: one is no number, or not over 0.
    """
    found = []
    for part in text.split(","):
        try:
            found.append(float(part))
        except ValueError:
            raise ConfigError(f"--{flag} has {part[:40]!r}: give a number, or several as 1,2,4") from None
        if not found[-1] > 0:
            raise ConfigError(f"--{flag} is {found[-1]}: give more than 0")
    return found


def check_load(arguments: argparse.Namespace) -> None:
    """Raise ConfigError where nothing can be offered; of a broken line of a file, with its number."""
    _reader(arguments)


def offered_load(
    arguments: argparse.Namespace, count: CountTokens, arrivals: Sequence[float], number: int
) -> Sequence[Asked]:
    """Return the requests of one run, which arrive then.

    Args:
        arguments: of the command.
        count: the server's tokens in a text.
        arrivals: seconds from the start, one per request or conversation.
        number: of the run: each has other prompts, which no cache knows. Texts of a file do repeat.
    """
    seed = arguments.workload_seed + number
    given = argparse.Namespace(**{**vars(arguments), "num_requests": len(arrivals), "workload_seed": seed})
    return [replace(asked, at=at) for asked, at in zip(_reader(given)(count), arrivals, strict=True)]


def _reader(arguments: argparse.Namespace) -> Callable[[CountTokens], Sequence[Asked]]:
    if arguments.multi_turn:
        check_dataset(arguments)
        return read_conversations(arguments)
    make = read_dataset(arguments)
    return lambda count: [Asked(prompt, length) for prompt, length in make(count)]


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


def check_above_zero(arguments: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError where one of these flags is 0 or less."""
    for name in names:
        if getattr(arguments, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: give more than 0")
