"""Makes the offload connector from an engine's settings, and takes the host memory that it keeps blocks in."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pagefleet_protocol.kv_blob import KvShape

from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.offload.connector import OffloadConnector
from pagefleet_kv.offload.eviction import make_policy
from pagefleet_kv.offload.tier import Tier
from pagefleet_kv.port import BuiltConnector, EngineIdentity, EngineSide
from pagefleet_kv.store.blob_store import BlobStore
from pagefleet_kv.store.manifest import claim_folder
from pagefleet_kv.store.mover import BlockMover

MOST_FILES = 2**20
"""Blocks on disk, however large it is: what is known of each takes some 300 bytes of memory."""


def check(config: KVTransferConfig, identity: EngineIdentity) -> None:
    """See ConnectorKind: what it needs is known with the model."""


def build(config: KVTransferConfig, side: EngineSide) -> BuiltConnector:
    return BuiltConnector(build_offload(config, side))


def build_offload(
    config: KVTransferConfig, side: EngineSide, clock: Callable[[], float] = time.monotonic
) -> OffloadConnector:
    """Return the connector over the pages of one worker.

    Raises:
        KVConfigError: the bounds are too small for a block, or the folder or the memory cannot be had.
    """
    shape, pages = side.shape, side.pages
    block_bytes = pages.bytes_per_block
    num_slots = config.kv_offload_memory // block_bytes
    if num_slots < 1:
        raise KVConfigError(
            f"kv_offload_memory is {config.kv_offload_memory} and one block takes {block_bytes} bytes: raise it"
        )
    store = _open_store(config, shape, block_bytes, clock)
    disk = None
    if store is not None:
        num_files = min(config.kv_offload_disk // store.file_bytes, MOST_FILES)
        disk = Tier(num_files, make_policy(config.kv_offload_policy, num_files))
    try:
        memory = HostMemory(num_slots * block_bytes, side.free_memory, pinned=pages.wants_pinned)
    except KVConfigError:
        if store is not None:
            store.close()
        raise
    mover = BlockMover(pages, memory.view, store, scan=None if disk is None else disk.capacity)
    host = Tier(num_slots, make_policy(config.kv_offload_policy, num_slots))
    return OffloadConnector(mover, host, disk, shape, memory.release)


def _open_store(
    config: KVTransferConfig, shape: KvShape, block_bytes: int, clock: Callable[[], float]
) -> BlobStore | None:
    if config.kv_offload_dir is None or config.kv_offload_disk == 0:
        return None
    store = BlobStore(claim_folder(Path(config.kv_offload_dir), shape, alone=True), shape, block_bytes, clock)
    if config.kv_offload_disk < store.file_bytes:
        store.close()
        raise KVConfigError(
            f"kv_offload_disk is {config.kv_offload_disk} and one block takes {store.file_bytes} bytes: raise it"
        )
    return store


_GIB = 1024**3


class HostMemory:
    """Writable bytes, pinned where a GPU copies to and from it, so that copies run beside the steps.

    The system gives plain memory page by page, as it is first used, and pinned memory at once.

    Memory is pinned where it lies: torch's own pinned memory comes in powers of two, up to twice what is asked for.
    """

    def __init__(self, num_bytes: int, free: int, *, pinned: bool) -> None:
        """Take the memory.

        Raises:
            KVConfigError: it is more than `free` bytes, or cannot be pinned.
        """
        if num_bytes > free:  # the system would give it, and end a process when it is used
            raise KVConfigError(
                f"kv_offload_memory takes {num_bytes / _GIB:.2f} GiB of memory and {free / _GIB:.2f} GiB are free: "
                "lower it, or give the engine more"
            )
        self._address: int | None = None
        try:
            self.view = memoryview(mmap.mmap(-1, num_bytes))
            if pinned:
                address = torch.frombuffer(self.view, dtype=torch.uint8).data_ptr()
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
                self._address = address
        except (OSError, RuntimeError):
            raise KVConfigError(
                f"kv_offload_memory takes {num_bytes} bytes and the system does not give as much: lower it"
            ) from None

    def release(self) -> None:
        """Pin it no more; no copy may be under way. May be called twice."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]
            self._address = None
