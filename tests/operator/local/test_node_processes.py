"""An engine of several processes: whichever of them ends, all are gone, and the right one is told of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pagefleet_operator.local.log_files import LogFolder, ProcessLog
from pagefleet_operator.local.node_processes import NodeProcesses
from pagefleet_operator.local.process import Launch
from pagefleet_operator.local.state_dir import start_time

pytestmark = pytest.mark.fleet
FOREVER = "exec tail -f /dev/null"


async def run(folder: Path, *scripts: str, told: bool = False) -> tuple[int, list[str], tuple[int, ...]]:
    """Run a shell script as each node; returns the exit status, the log of node 0, and the processes' ids."""
    logs = LogFolder(folder)
    own = ProcessLog(logs, "tiny-0", lambda _: None)
    launches = [Launch(("/bin/sh", "-c", script), {}, "") for script in scripts]
    launch = Launch(launches[0].argv, {}, "", followers=tuple(launches[1:]))
    nodes = await NodeProcesses.start(launch, own, lambda node: ProcessLog(logs, f"tiny-0-{node}", lambda _: None))
    if told:
        nodes.terminate()
    return await nodes.wait(), list(own.last_lines), nodes.pids


def test_when_the_one_that_serves_ends_all_have_ended(tmp_path: Path) -> None:
    status, lines, pids = asyncio.run(run(tmp_path, "echo rank 1 is lost; exit 3", FOREVER, FOREVER))
    assert (status, lines) == (3, ["rank 1 is lost"])
    assert [start_time(pid) for pid in pids] == [None] * 3


def test_a_node_that_fails_is_told_of_by_the_one_that_serves(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    leader = f"until [ -e {gone} ]; do sleep 0.05; done; echo node 1 is lost; exit 1"
    status, lines, _ = asyncio.run(run(tmp_path, leader, f"echo no memory; touch {gone}; exit 7"))
    assert (status, lines) == (1, ["node 1 is lost"])


def test_a_node_whose_end_nobody_notices_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagefleet_operator.local.node_processes._LEADER_TELLS_S", 0.2)
    status, lines, pids = asyncio.run(run(tmp_path, FOREVER, "echo unknown flag; exit 2"))
    assert (status, lines) == (2, ["node 1: unknown flag"])
    assert [start_time(pid) for pid in pids] == [None] * 2


def test_one_that_is_told_to_end_takes_the_others_along(tmp_path: Path) -> None:
    status, _, pids = asyncio.run(run(tmp_path, FOREVER, FOREVER, told=True))
    assert status == -15
    assert [start_time(pid) for pid in pids] == [None] * 2
