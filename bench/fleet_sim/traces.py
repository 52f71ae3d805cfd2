"""The simulated traffic. Every trace is a list of (arrival, first request of a conversation), seeded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from bench.fleet_sim.jobs import BLOCK, Job

Trace = list[tuple[float, Job]]


class Texts:
    """Gives out blocks that nobody else has."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def blocks(self, num_tokens: float) -> list[int]:
        """Return keys for about that many tokens, at least one block."""
        return [self._rng.getrandbits(62) for _ in range(max(1, round(num_tokens / BLOCK)))]


def poisson(rng: random.Random, rate: float, duration: float) -> Iterator[float]:
    """Yield arrivals."""
    now = rng.expovariate(rate)
    while now < duration:
        yield now
        now += rng.expovariate(rate)


def shared_prefixes(
    rng: random.Random, rate: float, duration: float, num_groups: int = 150, prefix: int = 6_000, output: int = 1_000
) -> Trace:
    """llm-d's benchmark of its precise scorer: 150 system prompts of 6,000 tokens, five questions of 1,200 to each."""
    texts = Texts(rng)
    groups = [(texts.blocks(prefix), [texts.blocks(1_200) for _ in range(5)]) for _ in range(num_groups)]
    trace = []
    for at in poisson(rng, rate, duration):
        system, questions = rng.choice(groups)
        trace.append((at, Job([*system, *rng.choice(questions)], output)))
    return trace


def one_prompt(rng: random.Random, rate: float, duration: float) -> Trace:
    """Everybody has the same system prompt of 4,000 tokens; questions are new."""
    texts = Texts(rng)
    system = texts.blocks(4_000)
    return [(at, Job([*system, *texts.blocks(rng.uniform(200, 1_500))], 200)) for at in poisson(rng, rate, duration)]


def conversation(texts: Texts, system: Sequence[int], turns: Sequence[tuple[float, int, float]], session: int) -> Job:
    """Return the first of some turns (new tokens, answer tokens, seconds before the next)."""
    first = last = None
    history = list(system)
    for num_new, num_output, think in turns:
        history = [*history, *texts.blocks(num_new)]
        answer = texts.blocks(num_output)
        job = Job(history, num_output, answer, session, think=think)
        history = [*history, *answer]
        if last is None:
            first = job
        else:
            last.then = job
        last = job
    assert first is not None
    return first


def chats(rng: random.Random, rate: float, duration: float) -> Trace:
    """People who talk: 20 assistants with system prompts of 1,000 tokens, 3 to 10 turns, 10 s to read an answer."""
    texts = Texts(rng)
    systems = [texts.blocks(1_000) for _ in range(20)]
    numbers = itertools.count()

    def talk() -> Job:
        turns = [
            (rng.expovariate(1 / 250), max(16, int(rng.expovariate(1 / 300))), rng.expovariate(0.1))
            for _ in range(rng.randint(3, 10))
        ]
        return conversation(texts, rng.choice(systems), turns, next(numbers))

    return [(at, talk()) for at in poisson(rng, rate, duration)]


def agents(rng: random.Random, rate: float, duration: float) -> Trace:
    """Agents: four kinds, each with 8,000 tokens of tools and instructions, then 8 to 25 calls; contexts to 60k."""
    texts = Texts(rng)
    systems = [texts.blocks(8_000) for _ in range(4)]
    numbers = itertools.count()

    def work() -> Job:
        turns = [
            (rng.choice((300, 800, 2_000, 5_000)), rng.randint(50, 400), rng.uniform(0.5, 4.0))
            for _ in range(rng.randint(8, 25))
        ]
        return conversation(texts, rng.choice(systems), turns, next(numbers))

    return [(at, work()) for at in poisson(rng, rate, duration)]


def bursts(rng: random.Random, rate: float, duration: float) -> Trace:
    """Groups of 4 to 48 requests within 0.3 s with one new prefix of 3,000 tokens, among steady shared prefixes."""
    texts = Texts(rng)
    trace = shared_prefixes(rng, rate * 0.5, duration, num_groups=60, prefix=3_000, output=200)
    size = 20.0
    for at in poisson(rng, rate * 0.5 / size, duration):
        prefix = texts.blocks(3_000)
        for _ in range(rng.choice((4, 8, 20, 48))):
            trace.append((at + rng.uniform(0.0, 0.3), Job([*prefix, *texts.blocks(300)], 200)))
    return sorted(trace, key=lambda entry: entry[0])


TRACES: dict[str, tuple[Callable[[random.Random, float, float], Trace], float]] = {
    "shared prefixes": (shared_prefixes, 12.5),
    "one prompt": (one_prompt, 60.0),
    "chats": (chats, 10.0),
    "agents": (agents, 1.5),
    "bursts": (bursts, 40.0),
    "slow engine": (chats, 8.0),
}
"""Each with the conversations a second that bring eight engines near their limit."""
