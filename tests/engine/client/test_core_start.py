"""What a new core is told, and when."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from pagefleet_engine.client import core_ahead as ahead
from pagefleet_engine.client.core_ahead import CORE_COMMAND, core_ahead
from pagefleet_engine.client.core_process import CoreProcess, Surroundings
from pagefleet_engine.config import EngineConfig, ModelConfig
from pagefleet_engine.engine_core.process import CoreStart
from pagefleet_engine.ranks.parallelism import Parallelism

COPY_FIRST_LINE = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.readline())"


async def start_and_end(file: Path, fleet_key_file: str | None) -> None:
    """Start a core that writes down what it is told, and wait for its end."""
    command = (sys.executable, "-c", COPY_FIRST_LINE, str(file))
    process = CoreProcess(
        EngineConfig(model=ModelConfig(model="m")), command, Surroundings(fleet_key_file=fleet_key_file)
    )
    ended = asyncio.Event()
    try:
        process.start(ended.set)
        await asyncio.wait_for(ended.wait(), 60)
    finally:
        process.stop()


def told(file: Path, fleet_key_file: str | None) -> CoreStart:
    asyncio.run(start_and_end(file, fleet_key_file))
    return msgspec.json.decode(file.read_bytes(), type=CoreStart)


def test_the_file_of_the_fleet_key_is_told_and_not_its_content(tmp_path: Path) -> None:
    assert told(tmp_path / "told", "/run/secrets/fleet-key").fleet_key_file == "/run/secrets/fleet-key"
    assert told(tmp_path / "told", None).fleet_key_file is None


def test_each_start_has_an_incarnation_of_its_own(tmp_path: Path) -> None:
    assert told(tmp_path / "one", None).incarnation != told(tmp_path / "two", None).incarnation


COPY_LINES = """
import sys
with open(sys.argv[1], 'wb') as file:
    for _ in range(2):
        file.write(sys.stdin.buffer.readline())
"""


def test_one_that_was_begun_ahead_is_told_the_settings_and_then_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "CORE_COMMAND", (sys.executable, "-c", COPY_LINES, str(tmp_path / "told")))
    given, found = EngineConfig(model=ModelConfig(model="org/m")), EngineConfig(model=ModelConfig(model="/models/m"))

    async def start() -> None:
        with core_ahead(given) as child:
            assert child is not None
            process, ended = CoreProcess(found, ahead=child), asyncio.Event()
            process.start(ended.set)
            assert process.pid == child.pid
            await asyncio.wait_for(ended.wait(), 60)
            process.stop()

    asyncio.run(start())
    first, second = (tmp_path / "told").read_bytes().splitlines()
    assert msgspec.json.decode(first, type=EngineConfig) == given
    assert msgspec.json.decode(second, type=CoreStart).config == found


def test_one_that_nobody_starts_ends_with_its_context() -> None:
    with core_ahead(EngineConfig(model=ModelConfig(model="m"))) as child:
        assert child is not None
        pid = child.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_several_cores_are_not_begun_ahead() -> None:
    config = EngineConfig(model=ModelConfig(model="m"), parallel=Parallelism(data_parallel_size=2))
    with core_ahead(config) as child:
        assert child is None


def test_one_whose_parent_goes_while_it_imports_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(3600)")
    settings = msgspec.json.encode(EngineConfig(model=ModelConfig(model="m"))) + b"\n"
    slow = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [*CORE_COMMAND, "--ahead"]
    done = subprocess.run(command, input=settings, capture_output=True, check=False, timeout=120, env=slow)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("arguments", [(), ("--ahead",)])
def test_one_that_is_told_nothing_ends_quietly(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([*CORE_COMMAND, *arguments], input=b"", capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
