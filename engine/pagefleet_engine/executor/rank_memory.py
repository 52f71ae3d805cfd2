"""What an executor and its ranks share, as the executor makes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_engine.executor.ring import RingHandles, make_ring
from pagefleet_engine.executor.vital_signs import make_signs
from pagefleet_engine.ranks.shared_handles import SharedHandles, closed_on_failure, make_shared_group

COMMAND_BYTES = 1 << 22
"""Of the ring to all ranks. A part of more than a fourth goes in pieces."""
REPLY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What the ranks share: descriptors, and no names."""

    commands: RingHandles
    replies: Sequence[RingHandles]
    signs: int
    group: SharedHandles | None
    """Of ranks that exchange tensors in it; None: they do it otherwise."""
    pools: Sequence[int]
    """Of each rank, for its KV pool, where connectors are to reach it; else there are none."""

    @classmethod
    def make(cls, size: int, with_group: bool, has_connectors: bool) -> RankMemory:
        """Make it for `size` ranks; `has_connectors`: whose K/V goes elsewhere.

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
            pools = []
            for _ in range(size if has_connectors else 0):
                pools.append(os.memfd_create("pagefleet-pool"))
                made.append(pools[-1])
            return cls(commands, replies, signs, group, pools)

    def fds(self, rank: int) -> tuple[int, ...]:
        """What a rank inherits."""
        group = () if self.group is None else self.group.fds
        return (*self.commands.fds, *self.replies[rank].fds, self.signs, *group, *self.pools[rank : rank + 1])

    def pool(self, rank: int) -> int:
        """Descriptor of the memory for a rank's pool; -1: its own will do."""
        return self.pools[rank] if self.pools else -1

    def close(self) -> None:
        """Close what this process has of it; call this once."""
        for fd in {fd for rank in range(len(self.replies)) for fd in self.fds(rank)}:
            os.close(fd)
