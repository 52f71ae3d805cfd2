"""Conversations of several turns, whose questions are known and whose answers are the server's."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagefleet_engine.bench.datasets import (
    CountTokens,
    as_many,
    broken,
    custom_lines,
    random_lengths,
    shared_prefix_len,
    sharegpt_turns,
)
from pagefleet_engine.bench.load_client import Asked, Prompt, Turn
from pagefleet_engine.bench.workloads import Lengths, Workload, make_workload, parse_lengths
from pagefleet_engine.errors import ConfigError

Conversations = list[Asked]
Maker = Callable[[CountTokens], Conversations]


def add_conversation_arguments(add: Callable[..., Any]) -> None:
    """Add the flags of conversations."""
    add(
        "--multi-turn", action="store_true", help="Each request is a conversation: a turn brings the answers before it."
    )
    add(
        "--num-turns",
        default="4",
        metavar="N",
        help="Of a conversation, or a range as 2:6; in a file, those with fewer are left out. Default: 4.",
    )
    add("--think-time", type=float, default=0.0, metavar="S", help="Mean seconds from an answer to the next question.")
    add(
        "--conversation-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="Random ids with which a conversation begins, its own, after those of --shared-prefix. Default: 0.",
    )


def read_conversations(arguments: argparse.Namespace) -> Maker:
    """Read what the flags name.

    Raises:
        ConfigError: a flag cannot work, or the file cannot be read; of a broken line, with its number.
    """
    if arguments.think_time < 0:
        raise ConfigError(f"--think-time is {arguments.think_time:g}: give 0 or more")
    turns = parse_lengths("num-turns", arguments.num_turns)
    if arguments.dataset_name not in _KINDS:
        names = ", ".join(_KINDS)
        raise ConfigError(f"--dataset-name {arguments.dataset_name} has no conversations: give one of {names}")
    if arguments.conversation_prefix_len and arguments.dataset_name != "random":
        raise ConfigError("--conversation-prefix-len is of --dataset-name random: leave it out")
    return _KINDS[arguments.dataset_name](arguments, turns)


def _random(arguments: argparse.Namespace, turns: Lengths) -> Maker:
    draw = random.Random(arguments.workload_seed)  # noqa: S311 nothing is kept secret
    counts = [turns.draw(draw) for _ in range(arguments.num_requests)]
    inputs, outputs = random_lengths(arguments, "input"), random_lengths(arguments, "output")

    def some(count: int, of: Lengths, shared_prefix: int = 0) -> Workload:
        seed = draw.randrange(2**32)
        return make_workload(count, of, outputs, arguments.vocab_size, shared_prefix=shared_prefix, seed=seed)

    own = Lengths(arguments.conversation_prefix_len, arguments.conversation_prefix_len)
    beginnings = some(len(counts), own, shared_prefix_len(arguments)).prompts
    questions = some(sum(counts), inputs)
    asked = iter(zip(questions.prompts, questions.output_lens, strict=True))
    made = [
        _conversation(arguments, draw, [next(asked) for _ in range(count)], beginning)
        for count, beginning in zip(counts, beginnings, strict=True)
    ]
    return lambda _: made


def _sharegpt(arguments: argparse.Namespace, turns: Lengths) -> Maker:
    """Of conversations with enough turns the questions; answers are as long as those in the file."""
    draw = random.Random(arguments.workload_seed)  # noqa: S311 nothing is kept secret
    found = [texts for texts in sharegpt_turns(arguments, 2 * turns.high) if len(texts) >= 2 * turns.low]
    draw.shuffle(found)
    wanted = as_many(arguments, found)

    def make(count: CountTokens) -> Conversations:
        made = []
        for texts in wanted:
            pairs = zip(texts[::2], texts[1::2], strict=False)
            asked = [(question, arguments.sharegpt_output_len or max(1, count(answer))) for question, answer in pairs]
            made.append(_conversation(arguments, draw, asked[: turns.draw(draw)]))
        return made

    return make


def _custom(arguments: argparse.Namespace, turns: Lengths) -> Maker:
    draw = random.Random(arguments.workload_seed)  # noqa: S311 nothing is kept secret
    found = []
    for number, entry, length in custom_lines(arguments):
        questions = entry.get("turns")
        if not isinstance(questions, list) or not all(isinstance(one, str) and one for one in questions):
            raise broken(arguments, f"line {number}", 'has no list of texts as "turns"')
        if len(questions) >= turns.low:
            found.append([(question, length) for question in questions])
    made = [_conversation(arguments, draw, asked[: turns.draw(draw)]) for asked in as_many(arguments, found)]
    return lambda _: made


_KINDS: Mapping[str, Callable[[argparse.Namespace, Lengths], Maker]] = {
    "custom": _custom,
    "random": _random,
    "sharegpt": _sharegpt,
}


def _conversation(
    arguments: argparse.Namespace,
    draw: random.Random,
    asked: Sequence[tuple[Prompt, int]],
    beginning: Sequence[int] = (),
) -> Asked:
    """Return the first request with all that follows."""
    (first, length), *rest = asked
    mean = arguments.think_time
    turns = [Turn(question, count, draw.expovariate(1.0 / mean) if mean else 0.0) for question, count in rest]
    prompt = first if isinstance(first, str) else [*beginning, *first]
    return Asked(prompt, length, then=turns)
