"""What a new core is told of its fleet."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
from pagefleet_engine.client.core_process import CoreProcess, Surroundings
from pagefleet_engine.config import EngineConfig, ModelConfig
from pagefleet_engine.engine_core.process import CoreStart

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
