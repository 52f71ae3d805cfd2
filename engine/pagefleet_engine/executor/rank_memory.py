"""What an executor and its ranks share, as the executor makes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_engine.executor.ring import RingHandles, RingPair, make_ring, make_ring_pair
from pagefleet_engine.executor.vital_signs import make_signs
from pagefleet_engine.ranks.shared_handles import SharedHandles, closed_on_failure, make_shared_group

COMMAND_BYTES = 1 << 22
"""Of the ring to all ranks. A part of more than a fourth goes in pieces."""
REPLY_BYTES = 1 << 20
COPY_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What the ranks share: descriptors, and no names."""

    commands: RingHandles
    replies: Sequence[RingHandles]
    signs: int
    group: SharedHandles | None
    """Of ranks that exchange tensors in it; None: they do it otherwise."""
    pools: Sequence[int]
    """Of each rank, for its KV pool, or what is on its way there, where connectors are to reach it; else there are
    none."""
    copy_rings: Sequence[RingPair]
    """Of each rank, whose pool is on a GPU, where connectors are to reach it; else there are none."""

    @classmethod
    def make(cls, size: int, with_group: bool, has_connectors: bool, on_gpus: bool) -> RankMemory:
        """Make it for `size` ranks; `has_connectors`: whose K/V goes elsewhere; `on_gpus`: which compute there.

        Raises:
            OSError: the system gives no memory, or no more descriptors.
        """
        with closed_on_failure() as made:
            replies = []
            for _ in range(size):
                replies.append(make_ring(1, REPLY_BYTES))
                made.extend(replies[-1].fds)
            group = make_shared_group(size) if with_group else None
            made.extend(() if group is None else group.fds)
            commands = make_ring(size, COMMAND_BYTES)
            made.extend(commands.fds)
            made.append(signs := make_signs(size))
            pools, copy_rings = [], []
            for _ in range(size if has_connectors else 0):
                pools.append(os.memfd_create("pagefleet-pool"))
                made.append(pools[-1])
                if on_gpus:
                    copy_rings.append(make_ring_pair(COPY_BYTES))
                    made.extend(copy_rings[-1].fds)
            return cls(commands, replies, signs, group, pools, copy_rings)

    def fds(self, rank: int) -> tuple[int, ...]:
        """What a rank inherits."""
        group = () if self.group is None else self.group.fds
        return (
            *self.commands.fds,
            *self.replies[rank].fds,
            self.signs,
            *group,
            *self.pools[rank : rank + 1],
            *(() if (copies := self.copies(rank)) is None else copies.fds),
        )

    def pool(self, rank: int) -> int:
        """Descriptor of a rank's memory for connectors; -1: there are none."""
        return self.pools[rank] if self.pools else -1

    def copies(self, rank: int) -> RingPair | None:
        """The rings by which a rank is asked to copy; None: nobody asks it."""
        return self.copy_rings[rank] if self.copy_rings else None

    def close(self) -> None:
        """Close what this process has of it; call this once."""
        for fd in {fd for rank in range(len(self.replies)) for fd in self.fds(rank)}:
            os.close(fd)
