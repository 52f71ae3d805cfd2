"""One rank of several: its groups and its worker. Importing it imports torch."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from pagefleet_kv.p2p.planes.device.copies import DevicePool

# torch.distributed has it too, but its types do not say so.
from pagefleet_kv.p2p.planes.local_device import CARRIERS, LocalDevice
from torch._C._distributed_c10d import PrefixStore

from pagefleet_engine.executor.asked_pool import CopyServer
from pagefleet_engine.executor.messages import Carry, Loaded, RankStart, digest
from pagefleet_engine.executor.plane_server import PlaneServer
from pagefleet_engine.executor.rank_loop import PATIENCE_S, BuiltRank, Launching
from pagefleet_engine.executor.ring_channel import RingInlet, RingOutlet
from pagefleet_engine.executor.vital_signs import Awaited, OwnSigns
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.ranks.copies import CopyGroups, FarCopies
from pagefleet_engine.ranks.group import Alone, RankGroup, TorchGroup, meet_by_gloo, meet_by_nccl
from pagefleet_engine.ranks.peers import PeerGroup, open_peers, watch_peers
from pagefleet_engine.ranks.shared_handles import SharedHandles
from pagefleet_engine.ranks.shared_memory import SharedGroup
from pagefleet_engine.ranks.stages import NOBODY_LOOKS, Awaiting, StageLinks
from pagefleet_engine.ranks.store import RankStore
from pagefleet_engine.ranks.together import patience_s
from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.worker.device import resolve_device
from pagefleet_engine.worker.worker import Worker

_LOAD_PATIENCE = timedelta(hours=1)
"""Ranks that load wait for the slowest disk; one that is gone is seen otherwise."""
_Joined = tuple[RankGroup, Callable[[], None]]
"""A group, and what ends the patience of loading."""
_log = logging.getLogger(__name__)


def build_rank(start: RankStart, times: StartupTimes, signs: OwnSigns) -> BuiltRank:
    """Meet the other ranks, and load this one's part of the model.

    Raises:
        ModelLoadError: the weights cannot be loaded.
        ConfigError: the settings do not fit the model or the device, or the ranks cannot meet.
    """
    communicators, end_loading = _join_all(start, signs)
    config = replace(start.config, model=replace(start.config.model, num_threads=start.num_threads))
    folder = Path(start.folder)
    worker = Worker(config, folder, read_arch(folder, config.model.hf_overrides), times, communicators, start.pool)
    if start.copies is not None:
        copies = CopyServer(worker.pages, start.pool, start.copies, pinned=True)
        threading.Thread(target=copies.run, name="kv copies", daemon=True).start()
    planes = None
    if start.planes is not None and isinstance(worker.pages, DevicePool):
        planes = PlaneServer(LocalDevice(worker.pages, CARRIERS), start.planes, lambda: signs.num_finished)
        threading.Thread(target=planes.run, name="kv planes", daemon=True).start()
    loaded = Loaded(
        digest(start.config),
        worker.max_in_flight,
        worker.cache.num_blocks,
        worker.cache.block_size,
        worker.cache.bytes_per_block,
        worker.dtype,
        worker.cache_dtype,
        worker.context_length,
        worker.cache.max_model_len,
        times.phases(),
    )

    def carry(command: Carry) -> Launching | None:
        turn = command.turns.get(start.rank)
        return None if planes is None or turn is None else planes.launch(command.plane, turn)

    return BuiltRank(worker, loaded, end_loading, carry if config.carries else None)


def _join_all(start: RankStart, signs: OwnSigns) -> tuple[Communicators, Callable[[], None]]:
    """A rank's groups, and what ends the patience of loading."""
    part, shared, meeting = start.part, start.shared, _Meeting(start)
    stage, awaiting = f"stage {part.stage}", signs.awaiting(Awaited.TENSOR)
    tensor, end_loading = meeting.group(stage, part.tensor, part.tensor_size, shared.tensor, awaiting)
    if meeting.on_gpu and part.tensor_size > 1:
        tensor, end_loading = meeting.with_peers(tensor, end_loading)
    own = Communicators(part=part, tensor=tensor)
    if part.num_stages > 1:
        world, _ = meeting.group("world", start.rank, start.size, shared.world)
        own = replace(own, links=_links(start, meeting, signs.awaiting(Awaited.STAGE)), world=world)
    if start.copy_shares is None:
        return own, end_loading
    parallel = start.config.parallel
    far = FarCopies(meeting.store, start.address, parallel) if parallel.is_networked else None
    waiting = signs.awaiting(Awaited.STAGE)
    copies = CopyGroups(start.copy_shares, part, on_gpu=meeting.on_gpu, awaiting=waiting, far=far)

    def end_all() -> None:
        end_loading()
        copies.end_loading(patience_s(parallel))

    return replace(own, data=copies.data, experts=copies.experts, halves=copies.halves), end_all


def _links(start: RankStart, meeting: _Meeting, awaiting: Awaiting) -> StageLinks:
    """Through shared memory to neighbours on CPUs of this machine, else by a group of one rank of each stage.

    They are waited for as long as a step takes: whether they live is seen otherwise.
    """
    part, shared = start.part, start.shared
    inlet = None if shared.inlet is None else RingInlet(shared.inlet, awaiting)
    outlet = None if shared.outlet is None else RingOutlet(shared.outlet, awaiting)
    if not meeting.on_gpu and start.num_places == start.size:
        return StageLinks(inlet, outlet)
    column, _ = meeting.torch_group(f"column {part.tensor}", part.stage, part.num_stages, awaiting)
    far = column.links()
    return StageLinks(inlet or far.inlet, outlet or far.outlet)


class _Meeting:
    """Where a rank meets others."""

    def __init__(self, start: RankStart) -> None:
        self.on_gpu = resolve_device(start.config.model.device).type == "cuda"
        self._start = start
        self.store = RankStore(socket.socket(fileno=start.store), _LOAD_PATIENCE)

    def group(
        self,
        name: str,
        index: int,
        size: int,
        handles: SharedHandles | None,
        awaiting: Awaiting = NOBODY_LOOKS,
    ) -> _Joined:
        """Join a group; `handles`: of its memory, where it has some; `awaiting`: what the rank waits for it in."""
        if size == 1:
            return Alone(), lambda: None
        if handles is None:
            return self.torch_group(name, index, size, awaiting)
        group = SharedGroup(handles, index, awaiting=awaiting)

        def end_loading() -> None:
            group.patience_s = PATIENCE_S

        return group, end_loading

    def torch_group(
        self, name: str, index: int, size: int, awaiting: Awaiting
    ) -> tuple[TorchGroup, Callable[[], None]]:
        """Join a group of ranks that have a GPU each, which is the only one that this process sees, or that compute on
        CPUs of several machines.

        Raises:
            ConfigError: they do not reach each other.
        """
        store = PrefixStore(name, self.store)
        if self.on_gpu:
            group, set_timeout = meet_by_nccl(store, index, size, _LOAD_PATIENCE)
        else:
            group, set_timeout = meet_by_gloo(store, index, size, _LOAD_PATIENCE, self._start.address, awaiting)
        return group, lambda: set_timeout(timedelta(seconds=PATIENCE_S))

    def with_peers(self, group: RankGroup, end_loading: Callable[[], None]) -> _Joined:
        """The group of this rank's stage with small sums in memory that its GPUs reach, where they do."""
        part, first = self._start.part, self._start.rank - self._start.part.tensor
        memory = open_peers(PrefixStore(f"peers {part.stage}", self.store), group.index, group.size)
        if memory is None:
            _log.info("small sums of the ranks go by NCCL too: not all of their GPUs reach each other's memory")
            return group, end_loading
        memory.wait_at_most(_LOAD_PATIENCE.total_seconds())
        watch_peers(memory, lambda index: _end_without(first + index))

        def end_all() -> None:
            end_loading()
            memory.wait_at_most(PATIENCE_S)

        return PeerGroup(group, memory), end_all


def _end_without(rank: int) -> None:
    """End this process, as NCCL does where a rank does not come: what this one computed since is no number."""
    _log.error("rank %d did not come to a sum of all ranks in time", rank)
    os._exit(1)
