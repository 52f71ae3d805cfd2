"""From the configuration to the data planes between devices, of which there may be none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from pagefleet_protocol.kv_control import PlaneName

from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.p2p.planes.cuda_ipc.carrier import IpcCarriers
from pagefleet_kv.p2p.planes.cuda_ipc.memory import CudaError, CudaSharedMemory, find_cudart
from pagefleet_kv.p2p.planes.device.copies import WORD_BYTES, DeviceCopies, DevicePool
from pagefleet_kv.p2p.planes.device.link import Carriers
from pagefleet_kv.p2p.planes.device.plane import STALL_S, DevicePlane
from pagefleet_kv.p2p.planes.nccl.carrier import NcclCarriers
from pagefleet_kv.p2p.planes.nccl.library import NcclError, NcclFunctions, NcclLibrary, find_nccl
from pagefleet_kv.port import EngineSide

NUM_SLOTS = 16
"""Of one direction; one link uses half of them, so that frames are under way while words about others are."""
MAX_COMMUNICATORS = 28
"""torch has 32 streams to give out, and each communicator has its own."""
BEST_FIRST: tuple[PlaneName, ...] = ("cuda_ipc", "nccl")

MakeCarriers = Callable[[DeviceCopies, tuple[int, int]], Carriers]

_log = logging.getLogger(__name__)


def device_planes(
    config: KVTransferConfig,
    side: EngineSide,
    frame_bytes: int,
    makers: Mapping[PlaneName, MakeCarriers] | None = None,
) -> dict[PlaneName, DevicePlane]:
    """Return the planes that are asked for, best first; with `auto`, those that can be had.

    Args:
        config: of the engine.
        side: the engine.
        frame_bytes: most bytes of a frame that has more than one block.
        makers: of carriers, given how many communicators may send and receive; default: NCCL and CUDA's runtime.

    Raises:
        KVConfigError: one was asked for by name and cannot be had, or kv_max_communicators does not fit.
    """
    asked = config.kv_data_plane
    pool = side.pages
    if asked == "tcp":
        return {}
    if not isinstance(pool, DevicePool):
        if asked != "auto":
            raise KVConfigError(f"kv_data_plane {asked} needs K/V on a GPU: give auto or tcp")
        return {}
    most = split_communicators(config)
    slot_bytes = -(-max(frame_bytes, pool.bytes_per_block) // WORD_BYTES) * WORD_BYTES
    makers = makers or {"cuda_ipc": _make_ipc, "nccl": _make_nccl}
    planes: dict[PlaneName, DevicePlane] = {}
    for name in BEST_FIRST:
        if asked not in ("auto", name):
            continue
        try:
            copies = DeviceCopies(pool, slot_bytes)
            planes[name] = _plane(makers[name](copies, most), copies, config, side)
        except (NcclError, CudaError, torch.OutOfMemoryError) as error:
            if asked == name:
                raise KVConfigError(f"kv_data_plane {name} cannot be had: {error}") from error
            _log.info("K/V does not travel by %s: %s", name, error)
    return planes


def split_communicators(config: KVTransferConfig) -> tuple[int, int]:
    """Return how many communicators may send and how many receive.

    Raises:
        KVConfigError: there are too few for both, or more than streams.
    """
    most = config.kv_max_communicators
    if most > MAX_COMMUNICATORS:
        raise KVConfigError(f"kv_max_communicators is {most}: give at most {MAX_COMMUNICATORS}")
    if config.kv_role == "prefill":
        return most, 0
    if config.kv_role == "decode":
        return 0, most
    if most < 2:
        raise KVConfigError("kv_max_communicators is 1, and kv_role both sends and receives: give 2 or more")
    return most // 2, most - most // 2


def _plane(carriers: Carriers, copies: DeviceCopies, config: KVTransferConfig, side: EngineSide) -> DevicePlane:
    sending = 0 if config.kv_role == "decode" else NUM_SLOTS
    receiving = 0 if config.kv_role == "prefill" else NUM_SLOTS
    try:
        return DevicePlane(carriers, copies, side.shape.compatibility, (sending, receiving))
    except (CudaError, torch.OutOfMemoryError):
        carriers.close()
        raise


def _make_nccl(copies: DeviceCopies, most: tuple[int, int]) -> Carriers:
    library: NcclLibrary = NcclFunctions(find_nccl())
    return NcclCarriers(library, copies, *most, STALL_S)


def _make_ipc(copies: DeviceCopies, most: tuple[int, int]) -> Carriers:
    return IpcCarriers(CudaSharedMemory(find_cudart(torch.version.cuda)), copies)
