"""`pagefleet bench tune` where the best settings are known."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.bench import tune
from pagefleet_engine.bench.cli import main
from pagefleet_engine.bench.tune import highest_rate, parse_axis

from tests.fakes.tuned_server import TOO_MANY_SEATS

FAKE = f"{shlex.quote(sys.executable)} -m tests.fakes.tuned_server"
TOKENS, SEATS = (512, 1024, 2048, 4096), (32, 64, 128, 256)
ASKED = ["tune", "builtin://tiny", "--slo-ttft-ms=60000", "--slo-itl-ms=60000", f"--server-command={FAKE}"]
LOAD = ["--load-seconds=0.15", "--burstiness=1000", "--input-len=4", "--output-len=2"]
TUNE = [
    *ASKED, f"--tune=max_num_batched_tokens={','.join(map(str, TOKENS))}",
    f"--tune=max-num-seqs={','.join(map(str, SEATS))}",
]  # fmt: skip


def rate_of(tokens: int, seats: int) -> float:
    """Requests per second that a server keeps its promise at; none where both are most, where it does not start."""
    x, y = math.log2(tokens / 1024), math.log2(seats / 128)
    starts = (tokens, seats) != (TOKENS[-1], SEATS[-1])
    return 320.0 * math.exp(-0.18 * (x * x + y * y + 0.6 * x * y)) if starts else 0.0


def test_it_finds_the_settings_with_the_most_goodput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(arguments: object, server: object, settings: dict[str, Any], best_rate: float) -> tune.Trial:
        limit = rate_of(settings["max_num_batched_tokens"], settings["max_num_seqs"])
        return tune.Trial(settings, highest_rate(lambda rate: rate <= limit, best_rate or 100.0, best_rate), 3)

    monkeypatch.setattr(tune, "_measure", measure)
    written = tmp_path / "report.json"
    assert main([*TUNE, f"--json={written}"]) == 0
    report: dict[str, Any] = json.loads(written.read_text())
    figures, rows = report["figures"], report["rows"]
    best = figures["best"]
    optimum = max(itertools.starmap(rate_of, itertools.product(TOKENS, SEATS)))
    assert rate_of(best["max_num_batched_tokens"], best["max_num_seqs"]) >= 0.97 * optimum
    assert figures["trials"] == len(rows) <= 12
    asked = f"--max-num-batched-tokens={best['max_num_batched_tokens']} --max-num-seqs={best['max_num_seqs']}"
    assert figures["command"] == f"{FAKE} builtin://tiny {asked}"
    shown = capsys.readouterr().out
    assert asked in shown
    assert all(str(row["loads"]) in shown for row in rows)


def test_a_server_that_does_not_start_is_a_trial_without_goodput(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "report.json"
    corner = ["--tune=max_num_batched_tokens=2048,4096", f"--tune=max_num_seqs={TOO_MANY_SEATS},512", "--max-trials=2"]
    assert main([*ASKED, *LOAD, *corner, f"--json={written}"]) == 0
    report = json.loads(written.read_text())
    first = report["rows"][0]
    assert (first["goodput_requests_per_s"], first["failure"]) == (0.0, "out of memory: give less")
    assert report["figures"]["best"]["max_num_seqs"] == 512
    assert "out of memory: give less" in capsys.readouterr().out


def test_interrupted_it_reports_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[float] = []

    def measure(arguments: object, server: object, settings: dict[str, Any], best_rate: float) -> tune.Trial:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(best_rate)
        return tune.Trial(settings, 5.0 + len(made), 3)

    monkeypatch.setattr(tune, "_measure", measure)
    assert main(TUNE) == 0
    shown = capsys.readouterr().out
    assert made == [0.0, 6.0]
    assert "interrupted" in shown
    assert "--max-num-seqs=" in shown


def test_a_promise_that_no_server_keeps_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *LOAD, "--tune=max_num_seqs=64,128", "--slo-ttft-ms=0.001", "--max-trials=1"]) == 2
    assert "a request alone breaks the promise: TTFT" in capsys.readouterr().err


@pytest.mark.parametrize("first", [1.0, 37.0, 400.0])
@pytest.mark.parametrize("limit", [37.0, 90.0])
def test_the_rate_is_found_within_two_percent(first: float, limit: float) -> None:
    asked: list[float] = []

    def holds(rate: float) -> bool:
        asked.append(rate)
        return rate <= limit

    assert limit / 1.02 <= highest_rate(holds, first) <= limit
    assert len(asked) <= 16


def test_a_rate_far_under_the_best_takes_fewer_loads() -> None:
    def loads(best: float) -> int:
        asked: list[float] = []
        highest_rate(lambda rate: asked.append(rate) or rate <= 30.0, 100.0, best)  # type: ignore[func-returns-value]
        return len(asked)

    assert loads(100.0) < loads(0.0)


def test_no_rate_holds() -> None:
    assert highest_rate(lambda _: False, 10.0) == 0.0


def test_candidates_rise() -> None:
    assert parse_axis("max-num-seqs=64,32,64") == ("max_num_seqs", [32, 64])
    assert parse_axis("enable_prefix_caching=false,true")[1] == [False, True]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tune=magic=1,2"], "give a setting of the engine"),
        (["--tune=max_num_seqs=32"], "give at least two candidates"),
        (["--tune=max_num_seqs=few,many"], "max_num_seqs"),
        (["--tune=max_num_seqs=1,2", "--max-num-seqs=3"], "it is given already"),
        (["--max-trials=0"], "--max-trials is 0: give more than 0"),
        (["--model=builtin://tiny"], "the model is given twice"),
        (["--dataset-name=custom"], "needs a file"),
    ],
)
def test_a_mistake_is_told_before_a_server_is_started(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "builtin://tiny", "--slo-ttft-ms=500", "--slo-itl-ms=50", *flags]) == 2
    assert said in capsys.readouterr().err
