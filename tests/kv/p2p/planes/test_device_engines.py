"""Whole engines that pass K/V by device planes whose device is the host: the same tokens as one engine gives."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.executor.rank_pages import MappedPool, RankPages, RankPool, StepFence
from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.cuda_memory import CudaError, host_identity
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.p2p import build as p2p_build
from pagefleet_kv.p2p.build import (
    MAX_COMMUNICATORS,
    device_planes,
    split_communicators,
)
from pagefleet_kv.p2p.data_plane import End, Frame, Landing
from pagefleet_kv.p2p.planes.cuda_ipc import IpcCarriers
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.device.link import Carriers
from pagefleet_kv.p2p.planes.device.opening import NoPlane, PlaneOpening, RankPlane
from pagefleet_kv.p2p.planes.device.plane import DevicePlane
from pagefleet_kv.p2p.planes.device.ranked import RankedPlane
from pagefleet_kv.p2p.planes.device.turns import TurnGiver
from pagefleet_kv.p2p.planes.local_device import AtOnce, LocalDevice, MakeCarriers
from pagefleet_kv.p2p.planes.nccl.carrier import NcclCarriers
from pagefleet_kv.port import EngineSide
from pagefleet_protocol.kv_control import PlaneName

from tests.fakes.byte_pages import PATIENCE_S, BytePages, engine_side
from tests.fakes.device_planes import PoolOfHost
from tests.fakes.kv_engines import FULL_BLOCKS, Fleet, answers_alone, pass_on, running_fleet
from tests.fakes.nccl_world import FakeNccl, FakeSharedMemory, NcclWorld


class DeviceOfRank:
    """Implements `PlaneDevice` for a rank on a CPU, whose pool this process maps too, as if it were a device's."""

    def __init__(self, pool: RankPool, fence: StepFence, makers: Mapping[PlaneName, MakeCarriers]) -> None:
        assert isinstance(pool, MappedPool)
        blocks = torch.from_numpy(pool.blocks)
        self.local = LocalDevice(PoolOfRank(blocks.view(len(blocks), -1)), makers)
        self._fence = fence

    def open(self, opening: PlaneOpening) -> RankPlane:
        return FencedPlane(self.local.open(opening), self._fence)


class PoolOfRank:
    """Implements `DevicePool`."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def after_steps(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("there are no streams on a CPU")


class FencedPlane:
    """A plane in this process, of a rank that is another: waits for steps as the rank would."""

    def __init__(self, plane: DevicePlane, fence: StepFence) -> None:
        self._plane = plane
        self._fence = fence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def send(self, peer: str, frame: Frame) -> None:
        self._fence.before_read()
        self._plane.send(peer, frame)

    def land(self, peer: str, landing: Landing) -> None:
        self._fence.before_write()
        self._plane.land(peer, landing)


class Devices:
    """What all engines of a test make their carriers of."""

    def __init__(self) -> None:
        self.world = NcclWorld()
        self.memory = FakeSharedMemory()
        self.libraries: list[FakeNccl] = []
        self.num_turns = 0
        """That engines of several ranks gave."""

    @property
    def makers(self) -> Mapping[PlaneName, MakeCarriers]:
        """For `device_planes`."""
        return {"nccl": self._nccl, "cuda_ipc": lambda copies, most: IpcCarriers(self.memory, copies)}

    def _nccl(self, copies: DeviceCopies, most: tuple[int, int]) -> Carriers:
        self.libraries.append(FakeNccl(self.world))
        return NcclCarriers(self.libraries[-1], copies, *most, PATIENCE_S)

    def planes(self, config: KVTransferConfig, side: EngineSide, blocks_per_frame: int) -> dict[PlaneName, RankedPlane]:
        """As `device_planes`, where the host is a device, or one of each rank's."""
        ranks, makers = side.pages, self.makers
        if isinstance(ranks, RankPages):
            ranks.devices = devices = [DeviceOfRank(pool, ranks._fence, makers) for _, pool in ranks._targets]
            assert ranks._turns is not None
            ranks._turns = partial(self._turns, ranks._turns, devices)
        else:
            side = dataclasses.replace(side, pages=PoolOfHost(side.pages))
        return device_planes(config, side, blocks_per_frame, makers)

    def _turns(
        self,
        among_steps: Callable[[PlaneName], TurnGiver],
        devices: Sequence[DeviceOfRank],
        plane: PlaneName,
    ) -> TurnsHere:
        return TurnsHere(self, among_steps(plane), [device.local.turns(plane) for device in devices])


class TurnsHere(AtOnce):
    """Of ranks whose devices are in this process."""

    def __init__(self, devices: Devices, among_steps: TurnGiver, local: Sequence[AtOnce]) -> None:
        self._devices, self._among_steps, self._local = devices, among_steps, local

    def launch(self, turns: Mapping[int, int], end: End) -> bool:
        self._among_steps.launch(turns, end)
        for rank, turn in turns.items():
            self._local[rank].launch({0: turn}, end)
        self._devices.num_turns += len(turns)
        return True


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    """What an engine answers that computes all itself."""
    return answers_alone(model, range(1, 5))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices()
    monkeypatch.setattr(p2p_build, "device_planes", made.planes)
    return made


@pytest.fixture
def fleet(model: Path, key_file: Path, devices: Devices) -> Iterator[Fleet]:
    with running_fleet(model, key_file) as fleet:
        yield fleet
    assert not devices.world.ranks
    assert devices.memory.opened == 0


@pytest.mark.parametrize("plane", ["nccl", "cuda_ipc", "auto"])
def test_tokens_are_those_of_one_engine(
    fleet: Fleet, devices: Devices, expected: dict[int, list[int]], plane: str
) -> None:
    prefill = fleet.engine("a", kv_role="prefill", kv_data_plane=plane)
    decode = fleet.engine("d", kv_role="decode", kv_data_plane=plane, kv_peers=prefill.address)
    for number in (1, 2, 3):
        assert pass_on(fleet, prefill, decode, number) == expected[number]
    assert decode.figure("received_blocks_total") == 3 * FULL_BLOCKS
    assert decode.figure("communicators") == (1.0 if plane == "nccl" else 0.0)
    assert devices.memory.opened == (0 if plane == "nccl" else 1)


@pytest.mark.fleet
@pytest.mark.parametrize("plane", ["cuda_ipc", "nccl"])
@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks", "num_lanes"),
    [
        ((2, 1), (2, 1), 2),
        ((2, 1), (1, 1), 2),
        ((1, 1), (2, 1), 2),
        ((1, 2), (2, 1), 4),
    ],
)
def test_each_rank_has_a_plane_of_its_own(
    fleet: Fleet,
    devices: Devices,
    expected: dict[int, list[int]],
    prefill_ranks: tuple[int, int],
    decode_ranks: tuple[int, int],
    num_lanes: int,
    plane: str,
) -> None:
    tensor, stages = prefill_ranks
    prefill = fleet.engine("a", tensor=tensor, stages=stages, kv_role="prefill", kv_data_plane=plane)
    tensor, stages = decode_ranks
    peers = prefill.address
    decode = fleet.engine("d", tensor=tensor, stages=stages, kv_role="decode", kv_data_plane=plane, kv_peers=peers)
    for number in (1, 2, 3):
        assert pass_on(fleet, prefill, decode, number) == expected[number]
    fleet.until(lambda: prefill.num_held_blocks == 0)  # decode has said that it has all
    assert decode.num_held_blocks == 0
    assert decode.figure("received_blocks_total") == prefill.figure("sent_blocks_total") == 3 * FULL_BLOCKS
    if plane == "cuda_ipc":
        assert devices.memory.opened == num_lanes
        assert not devices.num_turns
    else:
        assert decode.figure("communicators") == prefill.figure("communicators") == num_lanes
        assert devices.num_turns >= 3 * num_lanes


def test_two_engines_may_prefill_for_each_other(fleet: Fleet, expected: dict[int, list[int]], tmp_path: Path) -> None:
    known = tmp_path / "peers"
    known.touch()
    one = fleet.engine("a", kv_data_plane="nccl", kv_peers=f"file:{known}")
    other = fleet.engine("d", kv_data_plane="nccl", kv_peers=one.address)
    known.write_text(other.address)
    fleet.until(lambda: one.peers.find(other.address) is not None)
    assert pass_on(fleet, one, other, 1) == expected[1]
    assert pass_on(fleet, other, one, 2) == expected[2]
    assert one.figure("received_blocks_total") == other.figure("received_blocks_total") == FULL_BLOCKS


def test_where_memory_cannot_be_opened_the_next_plane_is_taken(
    fleet: Fleet, devices: Devices, expected: dict[int, list[int]]
) -> None:
    devices.memory.refuses = True
    prefill = fleet.engine("a", kv_role="prefill")
    decode = fleet.engine("d", kv_role="decode", kv_peers=prefill.address)
    assert pass_on(fleet, prefill, decode, 1) == expected[1]  # computed here
    assert decode.figure("received_blocks_total") == 0.0
    devices.libraries[0].refuses = "ncclCommInitRankConfig: Duplicate GPU detected"
    assert pass_on(fleet, prefill, decode, 2) == expected[2]
    assert pass_on(fleet, prefill, decode, 3) == expected[3]  # over tcp
    assert decode.figure("received_blocks_total") == FULL_BLOCKS


def test_damage_on_the_way_is_computed_again(fleet: Fleet, devices: Devices, expected: dict[int, list[int]]) -> None:
    prefill = fleet.engine("a", kv_role="prefill", kv_data_plane="nccl")
    decode = fleet.engine("d", kv_role="decode", kv_data_plane="nccl", kv_peers=prefill.address)
    devices.world.damage = lambda address, num_bytes: _flip(address)
    assert pass_on(fleet, prefill, decode, 1) == expected[1]
    assert decode.figure("received_blocks_total") == 0.0
    devices.world.damage = None
    assert pass_on(fleet, prefill, decode, 2) == expected[2]
    assert decode.figure("received_blocks_total") == FULL_BLOCKS


def _flip(address: int) -> None:
    ctypes.c_ubyte.from_address(address + 100).value ^= 1


class Ranks(BytePages):
    """Pages of two ranks, each with a device on which nothing can be opened, or none."""

    def __init__(self, *, have_devices: bool) -> None:
        super().__init__(4)
        self.devices = [self, self] if have_devices else []

    def turns(self, plane: str) -> AtOnce:
        raise AssertionError("there is no plane")

    def open(self, opening: PlaneOpening) -> RankPlane:
        raise NoPlane(f"there is no {opening.name}")


def test_an_engine_whose_copies_share_experts_does_without_nccl(devices: Devices) -> None:
    """One device, whose steps wait for other copies' as sums of ranks do."""
    config = KVTransferConfig(kv_connector="p2p")
    side = dataclasses.replace(engine_side(PoolOfHost(BytePages(4))), steps_with_copies=True)
    planes = device_planes(config, side, 1024, devices.makers)
    assert list(planes) == ["cuda_ipc"]
    planes["cuda_ipc"].close()
    with pytest.raises(KVConfigError, match="kv_data_plane nccl cannot be had: nothing orders its kernels"):
        device_planes(dataclasses.replace(config, kv_data_plane="nccl"), side, 1024, devices.makers)


def test_several_ranks_take_nccl_only_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = KVTransferConfig(kv_connector="p2p")
    side = engine_side(Ranks(have_devices=True))
    assert device_planes(config, side, 1) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "K/V does not travel by cuda_ipc: there is no cuda_ipc",
        "K/V does not travel by nccl: engines of several ranks take it only by name",
    ]
    with pytest.raises(KVConfigError, match="kv_data_plane nccl cannot be had: there is no nccl"):
        device_planes(dataclasses.replace(config, kv_data_plane="nccl"), side, 1)


def test_ranks_without_devices_of_one_machine_take_tcp_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = KVTransferConfig(kv_connector="p2p")
    assert device_planes(config, engine_side(Ranks(have_devices=False)), 1) == {}
    (record,) = caplog.records
    assert record.getMessage().startswith("K/V of these ranks travels by tcp")


@pytest.mark.parametrize("plane", ["nccl", "cuda_ipc"])
def test_planes_between_devices_need_a_device(plane: str) -> None:
    config = KVTransferConfig(kv_connector="p2p", kv_data_plane=plane)  # type: ignore[arg-type]
    side = engine_side(BytePages(4))
    with pytest.raises(KVConfigError, match=f"kv_data_plane {plane} needs K/V on GPUs: give auto or tcp"):
        device_planes(config, side, 1 << 20)
    assert device_planes(dataclasses.replace(config, kv_data_plane="auto"), side, 1 << 20) == {}
    assert device_planes(dataclasses.replace(config, kv_data_plane="tcp"), side, 1 << 20) == {}


def test_a_plane_that_cannot_be_had_is_refused_by_name_and_left_out_by_auto(devices: Devices) -> None:
    def refuse(copies: DeviceCopies, most: tuple[int, int]) -> Carriers:
        raise CudaError("cudaMalloc: out of memory")

    config = KVTransferConfig(kv_connector="p2p", kv_data_plane="cuda_ipc")
    side = engine_side(PoolOfHost(BytePages(4)))
    makers = {**devices.makers, "cuda_ipc": refuse}
    with pytest.raises(KVConfigError, match="kv_data_plane cuda_ipc cannot be had: cudaMalloc: out of memory"):
        device_planes(config, side, 1024, makers)
    planes = device_planes(dataclasses.replace(config, kv_data_plane="auto"), side, 1024, makers)
    assert list(planes) == ["nccl"]
    planes["nccl"].close()


def test_memory_of_a_plane_that_cannot_be_had_is_given_back(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(copies: DeviceCopies, count: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(DeviceCopies, "slots", full)
    config = KVTransferConfig(kv_connector="p2p", kv_data_plane="cuda_ipc")
    side = engine_side(PoolOfHost(BytePages(4)))
    with pytest.raises(KVConfigError, match="kv_data_plane cuda_ipc cannot be had: out of memory"):
        device_planes(config, side, 1024, devices.makers)
    assert devices.memory.freed


@pytest.mark.parametrize(
    ("role", "most", "split"),
    [("both", 16, (8, 8)), ("both", 3, (1, 2)), ("prefill", 1, (1, 0)), ("decode", 5, (0, 5))],
)
def test_communicators_are_split_by_role(role: str, most: int, split: tuple[int, int]) -> None:
    config = KVTransferConfig(kv_connector="p2p", kv_role=role, kv_max_communicators=most)  # type: ignore[arg-type]
    assert split_communicators(config) == split


@pytest.mark.parametrize("most", [1, MAX_COMMUNICATORS + 1])
def test_communicators_that_cannot_be_split_are_refused(most: int) -> None:
    with pytest.raises(KVConfigError, match="kv_max_communicators"):
        split_communicators(KVTransferConfig(kv_connector="p2p", kv_max_communicators=most))


def test_processes_of_one_host_agree_on_it() -> None:
    assert host_identity() == host_identity()
    assert len(host_identity()) in (0, 32)
