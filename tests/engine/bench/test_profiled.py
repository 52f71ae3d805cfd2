"""`--profile`: a server records a part of a load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagefleet_engine.bench.cli import main
from pagefleet_engine.bench.load_client import Target
from pagefleet_engine.bench.profiled import profiled
from pagefleet_engine.config import ServerConfig

from tests.engine.server.conftest import MODEL, LiveServer

LOAD = ["--vocab-size=100", "--input-len=4", "--output-len=3", "--num-requests=2"]


@pytest.fixture
def server() -> Iterator[LiveServer]:
    server = LiveServer(ServerConfig(profiler_dir="/profiles"))
    yield server
    server.stop()


def test_the_report_says_where_the_profile_is(server: LiveServer, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(["serve", "--base-url", server.url, "--profile", *LOAD, f"--json={report}"]) == 0
    assert server.engine.profiles == ["started", "stopped after 2 requests"]
    assert json.loads(report.read_text())["figures"]["profile"] == "/profiles/one.json.gz"


def test_a_part_of_a_load_is_recorded(server: LiveServer) -> None:
    async def load() -> float:
        while len(server.engine.profiles) < 2:  # until it has ended  # noqa: ASYNC110 the server is another thread's
            await asyncio.sleep(0.005)
        return 7.0

    found = asyncio.run(profiled(Target(f"{server.url}/v1", MODEL), load(), 0.01, 0.01))
    assert found == (7.0, "/profiles/one.json.gz")


def test_a_server_without_a_folder_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    server = LiveServer(ServerConfig())
    try:
        for delay in ("0", "0.001"):
            assert main(["serve", "--base-url", server.url, "--profile", f"--profile-delay={delay}", *LOAD]) == 2
            said = capsys.readouterr().err
            assert "/start_profile: This server records no profiles: start it with --profiler-dir FOLDER." in said
    finally:
        server.stop()
