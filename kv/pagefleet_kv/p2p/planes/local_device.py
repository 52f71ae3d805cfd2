"""The device of this process, on which planes are opened: the core's where it has one rank, else a rank's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from pagefleet_protocol.kv_control import PlaneName

from pagefleet_kv.cuda_memory import CudaError, CudaSharedMemory, find_cudart
from pagefleet_kv.p2p.data_plane import End
from pagefleet_kv.p2p.planes.cuda_ipc import IpcCarriers
from pagefleet_kv.p2p.planes.device.copies import WORD_BYTES, DeviceCopies, DevicePool
from pagefleet_kv.p2p.planes.device.link import Carriers
from pagefleet_kv.p2p.planes.device.opening import NoPlane, PlaneDevice, PlaneOpening
from pagefleet_kv.p2p.planes.device.plane import STALL_S, DevicePlane
from pagefleet_kv.p2p.planes.nccl.carrier import NcclCarriers
from pagefleet_kv.p2p.planes.nccl.library import NcclError, NcclFunctions, find_nccl

MakeCarriers = Callable[[DeviceCopies, tuple[int, int]], Carriers]


class LocalDevice:
    """Implements `PlaneDevice` for a device of this process, and `RankedPool` for the only one of an engine."""

    def __init__(self, pool: DevicePool, makers: Mapping[PlaneName, MakeCarriers]) -> None:
        self._pool = pool
        self._makers = makers
        self._planes: dict[str, DevicePlane] = {}

    @property
    def devices(self) -> Sequence[PlaneDevice]:
        """See RankedPool."""
        return [self]

    def open(self, opening: PlaneOpening) -> DevicePlane:
        """See PlaneDevice."""
        slot_bytes = opening.blocks_per_frame * self._pool.blocks.shape[1]
        try:
            copies = DeviceCopies(self._pool, -(-slot_bytes // WORD_BYTES) * WORD_BYTES)
            carriers = self._makers[opening.name](copies, opening.max_communicators)
            try:
                plane = DevicePlane(carriers, copies, opening.compatibility, opening.num_slots)
            except (CudaError, torch.OutOfMemoryError):
                carriers.close()
                raise
        except (NcclError, CudaError, torch.OutOfMemoryError) as error:
            raise NoPlane(str(error)) from error
        self._planes[opening.name] = plane
        return plane

    def turns(self, plane: PlaneName) -> AtOnce:
        """See RankedPool."""
        return AtOnce(self._planes[plane])


class AtOnce:
    """Implements `TurnGiver` for a device whose steps wait for no other."""

    is_one_of_several = False
    bell = None

    def __init__(self, plane: DevicePlane) -> None:
        self._plane = plane

    def launch(self, turns: Mapping[int, int], end: End) -> bool:
        """See TurnGiver."""
        for turn in turns.values():
            self._plane.launch(turn, lambda: None)
        return True

    def rest(self) -> None:
        """See TurnGiver."""

    def silence(self) -> None:
        """See TurnGiver."""


def _make_nccl(copies: DeviceCopies, most: tuple[int, int]) -> Carriers:
    library = NcclFunctions(find_nccl())
    return NcclCarriers(library, copies, *most, STALL_S)


def _make_ipc(copies: DeviceCopies, most: tuple[int, int]) -> Carriers:
    return IpcCarriers(CudaSharedMemory(find_cudart(torch.version.cuda)), copies)


CARRIERS: Mapping[PlaneName, MakeCarriers] = {"cuda_ipc": _make_ipc, "nccl": _make_nccl}
