"""Ranks that exchange tensors: what layers need of them, one rank by itself, and ranks over a torch process group.

Every rank of a group makes the same calls in the same order; each call returns the same bits on every rank.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch.distributed has these too, but its types do not say so.
from torch._C._distributed_c10d import Store, Work

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.ranks.stages import NOBODY_LOOKS, Awaiting, StageLinks, check_step

Reduction = Literal["sum", "max", "min"]
_SHM = Path("/dev/shm")  # noqa: S108 - NCCL's place, and only looked at


class RankGroup(Protocol):
    """Ranks that compute together, seen from one of them."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def index(self) -> int:
        """Which of them this is, from 0."""
        ...

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        """`x` reduced over all ranks, element by element; `x` is contiguous, and may be overwritten and returned."""
        ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Join the last dimension of all ranks' tensors, which are `widths` wide in the order of the ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """A new tensor of this rank's `own_rows` of the sum over all ranks, then rows of zeros up to as many as every
        rank gets; `x` is contiguous, and may be overwritten."""
        ...

    def gather_rows(self, x: Tensor) -> Tensor:
        """All ranks' rows, one rank's after another's, in a new tensor; `x` is contiguous, and alike on all ranks."""
        ...

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """What every rank sends this one, in the order of the ranks, in a new tensor. `rows[i][j]` go from rank i to
        rank j: the same numbers on all ranks. `x` is contiguous: rows for the first rank, then for the second, ..."""
        ...

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        ...


def rows_each(num_rows: int, size: int) -> int:
    """How many of so many rows each of `size` ranks gets; the last ranks have zeros in the place of some."""
    return -(-num_rows // size)


def own_rows(num_rows: int, size: int, index: int) -> range:
    """Which rows are a rank's: consecutive ones, fewer or none for the last ranks."""
    each = rows_each(num_rows, size)
    return range(min(num_rows, each * index), min(num_rows, each * (index + 1)))


class Alone:
    """A group of one: nothing is ever sent."""

    size = 1
    index = 0

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        """See RankGroup."""
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See RankGroup."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        return x

    def gather_rows(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        return x

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """See RankGroup."""
        return x

    def barrier(self) -> None:
        """See RankGroup."""


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroup(Protocol):
    """The part that is needed here of `torch.distributed.ProcessGroupGloo` and its like."""

    def size(self) -> int: ...

    def rank(self) -> int: ...

    def allreduce(self, tensors: list[Tensor], op: dist.ReduceOp.RedOpType) -> Work: ...

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor]) -> Work: ...

    def _reduce_scatter_base(self, output: Tensor, input: Tensor) -> Work: ...  # noqa: A002

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work: ...  # noqa: A002

    def alltoall_base(self, output: Tensor, input: Tensor, out_rows: list[int], in_rows: list[int]) -> Work: ...  # noqa: A002

    def barrier(self) -> Work: ...

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work: ...


class TorchGroup:
    """Implements `RankGroup` over a process group that was constructed for it, and that nobody else uses.

    A rank that is gone, or silent for longer than the process group's timeout, is a RuntimeError of torch's.
    """

    __slots__ = ("_awaiting", "_group", "index", "size")

    def __init__(self, group: ProcessGroup, awaiting: Awaiting = NOBODY_LOOKS) -> None:
        self._group = group
        self._awaiting = awaiting
        self.size: int = group.size()
        self.index: int = group.rank()

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        """See RankGroup."""
        self._finish(self._group.allreduce([x], _OPERATIONS[reduction]))
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See RankGroup. Ranks send as much as the widest has."""
        widest = max(widths)
        sent = torch.nn.functional.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x.contiguous()
        received = [torch.empty_like(sent) for _ in widths]
        self._finish(self._group.allgather([received], [sent]))
        return torch.cat([part[..., :width] for part, width in zip(received, widths, strict=True)], -1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        each = rows_each(len(x), self.size)
        padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, each * self.size - len(x)))
        out = x.new_empty(each, *x.shape[1:])
        self._finish(self._group._reduce_scatter_base(out, padded))
        return out

    def gather_rows(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        self._finish(self._group._allgather_base(out, x))
        return out

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """See RankGroup."""
        received = [sent[self.index] for sent in rows]
        out = x.new_empty(sum(received), *x.shape[1:])
        self._finish(self._group.alltoall_base(out, x, received, list(rows[self.index])))
        return out

    def barrier(self) -> None:
        """See RankGroup."""
        self._finish(self._group.barrier())

    def links(self) -> StageLinks:
        """Return channels to the neighbours, for a group of the ranks that have the same number in each stage."""
        before, after = self.index - 1, self.index + 1
        inlet = TorchChannel(self._group, before, self._awaiting) if before >= 0 else None
        outlet = TorchChannel(self._group, after, self._awaiting) if after < self.size else None
        return StageLinks(inlet, outlet)

    def _finish(self, work: Work) -> None:
        with self._awaiting:
            work.wait()


class TorchChannel:
    """Implements `Inlet` and `Outlet` over a process group, from or to one of its ranks."""

    __slots__ = ("_awaiting", "_group", "_peer")

    def __init__(self, group: ProcessGroup, peer: int, awaiting: Awaiting) -> None:
        self._group = group
        self._peer = peer
        self._awaiting = awaiting

    def receive(self, step_id: int, into: Tensor) -> None:
        """See Inlet."""
        number = torch.empty(1, dtype=torch.int64, device=into.device)
        numbered, received = self._group.recv([number], self._peer, 0), self._group.recv([into], self._peer, 1)
        with self._awaiting:
            numbered.wait()
            if number.is_cpu:
                check_step(step_id, int(number))
            received.wait()
        if not number.is_cpu:
            into.masked_fill_(number != step_id, math.nan)

    def send(self, step_id: int, x: Tensor) -> None:
        """See Outlet. Nothing is held on the way: it ends when the other side receives."""
        number = torch.full((1,), step_id, dtype=torch.int64, device=x.device)
        with self._awaiting:
            for sent in (self._group.send([number], self._peer, 0), self._group.send([x], self._peer, 1)):
                sent.wait()


def gloo_group(
    store: Store,
    index: int,
    size: int,
    timeout: timedelta,
    address: str = "127.0.0.1",
    awaiting: Awaiting = NOBODY_LOOKS,
) -> tuple[TorchGroup, Callable[[timedelta], None]]:
    """Ranks on CPUs, which meet in `store`; and what sets the timeout anew. Waits until all have come.

    `timeout` is for that, and for every call later. `address`: of this machine, by which the others reach it;
    GLOO_SOCKET_IFNAME names the network interface instead. `awaiting`: what the rank waits in.

    Raises:
        RuntimeError: they did not come in time, or the address is none of this machine's.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    device = gloo.create_device(interface=interface) if interface else gloo.create_device(hostname=address)
    options._devices = [device]
    options._timeout = timeout
    group = gloo(store, index, size, options)
    return TorchGroup(group, awaiting), group._set_default_timeout


def meet_by_gloo(
    store: Store, index: int, size: int, timeout: timedelta, address: str, awaiting: Awaiting
) -> tuple[TorchGroup, Callable[[timedelta], None]]:
    """`gloo_group` for whom a user waits.

    Raises:
        ConfigError: they do not reach each other.
    """
    try:
        return gloo_group(store, index, size, timeout, address, awaiting)
    except RuntimeError as error:
        line = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"gloo does not join the ranks ({line}): let nodes reach each other on any port, or name the network "
            "interface by GLOO_SOCKET_IFNAME"
        ) from error


def nccl_group(
    store: Store, index: int, size: int, timeout: timedelta
) -> tuple[TorchGroup, Callable[[timedelta], None]]:
    """Ranks with a CUDA device each, which meet in `store`; and what sets the timeout anew.

    Raises:
        RuntimeError: NCCL cannot join them, or is not in this build of torch.
    """
    if not dist.is_nccl_available():
        raise RuntimeError("this build of torch has no NCCL")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    group = nccl(store, index, size, options)
    return TorchGroup(group), group._set_default_timeout


def meet_by_nccl(
    store: Store, index: int, size: int, timeout: timedelta
) -> tuple[TorchGroup, Callable[[timedelta], None]]:
    """`nccl_group` whose ranks have met once.

    Raises:
        ConfigError: they do not reach each other.
    """
    try:
        group, set_timeout = nccl_group(store, index, size, timeout)
        group.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
    except RuntimeError as error:
        line, free = " ".join(str(error).split())[:300], shutil.disk_usage(_SHM).free >> 20
        remedy = f"NCCL_DEBUG=INFO says more; /dev/shm has {free} MiB free, and NCCL takes some tens for each rank"
        raise ConfigError(f"NCCL does not join the ranks ({line}): {remedy}") from error
    return group, set_timeout
