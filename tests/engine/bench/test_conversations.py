"""Conversations under load: what each turn asks, and what is told of it."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagefleet_engine.bench import serve
from pagefleet_engine.bench.cli import main
from pagefleet_engine.bench.goodput import Timing
from pagefleet_engine.bench.load_client import Answer, Asked, Failure, Outcome, Target, Turn, drive
from pagefleet_engine.bench.measured import Measured
from pagefleet_engine.bench.offered_load import offered_load
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.errors import ConfigError

from tests.engine.server.conftest import MODEL, LiveServer
from tests.fakes.scripted_engine import next_token

TALK = [{"value": text} for text in ("how are you", "fine thank you", "and the rest", "also fine", "good")]


@pytest.fixture
def server() -> Iterator[LiveServer]:
    server = LiveServer(ServerConfig())
    yield server
    server.stop()


def words(text: str) -> int:
    return len(text.split())


def ask(line: str, number: int = 0) -> list[Asked]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args(["--multi-turn", *line.split()])
    return list(offered_load(arguments, words, [0.0] * arguments.num_requests, number))


def drove(server: LiveServer, *asked: Asked, at_once: int | None = None) -> list[tuple[int, Outcome]]:
    found: list[tuple[int, Outcome]] = []
    target = Target(f"{server.url}/v1", MODEL)
    asyncio.run(drive(target, asked, at_once, lambda number, outcome: found.append((number, outcome))))
    return found


def generated(prompt: list[int], count: int) -> list[int]:
    return [next_token(prompt, None, position) for position in range(count)]


def test_a_turn_of_ids_brings_the_ids_of_the_answers_before_it(server: LiveServer) -> None:
    found = drove(server, Asked([70, 71], 3, then=[Turn([80], 2), Turn([90, 91], 4)]))
    first = [70, 71]
    second = [*first, *generated(first, 3), 80]
    third = [*second, *generated(second, 2), 90, 91]
    assert [prompt for _, prompt, *_ in server.engine.seen] == [first, second, third]
    answers = [outcome for _, outcome in found if isinstance(outcome, Answer)]
    assert [answer.turn for answer in answers] == [1, 2, 3]
    assert [answer.timing.num_input_tokens for answer in answers] == [2, 6, 10]
    assert [len(answer.timing.token_times) for answer in answers] == [3, 2, 4], "an event without a token is none"
    assert [answer.num_cached_tokens for answer in answers] == [1, 3, 5], "as the engine says: half of the prompt"


def test_a_turn_of_text_brings_the_texts_of_the_answers_before_it(server: LiveServer) -> None:
    drove(server, Asked("hello", 3, then=[Turn("more", 1)]))
    answer = "".join(map(chr, generated(list(b"hello"), 3)))
    assert bytes(server.engine.seen[1][1]).decode() == f"hello{answer}\n\nmore"


def test_conversations_beyond_the_limit_wait_for_one_to_end(server: LiveServer) -> None:
    talks = [Asked([65 + number], 1, then=[Turn([90], 1)] * 2) for number in range(3)]
    found = drove(server, *talks, at_once=1)
    numbers = [number for number, _ in found]
    assert sorted(numbers) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(numbers[start] == numbers[start + 1] == numbers[start + 2] for start in (0, 3, 6))


def test_turns_after_a_failure_fail_too(server: LiveServer) -> None:
    found = drove(server, Asked([70] * 250, 2, then=[Turn([71] * 9, 2), Turn([72], 2)]))
    assert [type(outcome) for _, outcome in found] == [Answer, Failure, Failure]
    last = found[-1][1]
    assert isinstance(last, Failure)
    assert last.reason == "the turn before was not answered"


def test_random_conversations_have_the_lengths_that_were_asked_for() -> None:
    line = (
        "--num-requests 30 --num-turns 2:4 --input-len 5 --output-len 3 --shared-prefix 7 --conversation-prefix-len 4"
    )
    found = ask(line)
    prompts = [asked.prompt for asked in found if not isinstance(asked.prompt, str)]
    assert {len(prompt) for prompt in prompts} == {7 + 4 + 5}
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
    assert len({tuple(prompt[7:11]) for prompt in prompts}) == 30
    assert {1 + len(asked.then) for asked in found} == {2, 3, 4}
    turns = [turn for asked in found for turn in asked.then]
    assert {(len(turn.question), turn.max_tokens, turn.think_s) for turn in turns} == {(5, 3, 0.0)}
    assert len({tuple(turn.question) for turn in turns}) == len(turns)
    assert ask(line) == found != ask(line, number=1)


def test_people_think_for_as_long_as_is_said_on_average() -> None:
    turns = [turn for asked in ask("--num-requests 500 --num-turns 5 --think-time 2") for turn in asked.then]
    assert sum(turn.think_s for turn in turns) / len(turns) == pytest.approx(2.0, rel=0.1)


def test_conversations_of_a_file_ask_their_questions(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"conversations": talk} for talk in (TALK, TALK[:2])]))
    (asked,) = ask(f"--dataset-name sharegpt --dataset-path {file} --num-requests 1 --num-turns 2")
    assert asked == Asked("how are you", 3, then=[Turn("and the rest", 2)])
    with pytest.raises(ConfigError, match="has nothing to ask"):
        ask(f"--dataset-name sharegpt --dataset-path {file} --num-turns 3")


def test_own_conversations(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"turns": ["a", "b", "c"], "output_tokens": 7}\n{"turns": ["d"]}\n')
    asked = ask(f"--dataset-name custom --dataset-path {file} --num-requests 2 --num-turns 1:2 --custom-output-len 5")
    assert [one.prompt for one in asked] == ["a", "d"]
    assert (asked[0].max_tokens, asked[1].max_tokens, asked[1].then) == (7, 5, [])


@pytest.mark.parametrize(
    ("line", "content", "says"),
    [
        ("--dataset-name custom", '{"turns": ["a"]}\n{"turns": "a"}', 'line 2 has no list of texts as "turns"'),
        ("--dataset-name custom", '{"turns": ["a", 1]}', 'line 1 has no list of texts as "turns"'),
        ("--dataset-name custom", '{"prompt": "a"}', 'line 1 has no list of texts as "turns"'),
        ("--dataset-name custom", "{", "line 1 is no JSON"),
        ("--dataset-name sharegpt", '[{"conversations": [{"value": 1}]}]', "entry 1 has a turn without a text"),
        ("--dataset-name sonnet", "line", "sonnet has no conversations: give one of custom, random, sharegpt"),
        (
            "--dataset-name custom --conversation-prefix-len 5",
            "",
            "--conversation-prefix-len is of --dataset-name random",
        ),
        ("--num-turns 0", "", "--num-turns is '0'"),
        ("--think-time -1", "", "--think-time is -1: give 0 or more"),
        ("--conversation-prefix-len -1", "", "--conversation-prefix-len is -1: give at least 0"),
    ],
)
def test_what_cannot_be_asked_is_told(tmp_path: Path, line: str, content: str, says: str) -> None:
    file = tmp_path / "data"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        ask(f"{line} --dataset-path {file}")
    assert says in str(refused.value)


def test_each_turn_has_figures_of_its_own() -> None:
    answers = [
        Answer(Timing(0.0, 10, [0.1, 0.2]), "", num_cached_tokens=0, turn=1),
        Answer(Timing(0.5, 40, [0.3, 0.5]), "", num_cached_tokens=30, turn=2),
        Answer(Timing(0.0, 20, [0.3, 0.6]), "", num_cached_tokens=None, turn=1),
    ]
    figures = Measured.of([*answers, Failure("gone")], 2.0).figures({})
    assert (figures["completed"], figures["failed"], figures["failures"]) == (3, 1, {"gone": 1})
    assert figures["turn_1"]["ttft_ms"]["p50"] == pytest.approx(200.0)
    assert figures["turn_1"]["output_tokens_per_s_per_request"] == pytest.approx(4 / 0.8)
    assert (figures["turn_2"]["mean_cached_tokens"], figures["turn_2"]["cached_share"]) == (30.0, 0.75)
    assert Measured.of(answers[:1], 1.0).figures({}).keys().isdisjoint({"turn_1"})


def test_a_run_of_conversations(server: LiveServer, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    line = f"serve --base-url {server.url} --multi-turn --num-turns 3 --num-prompts 4 --vocab-size 100"
    assert main([*line.split(), "--input-len=8", "--output-len=4", f"--json={report}"]) == 0
    found = json.loads(report.read_text())
    figures, settings = found["figures"], found["settings"]
    assert (figures["completed"], figures["failed"]) == (12, 0)
    assert [figures[f"turn_{turn}"]["mean_input_tokens"] for turn in (1, 2, 3)] == [8, 20, 32]
    assert [figures[f"turn_{turn}"]["mean_cached_tokens"] for turn in (1, 2, 3)] == [4, 10, 16]
    assert (settings["num_turns"], settings["mean_output_len"]) == ("3", 4)
