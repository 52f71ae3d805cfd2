"""What an executor and its ranks share, as the executor makes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.executor.messages import RankShares
from pagefleet_engine.executor.ring import RingHandles, RingPair, make_ring, make_ring_pair
from pagefleet_engine.executor.vital_signs import make_signs
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.ranks.shared_handles import SharedHandles, closed_on_failure, make_shared_group

# Messages may be larger than their ring: masks of many rows, log-probabilities of long prompts. A rank reads no command
# while it writes a reply, so both of its rings may be full; who writes commands must read replies while it waits for
# room (`ProcessExecutor._send`, `Follower._make_way`), and so must who asks a rank's planes (`AskedDevice.ask`). Turns
# (`Commands.carry`) are written by a thread that reads no replies: the core's reads them, as it waits for the same lock
# or for a step. One copy of blocks is under way at a time, so its two rings are never both in use.
COMMAND_BYTES = 1 << 22
"""Of the ring to all ranks. A part of more than a fourth goes in pieces."""
REPLY_BYTES = 1 << 20
COPY_BYTES = 1 << 18
PLANE_BYTES = 1 << 20
CHANNEL_BYTES = 1 << 25
"""Of hidden states on their way to the next stage: some steps of a usual size, so that no stage waits for another that
is at work. Larger ones go in pieces."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What the ranks share: descriptors, and no names."""

    commands: RingHandles
    replies: Sequence[RingHandles]
    signs: int
    shared: Sequence[RankShares]
    """What each has in common with some of the others, by its place."""
    pools: Sequence[int]
    """Of each rank, for its KV pool, or what is on its way there, where connectors are to reach it; else there are
    none."""
    copy_rings: Sequence[RingPair]
    """Of each rank, whose pool is on a GPU, where connectors are to reach it; else there are none."""
    plane_rings: Sequence[RingPair]
    """Of each rank that may open planes of connectors on its GPU; else there are none."""

    @classmethod
    def make(cls, ranks: range, config: EngineConfig, on_cpu: bool) -> RankMemory:
        """Make it for ranks of these numbers; `on_cpu`: which compute on CPUs.

        Raises:
            OSError: the system gives no memory, or no more descriptors.
        """
        with closed_on_failure() as made:
            replies = []
            for _ in ranks:
                replies.append(make_ring(1, REPLY_BYTES))
                made.extend(replies[-1].fds)
            shared = _share(ranks, config.parallel, made) if on_cpu else [RankShares()] * len(ranks)
            commands = make_ring(len(ranks), COMMAND_BYTES)
            made.extend(commands.fds)
            made.append(signs := make_signs(len(ranks)))
            pools, copy_rings = [], []
            for _ in ranks if config.kv_transfer.connectors else ():
                pools.append(os.memfd_create("pagefleet-pool"))
                made.append(pools[-1])
                if not on_cpu:
                    copy_rings.append(make_ring_pair(COPY_BYTES))
                    made.extend(copy_rings[-1].fds)
            plane_rings = []
            for _ in ranks if may_open_planes(config, on_cpu=on_cpu) else ():
                plane_rings.append(make_ring_pair(PLANE_BYTES))
                made.extend(plane_rings[-1].fds)
            return cls(commands, replies, signs, shared, pools, copy_rings, plane_rings)

    def fds(self, rank: int) -> tuple[int, ...]:
        """What a rank inherits."""
        return (
            *self.commands.fds,
            *self.replies[rank].fds,
            self.signs,
            *self.shared[rank].fds,
            *self.pools[rank : rank + 1],
            *(() if (copies := self.copies(rank)) is None else copies.fds),
            *(() if (planes := self.planes(rank)) is None else planes.fds),
        )

    def pool(self, rank: int) -> int:
        """Descriptor of a rank's memory for connectors; -1: there are none."""
        return self.pools[rank] if self.pools else -1

    def copies(self, rank: int) -> RingPair | None:
        """The rings by which a rank is asked to copy; None: nobody asks it."""
        return self.copy_rings[rank] if self.copy_rings else None

    def planes(self, rank: int) -> RingPair | None:
        """The rings by which a rank is asked for planes; None: nobody asks it."""
        return self.plane_rings[rank] if self.plane_rings else None

    def close(self) -> None:
        """Close what this process has of it; call this once."""
        for fd in {fd for rank in range(len(self.replies)) for fd in self.fds(rank)}:
            os.close(fd)


def may_open_planes(config: EngineConfig, *, on_cpu: bool) -> bool:
    """Return whether a connector may pass K/V from device to device: of one machine, or by name by NCCL."""
    kv = config.kv_transfer
    if on_cpu or "p2p" not in kv.connectors:
        return False
    return kv.kv_data_plane == "nccl" or (kv.kv_data_plane != "tcp" and not config.parallel.is_networked)


def _share(ranks: range, parallel: Parallelism, made: list[int]) -> list[RankShares]:
    """Make a group of each stage and of all ranks, where they are all here, and a channel from each rank to the next
    stage; adds the descriptors to `made`."""
    size = parallel.tensor_parallel_size

    def group(members: range) -> SharedHandles | None:
        if len(members) == 1 or members.start < ranks.start or members.stop > ranks.stop:
            return None
        handles = make_shared_group(len(members))
        made.extend(handles.fds)
        return handles

    def channel(rank: int) -> RingHandles | None:
        if rank not in ranks or rank + size not in ranks:
            return None
        handles = make_ring(1, CHANNEL_BYTES)
        made.extend(handles.fds)
        return handles

    stages = {stage: group(range(stage * size, (stage + 1) * size)) for stage in {rank // size for rank in ranks}}
    world = group(range(parallel.world_size)) if parallel.pipeline_parallel_size > 1 else None
    outlets = {rank: channel(rank) for rank in range(ranks.start - size, ranks.stop)}
    return [RankShares(stages[rank // size], world, outlets[rank - size], outlets[rank]) for rank in ranks]
