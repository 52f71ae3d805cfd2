"""A rank's groups with those of other copies of the model, where these step together."""

from __future__ import annotations

from pagefleet_engine.ranks.parallelism import RankPart
from pagefleet_engine.ranks.shared_memory import SharedGroup
from pagefleet_engine.ranks.stages import NOBODY_LOOKS, Awaiting
from pagefleet_engine.ranks.together import CopyShares


class CopyGroups:
    """They wait as long as it takes, until `end_loading`.

    Args:
        shares: what the rank has in common with those of other copies.
        part: of the model that it has.
        awaiting: what it waits in.

    Attributes:
        data: the ranks of its number.
        experts: all ranks of its stage, in the order of the copies; None: those of `data`.
    """

    def __init__(self, shares: CopyShares, part: RankPart, awaiting: Awaiting = NOBODY_LOOKS) -> None:
        self.data = SharedGroup(shares.data, shares.copy, awaiting=awaiting)
        self.experts: SharedGroup | None = None
        if shares.experts is not None:
            index = shares.copy * part.tensor_size + part.tensor
            self.experts = SharedGroup(shares.experts, index, awaiting=awaiting)

    def end_loading(self, patience_s: float) -> None:
        """From now on wait so long at most."""
        for group in (self.data, self.experts):
            if group is not None:
                group.patience_s = patience_s
