"""Ranks of several copies of a model: how they meet, and what goes where."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pagefleet_engine.ranks import copies
from pagefleet_engine.ranks.copies import CopyGroups, HostAndDevice
from pagefleet_engine.ranks.group import Alone, gloo_group
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.ranks.together import TogetherHandles, make_together
from torch import Tensor

PARALLEL = Parallelism(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=3)


@contextlib.contextmanager
def shared() -> Iterator[TogetherHandles]:
    handles = make_together(PARALLEL)
    try:
        yield handles
    finally:
        handles.close()


def on_every_rank(work: Callable[[TogetherHandles, int, int], object]) -> list[object]:
    """What `work` gives for each copy and rank."""
    size = PARALLEL.world_size
    numbers = [(copy, rank) for copy in range(PARALLEL.data_parallel_size) for rank in range(size)]
    with shared() as handles, ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(lambda number: work(handles, *number), numbers))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_ranks_meet_those_of_their_number_and_those_of_their_stage(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With GPUs in a store that has no name; gloo stands for NCCL."""
    monkeypatch.setattr(copies, "meet_by_nccl", gloo_group)

    def work(handles: TogetherHandles, copy: int, rank: int) -> object:
        part = PARALLEL.part(rank)
        groups = CopyGroups(handles.of_rank(copy, rank), part, on_gpu=on_gpu)
        assert groups.experts is not None
        found = []
        for group in (groups.data, groups.experts):
            own = group._device if isinstance(group, HostAndDevice) else group
            assert isinstance(group, HostAndDevice) == on_gpu
            found.append((group.index, own.gather_rows(torch.tensor([[copy, rank]])).tolist()))
        return found

    told = iter(on_every_rank(work))
    for copy in range(3):
        for rank in range(4):
            stage, tensor = divmod(rank, 2)
            same = [[one, rank] for one in range(3)]
            all_of_stage = [[one, number] for one in range(3) for number in (2 * stage, 2 * stage + 1)]
            assert next(told) == [(copy, same), (2 * copy + tensor, all_of_stage)]


class Noted(Alone):
    """A group of one that notes the devices of what it is given."""

    def __init__(self) -> None:
        self.devices: list[str] = []

    def gather_rows(self, x: Tensor) -> Tensor:
        self.devices.append(x.device.type)
        return x


def test_numbers_of_the_host_wait_for_no_device() -> None:
    host, device = Noted(), Noted()
    both = HostAndDevice(host, device)
    both.gather_rows(torch.zeros(1))
    both.gather_rows(torch.zeros(1, device="meta"))
    assert (host.devices, device.devices) == (["cpu"], ["meta"])
