"""Several servers and loads in one command: in which order, side by side, and as a picture."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from pagefleet_engine.bench import plot
from pagefleet_engine.bench.cli import main
from pagefleet_engine.bench.comparison import draw, in_turns, named_urls, ratios, table
from pagefleet_engine.bench.goodput import Timing
from pagefleet_engine.bench.load_client import Answer
from pagefleet_engine.bench.measured import Measured
from pagefleet_engine.bench.offered_load import LoadPoint
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.errors import QueueFull

from tests.engine.server.conftest import LiveServer

SLOW, FAST = LoadPoint(2.0, None), LoadPoint(math.inf, 8)
SMALL = ["--vocab-size=100", "--input-len=8", "--output-len=3", "--num-requests=4"]


@pytest.fixture
def two_servers() -> Iterator[tuple[LiveServer, LiveServer]]:
    first, second = LiveServer(ServerConfig()), LiveServer(ServerConfig())
    yield first, second
    first.stop()
    second.stop()


def made(ttft: float, gap: float, seconds: float) -> Measured:
    """Four answers of three tokens."""
    return Measured([Answer(Timing(0.0, 10, [ttft, ttft + gap, ttft + 2 * gap]), "")] * 4, Counter(), seconds)


def test_servers_take_turns_and_loads_too() -> None:
    runs = list(in_turns([SLOW, FAST], ["a", "b"], rounds=2))
    assert [(number, str(point), server) for number, (point, server) in runs] == [
        (0, "2/s", "a"), (0, "2/s", "b"), (1, "8 at once", "b"), (1, "8 at once", "a"),
        (2, "2/s", "b"), (2, "2/s", "a"), (3, "8 at once", "a"), (3, "8 at once", "b"),
    ]  # fmt: skip


def test_urls_may_have_names() -> None:
    assert named_urls(["http://h:1", "b=http://h:2/v1/", "http://h:3/v1?a=b"]) == {
        "h:1": "http://h:1/v1", "b": "http://h:2/v1", "h:3": "http://h:3/v1?a=b",
    }  # fmt: skip
    assert named_urls([]) == {}


def test_the_first_server_is_what_others_are_held_against() -> None:
    measured = {(SLOW, "a"): made(0.1, 0.01, 4.0), (SLOW, "b"): made(0.05, 0.02, 2.0)}
    found = ratios(measured, {"ttft": 0.07})["b_over_a"]["2/s"]
    assert found == pytest.approx(
        {
            "requests_per_s": 2.0, "output_tokens_per_s": 2.0, "ttft_p50": 0.5, "ttft_p99": 0.5, "tpot_p50": 2.0,
            "tpot_p99": 2.0,
        }
    )  # fmt: skip
    assert "goodput_requests_per_s" not in found, "nothing to divide by"
    lines = table(measured, {"ttft": 0.07}).splitlines()
    assert re.split("  +", lines[0]) == [
        "load", "server", "requests/s", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "goodput",
    ]  # fmt: skip
    assert lines[1].split() == ["2/s", "a", "1.00", "3.00", "100", "100", "10.00", "10.00", "0.00"]
    assert lines[3].split() == ["/", "a", "x2.00", "x2.00", "x0.50", "x0.50", "x2.00", "x2.00"]


def test_runs_of_one_kind_are_taken_together() -> None:
    both = made(0.1, 0.01, 4.0).with_more(made(0.3, 0.01, 4.0))
    figures = both.figures({})
    assert (figures["completed"], figures["requests_per_s"], figures["ttft_ms"]["mean"]) == (8, 1.0, pytest.approx(200))


def seen_axes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[str]]]:
    """What the axes of the next picture are called, and whose lines they have."""
    found = []
    save = plot._save

    def watch(figure: Figure, path: Path) -> None:
        for axes in figure.axes:
            if axes.axison:
                found.append((axes.get_xlabel(), axes.get_ylabel(), [str(one.get_label()) for one in axes.lines]))
        save(figure, path)

    monkeypatch.setattr(plot, "_save", watch)
    return found


def test_several_loads_are_curves_of_latency_over_throughput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = seen_axes(monkeypatch)
    measured = {
        (point, server): made(0.1, 0.01, seconds)
        for point, seconds in ((SLOW, 4.0), (FAST, 1.0))
        for server in ("a", "b")
    }
    draw(measured, tmp_path / "new" / "curves.png")
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [label for _, label, _ in axes] == [
        "p50 of time to the first token, ms", "p99 of time to the first token, ms",
        "p50 of mean time per token after it, ms", "p99 of mean time per token after it, ms",
    ]  # fmt: skip
    assert {(x, *lines) for x, _, lines in axes} == {("output tokens per second", "a", "b")}


def test_one_load_is_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = seen_axes(monkeypatch)
    draw({(SLOW, "a"): made(0.1, 0.01, 4.0), (SLOW, "b"): made(0.2, 0.01, 4.0)}, tmp_path / "one.png")
    assert axes[0][:2] == ("time to the first token, ms", "share that took no longer")
    assert len(axes) == 4


def test_two_servers_are_asked_the_same(two_servers: tuple[LiveServer, LiveServer], tmp_path: Path) -> None:
    first, second = two_servers
    report, picture = tmp_path / "report.json", tmp_path / "curves.png"
    urls = [f"ours={first.url}/v1", f"theirs={second.url}"]
    loads = ["--max-concurrency=1,4", "--rounds=2", "--num-warmups=1", "--slo", "ttft:60000"]
    assert main(["serve", "--base-url", *urls, *SMALL, *loads, f"--plot={picture}", f"--json={report}"]) == 0
    asked = [sorted(prompt for _, prompt, *_ in server.engine.seen) for server in two_servers]
    assert asked[0] == asked[1]
    assert len(asked[0]) == len({tuple(prompt) for prompt in asked[0]}) == 1 + 2 * 2 * 4
    found = json.loads(report.read_text())
    assert [(row["server"], row["max_concurrency"], row["completed"]) for row in found["rows"]] == [
        ("ours", 1, 8), ("theirs", 1, 8), ("ours", 4, 8), ("theirs", 4, 8),
    ]  # fmt: skip
    assert found["figures"]["runs"] == 8
    assert found["figures"]["theirs_over_ours"].keys() == {"1 at once", "4 at once"}
    assert found["figures"]["peak"]["ours"]["at"] in ("1 at once", "4 at once")
    assert (found["settings"]["rounds"], found["settings"]["max_concurrency"]) == (2, "1,4")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_server_that_answers_nothing_is_named(
    two_servers: tuple[LiveServer, LiveServer], capsys: pytest.CaptureFixture[str]
) -> None:
    two_servers[1].engine.fail_after = 0, QueueFull("too much waits", 1.0)
    urls = [f"ours={two_servers[0].url}", f"theirs={two_servers[1].url}"]
    assert main(["serve", "--base-url", *urls, *SMALL, "--rounds=1"]) == 2
    assert "theirs: no request was answered; most often: HTTP 429" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--base-url", "localhost:8000"], "give URL or NAME=URL, as ours=http://127.0.0.1:8000/v1"),
        (["--base-url", "=http://h"], "give URL or NAME=URL"),
        (["--base-url", "ftp://h"], "give URL or NAME=URL"),
        (["--base-url", "a=http://h:1", "a=http://h:2"], "two servers that are called a: name them"),
        (["--base-url", "http://h:1", "http://h:1"], "two servers that are called h:1"),
        (["--request-rate=1,fast"], "--request-rate has 'fast': give a number, or several as 1,2,4"),
        (["--request-rate=1,nan"], "--request-rate is nan: give more than 0"),
        (["--max-concurrency=1,0"], "--max-concurrency is 0.0: give more than 0"),
        (["--max-concurrency=1.5"], "give whole numbers of at least 1"),
        (["--rounds=0"], "--rounds is 0: give more than 0"),
        (["--profile", "--request-rate=1,2"], "--profile is of one run"),
        (["--profile", "--base-url", "a=http://h:1", "b=http://h:2"], "--profile is of one run"),
    ],
)
def test_a_mistake_is_told_before_anything_is_asked(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    assert says in capsys.readouterr().err
