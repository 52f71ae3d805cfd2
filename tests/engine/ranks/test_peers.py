"""Which sums go through shared memory, and when ranks rely on it: threads as ranks, a CPU's memory as a GPU's."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch
from pagefleet_engine.ranks.group import Alone, Reduction
from pagefleet_engine.ranks.peers import PeerGroup, open_peers, watch_peers
from pagefleet_kernels.rank_sum import MAX_BYTES, MEMORY_BYTES, PeerMemory
from pagefleet_kv.cuda_memory import CudaError, OpenedMemory
from torch import Tensor

# torch.distributed has them too, but its types do not say so.
from torch._C._distributed_c10d import HashStore, PrefixStore


class HostMemory:
    """Shared by threads: a handle is an address."""

    def __init__(self) -> None:
        self._exported: list[Tensor] = []

    def export(self, num_bytes: int) -> tuple[Tensor, bytes]:
        self._exported.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self._exported[-1], self._exported[-1].data_ptr().to_bytes(8, "little")

    def open(self, handle: bytes) -> OpenedMemory:
        return OpenedMemory(int.from_bytes(handle, "little"), MEMORY_BYTES)


class NoneToGive(HostMemory):
    def export(self, num_bytes: int) -> tuple[Tensor, bytes]:
        raise CudaError("no memory")


class OutOfReach(HostMemory):
    def open(self, handle: bytes) -> OpenedMemory:
        raise CudaError("no way leads there")


class SomewhereElse(HostMemory):
    """Opens what is nobody's, as a way between GPUs may that loses what is written."""

    def open(self, handle: bytes) -> OpenedMemory:
        return OpenedMemory(self.export(MEMORY_BYTES)[0].data_ptr(), MEMORY_BYTES)


class Other(Alone):
    """Another group of `size` ranks; notes what it is asked for."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self.asked: list[str] = []

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        self.asked.append(f"{reduction} of {x.nbytes} bytes of {x.dtype}".replace("torch.", ""))
        return x


def opened(
    memories: list[HostMemory], hosts: list[str] | None = None, patience_s: float = 60
) -> list[PeerMemory | None]:
    """What each rank gets."""
    store, size = HashStore(), len(memories)

    def open_one(rank: int) -> PeerMemory | None:
        given = PrefixStore("peers", store)
        host = hosts[rank] if hosts else "host"
        return open_peers(given, rank, size, lambda: memories[rank], lambda: host, trial_s=patience_s)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(open_one, range(size)))


def test_ranks_that_reach_each_other_add_up_small_sums_there() -> None:
    found = opened([HostMemory(), HostMemory(), HostMemory()])
    memories = [memory for memory in found if memory is not None]
    others = [Other(index, 3) for index in range(3)]

    def add_up(rank: int) -> None:
        group = PeerGroup(others[rank], memories[rank])
        assert group.all_reduce(torch.full((5,), float(rank))).tolist() == [3.0] * 5
        for x, reduction in [
            (torch.ones(2), "max"), (torch.ones(2, dtype=torch.int32), "sum"), (torch.ones(MAX_BYTES // 4 + 1), "sum")
        ]:  # fmt: skip
            group.all_reduce(x, reduction)  # type: ignore[arg-type]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add_up, range(3)))
    rest = ["max of 8 bytes of float32", "sum of 8 bytes of int32", f"sum of {MAX_BYTES + 4} bytes of float32"]
    assert [other.asked for other in others] == [rest] * 3


@pytest.mark.parametrize("kind", [NoneToGive, OutOfReach])
def test_all_do_without_where_one_cannot(kind: Callable[[], HostMemory]) -> None:
    assert opened([HostMemory(), kind(), HostMemory()]) == [None] * 3


def test_all_do_without_where_what_is_written_does_not_arrive() -> None:
    assert opened([HostMemory(), SomewhereElse()], patience_s=0.01) == [None] * 2


@pytest.mark.parametrize("hosts", [["a", "b"], ["", ""]], ids=["two", "unknown"])
def test_machines_do_not_open_each_others_memory(hosts: list[str]) -> None:
    assert opened([HostMemory(), HostMemory()], hosts) == [None] * 2


def test_whoever_watches_is_told_which_rank_did_not_come() -> None:
    memories = opened([HostMemory(), HostMemory()])
    (memory, _), told = memories, SimpleQueue[int]()
    assert memory is not None
    memory.wait_at_most(0)
    watch_peers(memory, told.put)
    assert math.isnan(PeerGroup(Other(0, 2), memory).all_reduce(torch.ones(1)).item())
    assert told.get() == 1
