"""Ranks whose GPUs reach each other's memory: small sums take one kernel there, in graphs too, all else another group.

What a rank gives to be read it exports as a handle of CUDA's; the others open it, and all try it before they rely on
it. A GPU of another process is found by its handle, so a rank need not see it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from pagefleet_kernels.rank_sum import DTYPES, MAX_BYTES, MAX_RANKS, MEMORY_BYTES, PeerMemory, sum_ranks_
from pagefleet_kv.cuda_memory import CudaError, CudaSharedMemory, OpenedMemory, find_cudart, host_identity
from torch import Tensor

# torch.distributed has it too, but its types do not say so.
from torch._C._distributed_c10d import Store

from pagefleet_engine.ranks.group import RankGroup, Reduction

_FEW_RANKS = 4
"""Up to here a rank reads so little of others that NCCL's two turns cost more for any message that fits."""
TRIAL_S = 60.0
"""Ranks compile the kernel, each for itself, before they meet in it."""
_LOOK_S = 0.5


class PeerGroup:
    """Implements `RankGroup`; sums of more ranks are of fewer bytes, as each rank reads what all have.

    Args:
        group: of the same ranks, for all but small sums.
        memory: of theirs.
    """

    def __init__(self, group: RankGroup, memory: PeerMemory) -> None:
        self.size, self.index = group.size, group.index
        self._group = group
        self._memory = memory
        self._most_bytes = MAX_BYTES if self.size <= _FEW_RANKS else MAX_BYTES // 2

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        """See RankGroup."""
        if reduction == "sum" and x.dtype in DTYPES and x.nbytes <= self._most_bytes:
            return sum_ranks_(x, self._memory)
        return self._group.all_reduce(x, reduction)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See RankGroup."""
        return self._group.all_gather(x, widths)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        return self._group.reduce_scatter(x)

    def gather_rows(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        return self._group.gather_rows(x)

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """See RankGroup."""
        return self._group.all_to_all(x, rows)

    def barrier(self) -> None:
        """See RankGroup."""
        self._group.barrier()


class SharedMemory(Protocol):
    """Memory that processes share by handles; errors raise `CudaError`."""

    def export(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """Return new memory, uint8 [num_bytes] of zeros, and a handle of it."""
        ...

    def open(self, handle: bytes) -> OpenedMemory:
        """Return where another process's memory lies here."""
        ...


def _of_cuda() -> SharedMemory:
    return CudaSharedMemory(find_cudart(torch.version.cuda))


def open_peers(
    store: Store,
    index: int,
    size: int,
    make: Callable[[], SharedMemory] = _of_cuda,
    identify: Callable[[], str] = host_identity,
    trial_s: float = TRIAL_S,
) -> PeerMemory | None:
    """Share memory of this process's GPU with the other ranks, which meet in `store`, and try it.

    Args:
        store: where nobody else writes.
        index: of this rank.
        size: of the group.
        make: gives memory to share; raises CudaError where there is none.
        identify: tells what is alike where processes can open each other's memory; empty: unknown.
        trial_s: how long a rank's device waits for others when they try it.

    Returns:
        What all ranks reach; None on every rank where one of them does not reach all: they are on several machines, or
        no way leads from one GPU to another.

    Raises:
        RuntimeError: a rank did not come.
    """
    own, handle, host = None, b"", ""
    with contextlib.suppress(CudaError):
        shared, host = make(), identify()
        if size <= MAX_RANKS and host:
            own, handle = shared.export(MEMORY_BYTES)
            if own.is_cuda:
                torch.cuda.synchronize()  # it is zeros before others write to it
    hosts = _told_by_all(store, "host", index, size, host.encode())
    handles = _told_by_all(store, "handle", index, size, handle)
    if own is None or not all(handles) or len({*hosts}) > 1:
        return None
    addresses: list[int] = []
    with contextlib.suppress(CudaError):
        for rank, one in enumerate(handles):
            addresses.append(own.data_ptr() if rank == index else shared.open(one).address)
    if not all(_told_by_all(store, "opened", index, size, b"yes" if len(addresses) == size else b"")):
        return None
    late = torch.zeros(1, dtype=torch.int64, pin_memory=own.is_cuda)
    memory = PeerMemory(index, own, torch.tensor(addresses, device=own.device), late)
    memory.wait_at_most(trial_s)
    return memory if all(_told_by_all(store, "tried", index, size, b"yes" if _is_right(memory) else b"")) else None


def watch_peers(memory: PeerMemory, on_late: Callable[[int], None]) -> None:
    """Have a thread call `on_late` with the number of a rank that the device waited for in vain."""

    def watch() -> None:
        while not (number := int(memory.late)):
            time.sleep(_LOOK_S)
        on_late(number - 1)

    threading.Thread(target=watch, name="peers", daemon=True).start()


def _told_by_all(store: Store, name: str, index: int, size: int, told: bytes) -> list[bytes]:
    """What each rank tells under a name, in hexadecimal digits on the way."""
    store.set(f"{name} {index}", told.hex() or "-")
    found = [store.get(f"{name} {rank}").decode() for rank in range(size)]
    return [bytes.fromhex(one.strip("-")) for one in found]


def _is_right(memory: PeerMemory) -> bool:
    """Whether a sum in each of the two sets of slots is what it must be; all ranks ask at once."""
    size, index = len(memory.addresses_R), memory.index
    steps = torch.arange(MAX_BYTES // 4, dtype=torch.float32, device=memory.own.device)
    for turn in range(2):
        found = sum_ranks_(steps * (1 + index) + turn, memory)
        if not torch.equal(found, steps * (size * (size + 1) // 2) + turn * size):
            return False
    return True
