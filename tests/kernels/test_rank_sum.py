"""Ranks that add up through each other's memory: one by the kernel, the others by its twin, in threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pagefleet_kernels._triton import INTERPRETED
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import BackendUnavailableError, UnsupportedShapeError
from pagefleet_kernels.rank_sum import MAX_BYTES, MEMORY_BYTES, SLOT_BYTES, PeerMemory, sum_ranks_

BACKENDS = (
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="a GPU's ranks are processes")),
    "torch",
)


def make_ranks(size: int, patience_s: float = 60) -> list[PeerMemory]:
    own = [torch.zeros(MEMORY_BYTES, dtype=torch.uint8) for _ in range(size)]
    addresses = torch.tensor([memory.data_ptr() for memory in own])
    ranks = [PeerMemory(at, memory, addresses, torch.zeros(1, dtype=torch.int64)) for at, memory in enumerate(own)]
    for rank in ranks:
        rank.wait_at_most(patience_s)
    return ranks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "index"), [(2, 0), (2, 1), (3, 2), (5, 1)])
def test_every_rank_gets_the_same_sum_round_after_round(size: int, index: int, backend: Backend) -> None:
    """Rounds of all types and sizes, from none to two programs, so that programs are in different rounds."""
    ranks = make_ranks(size)
    each = SLOT_BYTES // 4
    rounds = [
        torch.randint(-9, 9, (size, count)).to(dtype)  # the interpreter truncates where a GPU rounds
        for count, dtype in [
            (3, torch.float32), (each + 5, torch.float32), (7, torch.bfloat16), (0, torch.float32),
            (3 * each, torch.float16), (1, torch.float16), (each, torch.float32),
        ]
    ]  # fmt: skip
    results = [parts.clone() for parts in rounds]

    def run(rank: int, backend: Backend) -> None:
        for parts in results:
            assert sum_ranks_(parts[rank], ranks[rank], backend=backend) is not None

    with ThreadPoolExecutor(size) as pool:
        others = [pool.submit(run, rank, "torch") for rank in range(size) if rank != index]
        run(index, backend)
        for other in others:
            other.result()
    for parts, result in zip(rounds, results, strict=True):
        assert all(torch.equal(row, parts.sum(0)) for row in result)
    assert [int(rank.late) for rank in ranks] == [0] * size


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_does_not_come_leaves_nan_and_its_number(backend: Backend) -> None:
    ranks = make_ranks(3, patience_s=0.01)
    x = torch.ones(5)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(sum_ranks_, torch.ones(5), ranks[2], backend="torch")
        assert sum_ranks_(x, ranks[0], backend=backend).isnan().all()
        assert coming.result().isnan().all()
    assert int(ranks[0].late) in (2, 3)  # the third comes in time or not: it waits no longer itself
    ranks[0].late.zero_()
    assert sum_ranks_(torch.ones(5), ranks[0], backend=backend).isnan().all()
    assert int(ranks[0].late) == 3


@pytest.mark.parametrize(
    "x",
    [torch.ones(4, 2).T, torch.ones(3, dtype=torch.int32), torch.ones(MAX_BYTES // 4 + 1)],
    ids=["strided", "integers", "large"],
)
def test_what_no_kernel_takes_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedShapeError, match="must be contiguous"):
        sum_ranks_(x, make_ranks(2)[0])


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="at most 8"):
        sum_ranks_(torch.ones(1), make_ranks(9)[0])


def test_the_twin_takes_no_memory_of_a_device() -> None:
    with pytest.raises(BackendUnavailableError, match="backend='triton'"):
        sum_ranks_(torch.ones(1, device="meta"), make_ranks(2)[0], backend="torch")
