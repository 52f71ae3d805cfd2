"""Flags that cannot work: one line, before anything is measured where that can be known."""

from __future__ import annotations

import argparse

import pytest
from pagefleet_engine.bench import latency
from pagefleet_engine.bench.cli import main
from pagefleet_engine.bench.report import Report
from pagefleet_engine.errors import InvalidRequest


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("latency --model builtin://tiny --repeats 0", "--repeats is 0: give at least 1"),
        ("latency --model builtin://tiny --batch-size 0", "--batch-size is 0: give at least 1"),
        ("throughput --model builtin://tiny --num-requests -1", "--num-requests is -1: give at least 1"),
        ("startup --model builtin://tiny --repeats 0", "--repeats is 0: give at least 1"),
        ("latency --model builtin://tiny --json /no/such/report.json", "there is no folder /no/such"),
    ],
)
def test_a_mistake_is_one_line(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags.split()) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("pagefleet bench: error: ")
    assert said in last


def test_what_the_engine_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> Report:
        raise InvalidRequest(f"the prompt has {arguments.input_len} tokens")

    monkeypatch.setattr(latency, "run", run)
    assert main(["latency", "--model", "builtin://tiny", "--input-len", "5000"]) == 2
    assert capsys.readouterr().err == "pagefleet bench: error: the prompt has 5000 tokens\n"
