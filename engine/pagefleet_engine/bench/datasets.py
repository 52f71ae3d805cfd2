"""What a server is asked under load, by vLLM's names of datasets: token ids at random, or texts of a file.

A dataset is read before anything is started, so that a broken line is told at once; what needs the model's tokens is
made of it when there is somebody who counts them.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pagefleet_engine.bench.load_client import Prompt
from pagefleet_engine.bench.workloads import Lengths, make_workload, parse_lengths
from pagefleet_engine.errors import ConfigError

_Asked = TypeVar("_Asked")
Requests = list[tuple[Prompt, int]]
"""Each prompt, and the tokens of its answer."""
CountTokens = Callable[[str], int]
Maker = Callable[[CountTokens], Requests]

FEWEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""Tokens of a conversation that counts: of prompt and answer each at least, of a prompt, and of both together."""
POEM = "Pick as many lines as you can from these poem lines:\n"


def add_dataset_arguments(add: Callable[..., Any]) -> None:
    """Add the flags of all datasets."""
    add("--dataset-name", choices=sorted(DATASETS), default="random", help="What is asked. Default: random token ids.")
    add("--dataset-path", metavar="FILE", help="sharegpt: JSON; sonnet: lines of text; custom: a JSON object a line.")
    add("--random-input-len", type=int, metavar="N", help="As --input-len, with --random-range-ratio.")
    add("--random-output-len", type=int, metavar="N", help="As --output-len, with --random-range-ratio.")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Lengths from N - N R to N + N R. Default: 0.",
    )
    add("--random-prefix-len", type=int, metavar="N", help="As --shared-prefix.")
    add("--sharegpt-output-len", type=int, metavar="N", help="Default: as long as the answers there are.")
    add("--sonnet-input-len", type=int, default=550, metavar="N", help="Default: 550.")
    add("--sonnet-output-len", type=int, default=150, metavar="N", help="Default: 150.")
    add("--sonnet-prefix-len", type=int, default=200, metavar="N", help="Of it, the same for all. Default: 200.")
    add("--prefix-repetition-prefix-len", type=int, default=256, metavar="N", help="Default: 256.")
    add("--prefix-repetition-suffix-len", type=int, default=256, metavar="N", help="Default: 256.")
    add("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N", help="Default: 10.")
    add("--prefix-repetition-output-len", type=int, default=128, metavar="N", help="Default: 128.")
    add(
        "--custom-output-len",
        type=int,
        default=256,
        metavar="N",
        help="Where a line has no output_tokens. Default: 256.",
    )


def read_dataset(arguments: argparse.Namespace) -> Maker:
    """Read what the flags name.

    Raises:
        ConfigError: a flag cannot work, or the file cannot be read; of a broken line, with its number.
    """
    check_dataset(arguments)
    return DATASETS[arguments.dataset_name](arguments)


def check_dataset(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a number that cannot be."""
    for name, value in vars(arguments).items():
        if (
            name.endswith(("_len", "_prefixes"))
            and isinstance(value, int)
            and value < (0 if "prefix_len" in name else 1)
        ):
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}: give at least {0 if 'prefix_len' in name else 1}"
            )
    if not 0 <= arguments.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio is {arguments.random_range_ratio}: give 0 or more, and less than 1")


def _random(arguments: argparse.Namespace) -> Maker:
    workload = make_workload(
        arguments.num_requests,
        random_lengths(arguments, "input"),
        random_lengths(arguments, "output"),
        arguments.vocab_size,
        shared_prefix=shared_prefix_len(arguments),
        seed=arguments.workload_seed,
    )
    return lambda _: list(zip(workload.prompts, workload.output_lens, strict=True))


def shared_prefix_len(arguments: argparse.Namespace) -> int:
    """Tokens that all random prompts begin with."""
    given: int | None = arguments.random_prefix_len
    return arguments.shared_prefix if given is None else given


def random_lengths(arguments: argparse.Namespace, which: str) -> Lengths:
    """Of random prompts (`which` is "input") or of their answers ("output").

    Raises:
        ConfigError: they are no lengths.
    """
    given = getattr(arguments, f"random_{which}_len")
    if given is None:
        return parse_lengths(f"{which}-len", getattr(arguments, f"{which}_len"))
    spread = int(given * arguments.random_range_ratio)
    return Lengths(max(1, given - spread), given + spread)


def _prefix_repetition(arguments: argparse.Namespace) -> Maker:
    generator = random.Random(arguments.workload_seed)  # noqa: S311 nothing is kept secret
    num_prefixes = arguments.prefix_repetition_num_prefixes

    def some(count: int, length: int) -> Sequence[Sequence[int]]:
        one = Lengths(length, length)
        return make_workload(count, one, one, arguments.vocab_size, seed=generator.randrange(2**32)).prompts

    prefix_len = arguments.prefix_repetition_prefix_len
    prefixes = some(num_prefixes, prefix_len) if prefix_len else [[]] * num_prefixes
    suffixes = some(arguments.num_requests, arguments.prefix_repetition_suffix_len)
    prompts = [[*prefixes[number % num_prefixes], *suffix] for number, suffix in enumerate(suffixes)]
    generator.shuffle(prompts)
    return lambda _: [(prompt, arguments.prefix_repetition_output_len) for prompt in prompts]


def sharegpt_turns(arguments: argparse.Namespace, most: int) -> list[list[str]]:
    """Up to so many texts of each conversation, the asker's first.

    Raises:
        ConfigError: the file is something else; of a broken entry, with its number.
    """
    try:
        entries = json.loads(dataset_text(arguments))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--dataset-path {arguments.dataset_path} is no JSON: {str(error)[:100]}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"--dataset-path {arguments.dataset_path} is no list of conversations")
    found = []
    for number, entry in enumerate(entries, start=1):
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise broken(arguments, f"entry {number}", "has no list 'conversations'")
        texts = [turn.get("value") for turn in turns[:most]]
        if not all(isinstance(text, str) for text in texts):
            raise broken(arguments, f"entry {number}", "has a turn without a text as 'value'")
        found.append(texts)
    return found


def _sharegpt(arguments: argparse.Namespace) -> Maker:
    pairs = [texts for texts in sharegpt_turns(arguments, 2) if len(texts) == 2]
    random.Random(arguments.workload_seed).shuffle(pairs)  # noqa: S311 nothing is kept secret

    def make(count: CountTokens) -> Requests:
        found: Requests = []
        for prompt, answer in pairs:
            num_prompt, num_answer = count(prompt), arguments.sharegpt_output_len or count(answer)
            too_long = num_prompt > LONGEST_PROMPT or num_prompt + num_answer > LONGEST
            if min(num_prompt, num_answer) >= FEWEST and not too_long:
                found.append((prompt, num_answer))
            if len(found) == arguments.num_requests:
                break
        return as_many(arguments, found)

    return make


def _custom(arguments: argparse.Namespace) -> Maker:
    found: Requests = []
    for number, entry, length in custom_lines(arguments):
        if not isinstance(entry.get("prompt"), str) or not entry["prompt"]:
            raise broken(arguments, f"line {number}", 'has no text as "prompt"')
        found.append((entry["prompt"], length))
    requests = as_many(arguments, found)
    return lambda _: requests


def custom_lines(arguments: argparse.Namespace) -> Iterator[tuple[int, Mapping[str, Any], int]]:
    """Each line's number, its object, and how long its answers are.

    Raises:
        ConfigError: of a broken line, with its number.
    """
    for number, line in enumerate(dataset_text(arguments).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise broken(arguments, f"line {number}", f"is no JSON: {str(error)[:100]}") from None
        if not isinstance(entry, dict):
            raise broken(arguments, f"line {number}", "is no JSON object")
        length = entry.get("output_tokens", arguments.custom_output_len)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise broken(arguments, f"line {number}", f'has {str(length)[:40]!r} as "output_tokens"')
        yield number, entry, length


def _sonnet(arguments: argparse.Namespace) -> Maker:
    lines = [line + "\n" for line in dataset_text(arguments).splitlines() if line.strip()]
    if not lines:
        raise broken(arguments, "it", "has no line")
    if arguments.sonnet_prefix_len > arguments.sonnet_input_len:
        raise ConfigError("--sonnet-prefix-len is over --sonnet-input-len: give less")

    def make(count: CountTokens) -> Requests:
        generator = random.Random(arguments.workload_seed)  # noqa: S311 nothing is kept secret
        mean = max(1.0, sum(map(count, lines)) / len(lines))
        num_lines = max(1, round((arguments.sonnet_input_len - count(POEM)) / mean))
        num_same = min(num_lines, max(0, round((arguments.sonnet_prefix_len - count(POEM)) / mean)))
        beginning = POEM + "".join(lines[number % len(lines)] for number in range(num_same))
        return [
            (beginning + "".join(generator.choices(lines, k=num_lines - num_same)), arguments.sonnet_output_len)
            for _ in range(arguments.num_requests)
        ]

    return make


DATASETS: Mapping[str, Callable[[argparse.Namespace], Maker]] = {
    "custom": _custom,
    "prefix-repetition": _prefix_repetition,
    "random": _random,
    "sharegpt": _sharegpt,
    "sonnet": _sonnet,
}


def server_counts(base_url: str, model: str, api_key: str | None) -> CountTokens:
    """Return what counts a text's tokens as the server does: by /tokenize, which pagefleet and vLLM have."""
    known: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in known:
            known[text] = _ask_count(f"{base_url.removesuffix('/v1')}/tokenize", model, api_key, text)
        return known[text]

    return count


def _ask_count(url: str, model: str, api_key: str | None, text: str) -> int:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    body = json.dumps({"model": model, "prompt": text}).encode()
    request = urllib.request.Request(url, body, headers)  # noqa: S310 the server that is measured
    try:
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 the same
            return int(json.load(response)["count"])
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{url} does not count tokens ({error}): this dataset needs a server that has it") from None


def dataset_text(arguments: argparse.Namespace) -> str:
    """The file of `--dataset-path`.

    Raises:
        ConfigError: none is given, or it cannot be read.
    """
    if not arguments.dataset_path:
        raise ConfigError(f"--dataset-name {arguments.dataset_name} needs a file: give --dataset-path FILE")
    try:
        return Path(arguments.dataset_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is no UTF-8"
        raise ConfigError(f"--dataset-path {arguments.dataset_path} cannot be read ({reason}): check it") from None


def broken(arguments: argparse.Namespace, where: str, what: str) -> ConfigError:
    """Return the error of a part of the file."""
    return ConfigError(f"--dataset-path {arguments.dataset_path}: {where} {what}: mend it, or take it out")


def as_many(arguments: argparse.Namespace, found: Sequence[_Asked]) -> list[_Asked]:
    """Take as many as are asked for, some again where there are fewer.

    Raises:
        ConfigError: there is none.
    """
    if not found:
        raise ConfigError(f"--dataset-path {arguments.dataset_path} has nothing to ask: give another file")
    return [found[number % len(found)] for number in range(arguments.num_requests)]
