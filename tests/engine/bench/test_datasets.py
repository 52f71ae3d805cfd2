"""What is asked under load, by vLLM's names, and files that are not right."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagefleet_engine.bench import serve
from pagefleet_engine.bench.cli import main
from pagefleet_engine.bench.datasets import Requests, read_dataset, server_counts
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.errors import ConfigError

from tests.engine.server.conftest import MODEL, LiveServer

TALK = [{"from": "human", "value": "one two three four five"}, {"from": "gpt", "value": "six seven eight nine"}]


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(line.split())


def words(text: str) -> int:
    return len(text.split())


def ask(line: str) -> Requests:
    return read_dataset(parsed(line))(words)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    server = LiveServer(ServerConfig())
    yield server
    server.stop()


def test_random_lengths_have_vllm_s_flags_too() -> None:
    found = ask("--num-requests 50 --random-input-len 100 --random-output-len 10 --random-range-ratio 0.2")
    assert {len(prompt) for prompt, _ in found} <= set(range(80, 121))
    assert {length for _, length in found} == {8, 9, 10, 11, 12}
    (prompt, length), *_ = ask("--num-requests 2 --input-len 7 --output-len 3 --random-prefix-len 4")
    assert (len(prompt), length) == (11, 3)


def test_prefixes_are_repeated() -> None:
    line = "--dataset-name prefix-repetition --num-requests 40 --prefix-repetition-num-prefixes 4 "
    found = ask(line + "--prefix-repetition-prefix-len 8 --prefix-repetition-suffix-len 3")
    assert {len(prompt) for prompt, _ in found} == {11}
    assert len({tuple(prompt[:8]) for prompt, _ in found}) == 4
    assert len({tuple(prompt) for prompt, _ in found}) == 40
    assert {length for _, length in found} == {128}
    assert ask(line) == ask(line) != ask(line + "--workload-seed 1")


def test_conversations_of_a_fitting_length_are_asked(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    long = [{"value": "word " * 1100}, {"value": "a b c d"}]
    file.write_text(
        json.dumps([{"conversations": turns} for turns in (TALK, TALK[:1], long, [TALK[0], {"value": "x"}])])
    )
    line = f"--dataset-name sharegpt --dataset-path {file} --num-requests 3"
    assert ask(line) == [(TALK[0]["value"], 4)] * 3
    assert ask(line + " --sharegpt-output-len 9")[0] == (TALK[0]["value"], 9)


def test_lines_of_a_poem_begin_alike(tmp_path: Path) -> None:
    file = tmp_path / "sonnet.txt"
    file.write_text("".join(f"line {number} of the poem\n\n" for number in range(30)))
    line = f"--dataset-name sonnet --dataset-path {file} --num-requests 5 --sonnet-input-len 90 --sonnet-prefix-len 40"
    found = ask(line)
    assert {length for _, length in found} == {150}
    texts = [prompt for prompt, _ in found if isinstance(prompt, str)]
    assert {85 <= words(text) <= 95 for text in texts} == {True}
    assert len({" ".join(text.split()[:35]) for text in texts}) == 1
    assert len(set(texts)) == 5


def test_own_prompts_may_say_how_long_their_answers_are(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 7}\n\n{"prompt": "b", "more": 1}\n')
    line = f"--dataset-name custom --dataset-path {file} --custom-output-len 5 --num-requests 3"
    assert ask(line) == [("a", 7), ("b", 5), ("a", 7)]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("custom", '{"prompt": "a"}\n{"prompt"', "line 2 is no JSON"),
        ("custom", '{"text": "a"}', 'line 1 has no text as "prompt"'),
        ("custom", "[]", "line 1 is no JSON object"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "line 1 has '0' as \"output_tokens\""),
        ("custom", "\n", "has nothing to ask"),
        ("sharegpt", "{", "is no JSON"),
        ("sharegpt", "[" * 100_000, "is no JSON"),
        ("sharegpt", "{}", "is no list of conversations"),
        ("sharegpt", "[1]", "entry 1 has no list 'conversations'"),
        ("sharegpt", '[{"conversations": [{"value": 1}]}]', "entry 1 has a turn without a text"),
        ("sharegpt", "[]", "has nothing to ask"),
        ("sonnet", "\n\n", "has no line"),
    ],
)
def test_a_broken_file_is_told_with_its_line(tmp_path: Path, name: str, content: str, says: str) -> None:
    file = tmp_path / "data"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        ask(f"--dataset-name {name} --dataset-path {file}")
    assert str(file) in str(refused.value)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--dataset-name custom", "custom needs a file: give --dataset-path FILE"),
        ("--dataset-name sonnet --dataset-path /no/such", "cannot be read (No such file or directory)"),
        ("--random-range-ratio 1", "--random-range-ratio is 1.0: give 0 or more, and less than 1"),
        ("--random-input-len 0", "--random-input-len is 0: give at least 1"),
        ("--random-prefix-len -1", "--random-prefix-len is -1: give at least 0"),
        ("--dataset-name prefix-repetition --prefix-repetition-num-prefixes 0", "is 0: give at least 1"),
    ],
)
def test_flags_that_cannot_work(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ask(line)
    assert says in str(refused.value)


def test_texts_are_counted_by_the_server(server: LiveServer) -> None:
    count = server_counts(f"{server.url}/v1", MODEL, None)
    assert count("Hi") == 2
    with pytest.raises(ConfigError, match="does not count tokens"):
        server_counts(f"{server.url}/v1", "another", None)("Hi")


def test_texts_are_asked_and_measured(server: LiveServer, tmp_path: Path) -> None:
    file, report = tmp_path / "own.jsonl", tmp_path / "report.json"
    file.write_text('{"prompt": "Hello", "output_tokens": 4}\n')
    line = (
        f"serve --base-url {server.url}/v1 --dataset-name custom --dataset-path {file} --num-requests 3 --json {report}"
    )
    assert main(line.split()) == 0
    figures = json.loads(report.read_text())["figures"]
    assert (figures["completed"], figures["failed"]) == (3, 0)
    assert figures["input_tokens_per_s"] * figures["seconds"] == pytest.approx(3 * 5)
