"""`pagefleet up` as the process that people start: signals, exit status, what it says and leaves."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagefleet_operator.cli import main

from tests.fakes.fleet_processes import all_gone, recorded_pids
from tests.fakes.hub_server import HubServer, Repository
from tests.fakes.model_files import sharded

pytestmark = pytest.mark.fleet

FAKES = Path(__file__).parents[2] / "fakes"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Put fake engines and routers where `pagefleet up` looks for programs, and its state into the test's folder."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in (("pagefleet-serve", "engine_process.py"), ("pagefleet-route", "router_process.py")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKES / script}" "$@"\n')
        (programs / name).chmod(0o755)
    # A Python elsewhere, so that no real program lies beside it.
    (programs / "python").symlink_to(sys.executable)
    packages = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": packages, "XDG_STATE_HOME": str(tmp_path)}


class Up:
    """A running `pagefleet up` whose output is read as it comes."""

    def __init__(self, command: list[str], environment: dict[str, str], out: int | None = None) -> None:
        self.text = ""
        self._reader, writer = os.pipe() if out is None else (out, out)
        self.process = subprocess.Popen(command, env=environment, stdout=writer, stderr=subprocess.STDOUT)
        if out is None:
            os.close(writer)

    def read_until(self, words: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while words not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"{words!r} did not come:\n{self.text}"
            if select.select([self._reader], [], [], left)[0]:
                data = os.read(self._reader, 65_536)
                assert data, f"{words!r} did not come before the end:\n{self.text}"
                self.text += data.decode()

    def finish(self, timeout_s: float = 120.0) -> int:
        status = self.process.wait(timeout_s)
        while select.select([self._reader], [], [], 0.2)[0] and (data := os.read(self._reader, 65_536)):
            self.text += data.decode()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(120)
        os.close(self._reader)


StartUp = Callable[..., Up]


@pytest.fixture
def start_up(tmp_path: Path, environment: dict[str, str]) -> Iterator[StartUp]:
    started: list[Up] = []

    def start(*documents: dict[str, Any], flags: tuple[str, ...] = ("--port", "0"), out: int | None = None) -> Up:
        manifest = tmp_path / "fleet.yaml"
        manifest.write_text(yaml.safe_dump_all(documents))
        python = str(tmp_path / "bin" / "python")
        up = Up([python, "-m", "pagefleet_operator.cli", str(manifest), *flags], environment, out)
        started.append(up)
        return up

    yield start
    for up in started:
        up.close()


def children(state: Path) -> list[int]:
    (record,) = state.glob("pagefleet/*/processes.json")
    return list(recorded_pids(record.parent).values())


def test_ctrl_c_stops_all_children_and_is_a_clean_end(start_up: StartUp, document: Any, tmp_path: Path) -> None:
    up = start_up(document(replicas=2))
    up.read_until("pagefleet chat http://127.0.0.1:")
    pids = children(tmp_path)
    assert len(pids) == 3
    up.process.send_signal(signal.SIGINT)
    assert up.finish() == 0
    assert "stops: running requests may finish" in up.text
    assert up.text.endswith("\nstopped\n")
    assert "\x1b" not in up.text
    assert "Traceback" not in up.text
    assert all_gone(pids, 0.0)


def test_second_ctrl_c_ends_it_now(start_up: StartUp, document: Any, tmp_path: Path) -> None:
    up = start_up(document(engine={"args": ["--ignore-sigterm"]}))
    up.read_until("qwen is ready at")
    pids = children(tmp_path)
    up.process.send_signal(signal.SIGINT)
    up.read_until("qwen-engine-0: draining")
    up.process.send_signal(signal.SIGINT)
    assert up.finish() == 130
    assert "did not end by itself" not in up.text, "which is said of what was waited for"
    assert all_gone(pids, 0.0)


def test_children_end_with_a_fleet_that_is_killed(start_up: StartUp, document: Any, tmp_path: Path) -> None:
    up = start_up(document())
    up.read_until("qwen is ready at")
    pids = children(tmp_path)
    up.process.kill()
    up.finish()
    assert all_gone(pids)


def test_what_a_killed_fleet_could_not_end_is_ended_by_the_next(
    start_up: StartUp, document: Any, tmp_path: Path
) -> None:
    stubborn = document(engine={"args": ["--ignore-sigterm"]})
    up = start_up(stubborn)
    up.read_until("qwen is ready at")
    pids = children(tmp_path)
    up.process.kill()
    up.finish()
    again = start_up(stubborn)
    again.read_until("ended what an earlier run had left: qwen-engine-0")
    assert all_gone(pids)


def test_two_fleets_of_one_file_are_told_apart(start_up: StartUp, document: Any) -> None:
    up = start_up(document())
    up.read_until("qwen is ready at")
    second = start_up(document())
    assert second.finish() == 1
    assert second.text.startswith(f"pagefleet up: error: another pagefleet up (process {up.process.pid}) uses ")


def test_a_terminal_gets_a_table(start_up: StartUp, document: Any) -> None:
    controller, terminal = pty.openpty()
    os.set_blocking(controller, True)
    up = start_up(document(), out=terminal)
    os.close(terminal)
    up._reader = controller
    up.read_until("qwen is ready at")
    up.read_until("TOK/S")
    assert "\x1b[" in up.text
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(120) == 0


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (("--port", "99999"), 2, "pagefleet up: error: --port is 99999: give 0 to 65535\n"),
        (("--prot", "1"), 2, "pagefleet up: error: unknown argument '--prot'; did you mean --port? (see pagefleet up"),
        (("--host", "192.0.2.1"), 1, "pagefleet up: error: cannot listen on 192.0.2.1 port 8000"),
        (("--state-dir", "/proc/none"), 1, "pagefleet up: error: /proc/none: cannot be written"),
    ],
)
def test_wrong_flags_are_one_line(
    start_up: StartUp, document: Any, flags: tuple[str, ...], status: int, said: str
) -> None:
    up = start_up(document(), flags=flags)
    assert up.finish() == status
    assert said in up.text
    assert "Traceback" not in up.text


def test_each_mistake_in_the_file_is_one_line(start_up: StartUp, document: Any, tmp_path: Path) -> None:
    up = start_up(document(replicas="x", rooter={}))
    assert up.finish() == 2
    assert [line.partition("spec")[2][:9] for line in up.text.splitlines()] == [".replicas", ".rooter: "]
    assert all(line.startswith(f"pagefleet up: error: {tmp_path}/fleet.yaml:") for line in up.text.splitlines())


def test_programs_that_are_not_installed_are_told(start_up: StartUp, document: Any, tmp_path: Path) -> None:
    (tmp_path / "bin" / "pagefleet-serve").unlink()
    up = start_up(document())
    assert up.finish() == 1
    assert up.text.startswith("pagefleet up: error: pagefleet-serve is not installed in this environment")


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys\nfrom pagefleet_operator.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'pydantic', 'rich', 'yaml', 'asyncio'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False, timeout=120).returncode
        == 0
    )


def test_ctrl_c_before_there_is_anything_to_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("pagefleet_operator.local.up.up", interrupted)
    assert main([str(tmp_path)]) == 130


def test_a_name_of_the_hub_is_served_as_a_file_would_be(environment: dict[str, str], tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.repositories["Org/Small"] = Repository()
        hub.repositories["Org/Small"].commit(sharded())
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [str(tmp_path / "bin" / "python"), "-m", "pagefleet_operator.cli", "Org/Small", "--port", "0"]
        up = Up(command, environment | places)
        try:
            up.read_until("small is ready at")
            (folder,) = (tmp_path / "cache" / "pagefleet" / "models").iterdir()
            assert folder.resolve().parent == tmp_path / "hf" / "hub" / "models--Org--Small" / "snapshots"
            (manifest,) = tmp_path.glob("pagefleet/small-*/inferenceservice.yaml")
            assert f"{manifest}: edits of this file count while it runs" in up.text
            manifest.write_text(manifest.read_text() + "  replicas: 2\n")
            up.read_until("small-engine-1: ready")
        finally:
            up.close()
