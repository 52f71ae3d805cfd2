"""Groups of ranks, over gloo and in shared memory: what each rank gets is the same."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.executor.messages import StartFailed
from pagefleet_engine.ranks import group as group_module
from pagefleet_engine.ranks import shared_memory
from pagefleet_engine.ranks.doorbell import Doorbell
from pagefleet_engine.ranks.group import Alone, RankGroup, Reduction
from pagefleet_engine.ranks.shared_handles import SLOT_BYTES, make_shared_group
from pagefleet_engine.ranks.shared_memory import SharedGroup
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from tests.fakes.ranks import in_memory, on_ranks

KINDS = pytest.mark.parametrize("on", [on_ranks, in_memory])
On = Callable[[int, Callable[[RankGroup], Any]], list[Any]]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_rank_gets_the_same_sum(dtype: torch.dtype, on: On) -> None:
    sums = on(3, lambda group: group.all_reduce(torch.full((2, 5), group.index + 1, dtype=dtype)))
    assert all(torch.equal(one, torch.full((2, 5), 6, dtype=dtype)) for one in sums)


@KINDS
@pytest.mark.parametrize(("reduction", "expected"), [("max", 2.0), ("min", 0.0)])
def test_extremes_are_those_of_all_ranks(reduction: Reduction, expected: float, on: On) -> None:
    got = on(3, lambda group: group.all_reduce(torch.tensor([float(group.index)]), reduction))
    assert [float(one) for one in got] == [expected] * 3


@KINDS
def test_what_ranks_exchange_may_be_computed_in_inference_mode_or_not(on: On) -> None:
    def sums(group: RankGroup) -> list[float]:
        found = []
        for inference in (True, True, False, False, True):
            with torch.inference_mode(inference):
                found.append(float(group.all_reduce(torch.ones(1))))
        return found

    assert on(2, sums) == [[2.0] * 5] * 2


@KINDS
def test_ranks_of_different_widths_are_joined_in_order(on: On) -> None:
    widths = (3, 2, 1)

    def gather(group: RankGroup) -> Tensor:
        own = torch.full((4, widths[group.index]), float(group.index))
        return group.all_gather(own, widths)

    expected = torch.tensor([0.0, 0, 0, 1, 1, 2]).expand(4, 6)
    assert all(torch.equal(one, expected) for one in on(3, gather))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "expected"), [(6, [[0, 6], [12, 18], [24, 30]]), (4, [[0, 6], [12, 18], [0, 0]])])
def test_each_rank_gets_the_sum_of_its_rows_and_zeros_behind_it(
    num_rows: int, expected: list[list[float]], dtype: torch.dtype, on: On
) -> None:
    rows = torch.arange(num_rows, dtype=dtype)[:, None].expand(num_rows, 2)
    sums = on(3, lambda group: group.reduce_scatter(rows * (group.index + 1)))
    assert [one.tolist() for one in sums] == [[[number] * 2 for number in rows] for rows in expected]


@KINDS
def test_rows_are_gathered_in_the_order_of_the_ranks(on: On) -> None:
    got = on(3, lambda group: group.gather_rows(torch.full((2, 2), float(group.index))))
    assert all(one[:, 0].tolist() == [0, 0, 1, 1, 2, 2] for one in got)


@KINDS
@pytest.mark.parametrize("width", [1, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_rows_go_to_the_ranks_that_they_are_for(dtype: torch.dtype, width: int, on: On) -> None:
    """Also when that is nobody, or more than one piece; row `ij` goes from rank i to rank j."""
    rows = [[1, 2, 0], [0, 0, 3], [0, 0, 0]]

    def send(group: RankGroup) -> list[float]:
        index = group.index
        marks = [10.0 * index + to for to, count in enumerate(rows[index]) for _ in range(count)]
        x = torch.tensor(marks, dtype=dtype)[:, None].expand(-1, width).contiguous()
        got = group.all_to_all(x, rows)
        assert got.dtype == dtype
        assert (got == got[:, :1]).all()
        return got[:, 0].tolist()

    assert on(3, send) == [[0], [1, 1], [12, 12, 12]]


@KINDS
def test_a_sum_that_is_not_a_number_on_one_rank_is_none_on_all(on: On) -> None:
    def work(group: RankGroup) -> Tensor:
        return group.all_reduce(torch.tensor([float("nan") if group.index == 1 else 1.0, 1.0]))

    assert [one.isnan().tolist() for one in on(2, work)] == [[True, False]] * 2


def test_a_rank_alone_sends_nothing() -> None:
    alone, x = Alone(), torch.ones(2, 3)
    assert alone.all_reduce(x) is x
    assert alone.all_gather(x, (3,)) is x
    assert alone.gather_rows(alone.reduce_scatter(x)) is x
    assert alone.all_to_all(x, [[2]]) is x
    alone.barrier()


def test_what_is_larger_than_a_slot_goes_in_pieces() -> None:
    count = 2 * SLOT_BYTES // 4 + 5
    whole = torch.arange(count, dtype=torch.float32)
    widths = (count, 3)

    def work(group: RankGroup) -> tuple[Tensor, Tensor]:
        own = whole * 2 if group.index else whole.clone()
        return group.all_reduce(own), group.all_gather(whole[None, : widths[group.index]], widths)

    for total, joined in in_memory(2, work):
        assert torch.equal(total, whole * 3)
        assert torch.equal(joined[0], torch.cat([whole, whole[:3]]))


def test_rows_that_are_more_than_a_slot_go_in_pieces() -> None:
    whole = torch.arange(3 * SLOT_BYTES // 8 + 3, dtype=torch.float32)[:, None].repeat(1, 2)

    def work(group: RankGroup) -> Tensor:
        return group.gather_rows(group.reduce_scatter(whole.clone()))[: len(whole)]

    assert all(torch.equal(one, 3 * whole) for one in in_memory(3, work))


def test_thousands_of_rounds_keep_their_order() -> None:
    def work(group: RankGroup) -> bool:
        rounds = range(3000)
        sums = [int(group.all_reduce(torch.tensor([float(n + group.index)]))) for n in rounds]
        group.barrier()
        return sums == [3 * n + 3 for n in rounds]

    assert in_memory(3, work) == [True] * 3


def test_time_in_which_ranks_are_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = make_shared_group(2)
    first, second = SharedGroup(handles, 0), SharedGroup(handles, 1)
    first.patience_s = 0.04
    waits: list[int] = []
    ours = threading.get_ident()

    def stopped(bell: Doorbell, timeout_s: float | None = None, spin_s: float = 0.0) -> int:
        if threading.get_ident() != ours:  # somebody whom another test left behind
            return wait(bell, timeout_s, spin_s)
        waits.append(wait(bell, timeout_s, spin_s))
        if len(waits) == 1:
            time.sleep(0.3)
            second.barrier()
            return 0
        return waits[-1]

    wait = Doorbell.wait
    monkeypatch.setattr(Doorbell, "wait", stopped)
    monkeypatch.setattr(shared_memory, "WAIT_S", 0.05)
    first.barrier()
    assert waits == [0, 1, 1]
    for fd in handles.fds:
        os.close(fd)


def test_who_is_late_is_named() -> None:
    handles = make_shared_group(3)
    group = SharedGroup(handles, 0)
    group.patience_s = 0.01
    with pytest.raises(RuntimeError, match=r"waited 0.01 s for rank 1, 2$"):
        group.barrier()
    for fd in handles.fds:
        os.close(fd)


def test_nccl_without_room_in_shared_memory_says_how_much_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_room(*args: object) -> Any:
        raise RuntimeError("NCCL error: unhandled system error\nError while creating shared memory segment /nccl-x")

    monkeypatch.setattr(group_module, "nccl_group", without_room)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3 * 2**20 + 5))
    with pytest.raises(ConfigError) as told:
        group_module.meet_by_nccl(HashStore(), 0, 2, timedelta(seconds=1))
    assert "creating shared memory segment" in (line := str(told.value))
    assert line.endswith("/dev/shm has 3 MiB free, and NCCL takes some tens for each rank")
    assert "\n" not in line
    assert str(StartFailed("config", line).error("rank 1 on node-b")) == f"rank 1 on node-b: {line}"
