"""A rank on a CPU whose pool is taken for a device's, which passes K/V by `SocketNccl`: `python nccl_rank.py`.

With the name of a fault (see `rank_process`) rank 1 does that as its plane is opened. `play_devices` has this process's
ranks be such, and their connectors take them for ranks on GPUs. The thread that computes steps launches a transfer, and
waits until it has ended: a device that runs one kernel after another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.executor import processes, rank, rank_memory
from pagefleet_engine.executor.local_node import LocalNode
from pagefleet_engine.executor.messages import RankStart
from pagefleet_engine.executor.rank_loop import BuiltRank
from pagefleet_engine.executor.rank_process import run_rank
from pagefleet_engine.executor.vital_signs import OwnSigns
from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.worker.worker import Worker
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.device.link import Carriers
from pagefleet_kv.p2p.planes.nccl.carrier import NcclCarriers
from pagefleet_kv.port import KVPages

from tests.fakes.device_planes import PoolOfHost
from tests.fakes.rank_process import misbehave
from tests.fakes.socket_nccl import SocketNccl

if TYPE_CHECKING:  # ranks load this file
    import pytest

COMMAND = (sys.executable, str(Path(__file__).resolve()))
STALL_S = 20.0


class DeviceWorker(Worker):
    """Whose pages are those of a device."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pages: KVPages = PoolOfHost(self.pages)


def _build(start: RankStart, times: StartupTimes, signs: OwnSigns) -> BuiltRank:
    fault = "".join(sys.argv[1:]) if start.rank == 1 else ""
    vars(rank).update(CARRIERS={"nccl": partial(_carriers, fault)}, Worker=DeviceWorker)
    return rank.build_rank(start, times, signs)


def _carriers(fault: str, copies: DeviceCopies, most: tuple[int, int]) -> Carriers:
    misbehave(fault)
    return NcclCarriers(SocketNccl(), copies, *most, STALL_S)


def play_devices(*fault: str) -> None:
    """Have ranks that this process starts, also as another machine, be such, maybe with a fault."""
    start = LocalNode.start

    def start_played(node: LocalNode, folder: str, command: Sequence[str], num_threads: int | None = None) -> None:
        start(node, folder, (*COMMAND, *fault), num_threads)

    def may_open_planes(config: EngineConfig, *, on_cpu: bool) -> bool:
        return config.kv_transfer.kv_data_plane == "nccl"

    setattr(LocalNode, "start", start_played)  # noqa: B010 mypy takes methods for constants
    for module in (processes, rank_memory):
        vars(module)["may_open_planes"] = may_open_planes


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_rank(_build))


def play_devices_meanwhile(monkeypatch: pytest.MonkeyPatch, *fault: str) -> None:
    """As `play_devices`, until the test ends."""
    monkeypatch.setattr(LocalNode, "start", LocalNode.start)
    for module in (processes, rank_memory):
        monkeypatch.setattr(module, "may_open_planes", module.may_open_planes)
    play_devices(*fault)
