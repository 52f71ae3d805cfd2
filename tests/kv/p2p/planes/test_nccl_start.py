"""A rank that fails as its plane for K/V is opened ends the start of its engine, and leaves nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.executor import asked_planes
from pagefleet_engine.executor.local_node import LocalNode

from tests.fakes.kv_engines import PATIENCE_S, Fleet
from tests.fakes.nccl_rank import play_devices_meanwhile

pytestmark = pytest.mark.fleet

HOST = os.uname().nodename
ANSWER_S = 3.0


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[LocalNode]:
    """All that were made."""
    made: list[LocalNode] = []
    make = LocalNode.__init__

    def note(node: LocalNode, *arguments: object) -> None:
        make(node, *arguments)  # type: ignore[arg-type]
        made.append(node)

    monkeypatch.setattr(LocalNode, "__init__", note)
    return made


@pytest.mark.parametrize(
    ("fault", "num_nodes", "kind", "says"),
    [
        ("die", 1, ModelLoadError, f"^rank 1 on {HOST} was killed by signal 9; .*: the engine must be started again$"),
        ("die", 2, ModelLoadError, f"^rank 1 on {HOST} was killed by signal 9; .*: the engine must be started again$"),
        ("stop", 1, ConfigError, f"cannot be had: rank 1 on {HOST} did not answer for 3 s about K/V that it passes: s"),
        ("hang", 1, ConfigError, f"cannot be had: rank 1 on {HOST} did not answer for 3 s about K/V that it passes: s"),
    ],
)
def test_the_start_ends_with_one_line(
    fleet: Fleet,
    nodes: list[LocalNode],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    num_nodes: int,
    kind: type[Exception],
    says: str,
) -> None:
    monkeypatch.setattr(asked_planes, "ANSWER_S", ANSWER_S if fault != "die" else 60.0)
    play_devices_meanwhile(monkeypatch, fault)
    with pytest.raises(kind, match=says):
        fleet.engine("a", tensor=2, nodes=num_nodes, kv_role="prefill", kv_data_plane="nccl")
    assert sum(len(node.ranks) for node in nodes) == 2
    deadline = time.monotonic() + PATIENCE_S  # another machine ends when its leader has
    while any(Path(f"/proc/{pid}").exists() for node in nodes for pid in node.pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
