"""Which copy of the model the ranks of a link are of, and how they meet those of other copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_engine.ranks.rendezvous import JointTable, RendezvousTable
from pagefleet_engine.ranks.together import CopyShares


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """One of several; by default the only one."""

    number: int = 0
    joint: int | None = None
    """Where it steps together with others: descriptor of the memory of a `JointTable`."""

    @property
    def together(self) -> int | None:
        """Its number, where it steps together with others."""
        return None if self.joint is None else self.number

    def shares(self, num_ranks: int) -> Sequence[CopyShares]:
        """What so many ranks of it are told of the others."""
        return [] if self.joint is None else [CopyShares(self.number)] * num_ranks

    def rendezvous(self) -> RendezvousTable:
        """Make what answers its ranks."""
        return RendezvousTable() if self.joint is None else JointTable(self.joint)


ONLY_COPY = ModelCopy()
