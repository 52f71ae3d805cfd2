"""A rank's groups with those of other copies of the model, where these step together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

# torch.distributed has them too, but its types do not say so.
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from pagefleet_engine.ranks.group import RankGroup, Reduction, meet_by_gloo, meet_by_nccl
from pagefleet_engine.ranks.parallelism import Parallelism, RankPart
from pagefleet_engine.ranks.rendezvous import COPIES
from pagefleet_engine.ranks.shared_handles import SharedHandles
from pagefleet_engine.ranks.shared_memory import SharedGroup
from pagefleet_engine.ranks.stages import NOBODY_LOOKS, Awaiting
from pagefleet_engine.ranks.together import CopyShares
from pagefleet_engine.ranks.turns import Halves, SideStream, Turns

_LOAD_PATIENCE = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class FarCopies:
    """How ranks of other copies are met that are reached over the network."""

    store: Store
    """Of this rank; what begins with `COPIES` is for all copies."""
    address: str
    """Of this machine, by which the others reach it."""
    parallel: Parallelism


class CopyGroups:
    """They wait as long as it takes, until `end_loading`.

    Args:
        shares: what the rank has in common with those of other copies.
        part: of the model that it has.
        on_gpu: it computes on the one that its process sees first.
        awaiting: what it waits in.
        far: how the others are met, where they share no memory.

    Attributes:
        data: the ranks of its number.
        experts: all ranks of its stage, in the order of the copies; None: those of `data`.
        halves: where steps are computed in halves.

    Raises:
        ConfigError: ranks with GPUs do not reach each other.
    """

    def __init__(
        self,
        shares: CopyShares,
        part: RankPart,
        *,
        on_gpu: bool = False,
        awaiting: Awaiting = NOBODY_LOOKS,
        far: FarCopies | None = None,
    ) -> None:
        self._ends: list[Callable[[float], None]] = []
        self._on_gpu, self._awaiting, self._far = on_gpu, awaiting, far
        self._store: Store | None = None if far is None else PrefixStore(COPIES.rstrip("/"), far.store)
        if far is None and on_gpu:
            self._store = FileStore(f"/proc/self/fd/{shares.meeting}", -1)
        copy, has_halves = shares.copy, shares.second is not None or (far is not None and far.parallel.enable_dbo)
        self.data = self._join(f"data {part.stage} {part.tensor}", shares.data, copy)
        self.experts: RankGroup | None = None
        if part.tensor_size > 1:
            index = copy * part.tensor_size + part.tensor
            self.experts = self._join(f"experts {part.stage}", shares.experts, index, part.tensor_size)
        self.halves: Halves | None = None
        if has_halves:
            second = self._join(f"second {part.stage} {part.tensor}", shares.second, copy)
            self.halves = Halves(Turns(awaiting, SideStream() if on_gpu else None), second)

    def end_loading(self, patience_s: float) -> None:
        """From now on wait so long at most."""
        for end in self._ends:
            end(patience_s)

    def _join(self, name: str, handles: SharedHandles | None, index: int, each: int = 1) -> RankGroup:
        """Join a group of `each` ranks of every copy."""
        host, size = self._join_host(name, handles, index, each)
        if not self._on_gpu:
            return host
        assert self._store is not None
        device, set_timeout = meet_by_nccl(PrefixStore(name, self._store), index, size, _LOAD_PATIENCE)
        self._ends.append(lambda patience_s: set_timeout(timedelta(seconds=patience_s)))
        return HostAndDevice(host, device)

    def _join_host(self, name: str, handles: SharedHandles | None, index: int, each: int) -> tuple[RankGroup, int]:
        if handles is not None:
            shared = SharedGroup(handles, index, awaiting=self._awaiting)
            self._ends.append(lambda patience_s: setattr(shared, "patience_s", patience_s))
            return shared, handles.size
        assert self._far is not None, "copies of one machine share memory"
        assert self._store is not None
        store, size = PrefixStore(f"host {name}", self._store), each * self._far.parallel.data_parallel_size
        group, set_timeout = meet_by_gloo(store, index, size, _LOAD_PATIENCE, self._far.address, self._awaiting)
        self._ends.append(lambda patience_s: set_timeout(timedelta(seconds=patience_s)))
        return group, size


class HostAndDevice:
    """Implements `RankGroup` for ranks with a GPU each: tensors of the host go through its memory, or by gloo, so that
    to agree on a number waits for no device.

    Args:
        host: for tensors of the host.
        device: the same ranks, for all others.
    """

    def __init__(self, host: RankGroup, device: RankGroup) -> None:
        self.size, self.index = host.size, host.index
        self._host, self._device = host, device

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        """See RankGroup."""
        return self._of(x).all_reduce(x, reduction)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See RankGroup."""
        return self._of(x).all_gather(x, widths)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        return self._of(x).reduce_scatter(x)

    def gather_rows(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        return self._of(x).gather_rows(x)

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """See RankGroup."""
        return self._of(x).all_to_all(x, rows)

    def barrier(self) -> None:
        """See RankGroup."""
        self._host.barrier()

    def _of(self, x: Tensor) -> RankGroup:
        return self._host if x.device.type == "cpu" else self._device
