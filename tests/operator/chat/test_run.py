"""`pagefleet run`: an engine of the conversation's own, which is gone in the end."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagefleet_operator.local.bars import load_line
from pagefleet_protocol.load_progress import LoadProgress
from rich.console import Console

from tests.fakes.http_faults import Fault
from tests.fakes.hub_server import tiny_hub
from tests.fakes.screen import TerminalProgram

COMMAND = [sys.executable, "-m", "pagefleet_operator.chat.run_cli"]
SMALL = ["--", "--num-kv-blocks", "128", "--max-model-len", "2048", "--num-threads", "1"]


def engines_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "the engine is still there"
        time.sleep(0.02)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[TerminalProgram]:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    with TerminalProgram([*COMMAND, "builtin://tiny", *SMALL], 80, 30, environment) as program:
        yield program


@pytest.mark.fleet
def test_it_loads_answers_and_is_gone(program: TerminalProgram, tmp_path: Path) -> None:
    program.wait_for("/help tells what can be typed", 120)
    program.wait_for_prompt()
    assert b"imports libraries" in program.written
    assert "imports libraries" not in program.text, "the bar leaves nothing behind"
    engines = engines_of(program.process.pid)
    assert engines
    program.type("/set temperature 0\rWhat is a KV cache?\r")
    program.wait_for("tokens/s", 60)
    program.wait_for_prompt()
    program.type("/set min_tokens 1900\rWhat is a pod?\r")
    program.wait_for("pod is the smallest", 60)
    for pid in engines:  # or a machine that is slow to see this has the whole answer
        os.kill(pid, signal.SIGSTOP)
    program.type("\x03")
    program.wait_for("stopped", 60)
    for pid in engines:
        os.kill(pid, signal.SIGCONT)
    program.wait_for_prompt()
    program.type("\x03")
    assert program.wait() == 0
    assert "Traceback" not in program.text
    wait_until_gone(engines)
    assert not list((tmp_path / "pagefleet" / "run").iterdir())


@pytest.mark.fleet
def test_a_download_has_a_bar(tmp_path: Path) -> None:
    with tiny_hub() as hub:
        hub.faults["model.safetensors"] = [Fault("stall", after=300_000)]
        folders = dict.fromkeys(("XDG_STATE_HOME", "XDG_CACHE_HOME", "HF_HOME"), str(tmp_path))
        with TerminalProgram([*COMMAND, "org/tiny", *SMALL], 90, 30, {**folders, "HF_ENDPOINT": hub.url}) as program:
            line = program.wait_for("downloads the model: ", 120)
            assert "━" in line
            assert re.search(r"downloads the model: \d+%, [\d.]+ of [\d.]+ MiB, .*\ds", line)
            hub.release()
            program.wait_for("/help tells what can be typed", 120)
            assert "downloads" not in program.text
            program.wait_for_prompt()
            program.type("\x04")
            assert program.wait() == 0


@pytest.mark.fleet
def test_an_engine_that_dies_is_told_and_ends_the_chat(program: TerminalProgram) -> None:
    program.wait_for("/help tells what can be typed", 120)
    program.wait_for_prompt()
    engines = engines_of(program.process.pid)
    os.kill(engines[0], signal.SIGKILL)
    program.type("hi\r")
    program.wait_for("the engine ended:")
    assert program.wait() == 1


@pytest.mark.fleet
def test_a_signal_ends_the_engine_too(program: TerminalProgram) -> None:
    program.wait_until_written(b"imports libraries")
    engines = engines_of(program.process.pid)
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 128 + signal.SIGTERM
    wait_until_gone(engines)


@pytest.mark.fleet
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["/nowhere"], 3, "/nowhere: no such folder"),
        (["builtin://tiny", "--", "--dtyp", "float32"], 2, "did you mean --dtype?"),
        ([], 2, "give MODEL"),
        (["builtin://tiny", "--systm", "x"], 2, "did you mean --system?"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    done = subprocess.run(
        [*COMMAND, *arguments],
        input="hi\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith("pagefleet run: error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_bar_is_one_line(width: int) -> None:
    for progress in (LoadProgress(), LoadProgress("weights", 2**30, 2**31, 65.0), LoadProgress("graphs", 3, 9, 7300.0)):
        out = io.StringIO()
        Console(file=out, width=width, force_terminal=False).print(load_line(progress, "starts " * 50))
        assert out.getvalue().count("\n") == 1
        assert len(out.getvalue()) <= width + 1
