"""What requests ask for: token ids at random, lengths as wanted, the same for the same seed. Never a text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_engine.errors import ConfigError

FIRST_TOKEN = 10
"""Smaller ids are often special."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, generator: random.Random) -> int:
        """One length."""
        return generator.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order."""

    prompts: Sequence[Sequence[int]]
    output_lens: Sequence[int]

    @property
    def num_input_tokens(self) -> int:
        """Over all requests."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Over all requests."""
        return sum(self.output_lens)


def parse_lengths(flag: str, text: str) -> Lengths:
    """From "512" or "100:1024".

    Raises:
        ConfigError: it is neither, or less than 1.
    """
    low, _, high = text.partition(":")
    try:
        lengths = Lengths(int(low), int(high or low))
    except ValueError:
        lengths = Lengths(0, 0)
    if not 1 <= lengths.low <= lengths.high:
        raise ConfigError(f"--{flag} is {text[:40]!r}: give a length of at least 1, or a range as 100:1024")
    return lengths


def make_workload(
    num_requests: int, inputs: Lengths, outputs: Lengths, vocab_size: int, *, shared_prefix: int = 0, seed: int = 0
) -> Workload:
    """Requests whose first `shared_prefix` tokens are the same (on top of the input lengths)."""
    generator = random.Random(seed)  # noqa: S311 nothing is kept secret
    last = max(vocab_size - 1, FIRST_TOKEN)

    def tokens(count: int) -> list[int]:
        return generator.choices(range(min(FIRST_TOKEN, last), last + 1), k=count)

    prefix = tokens(shared_prefix)
    prompts = [prefix + tokens(inputs.draw(generator)) for _ in range(num_requests)]
    return Workload(prompts, [outputs.draw(generator) for _ in range(num_requests)])
