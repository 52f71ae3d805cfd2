"""What a new core is told of its fleet."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
from pagefleet_engine.client.core_process import CoreProcess
from pagefleet_engine.config import EngineConfig, ModelConfig
from pagefleet_engine.engine_core.process import CoreStart

COPY_FIRST_LINE = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.readline())"


async def started(file: Path, fleet_key_file: str | None) -> CoreStart:
    """Start a core that writes down what it is told, and wait for its end."""
    command = (sys.executable, "-c", COPY_FIRST_LINE, str(file))
    process = CoreProcess(EngineConfig(model=ModelConfig(model="m")), command, None, fleet_key_file)
    ended = asyncio.Event()
    try:
        process.start(ended.set)
        await asyncio.wait_for(ended.wait(), 60)
    finally:
        process.stop()
    start = msgspec.json.decode(file.read_bytes(), type=CoreStart)
    assert start.incarnation == process.incarnation
    return start


def test_the_file_of_the_fleet_key_is_told_and_not_its_content(tmp_path: Path) -> None:
    start = asyncio.run(started(tmp_path / "told", "/run/secrets/fleet-key"))
    assert start.fleet_key_file == "/run/secrets/fleet-key"
    assert asyncio.run(started(tmp_path / "told", None)).fleet_key_file is None
