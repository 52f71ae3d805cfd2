"""The groups that one rank is part of; a worker gets them from whoever started it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagefleet_engine.ranks.group import Alone, RankGroup
from pagefleet_engine.ranks.parallelism import WHOLE, RankPart
from pagefleet_engine.ranks.stages import StageLinks
from pagefleet_engine.ranks.turns import Halves


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicators:
    """One rank's groups; by default it is alone."""

    part: RankPart = WHOLE
    """Which part of the model it has."""
    tensor: RankGroup = field(default_factory=Alone)
    """The ranks that each layer of its stage is divided among."""
    data: RankGroup = field(default_factory=Alone)
    """The ranks of its number in the copies of the model that step together, where its layers exchange something."""
    experts: RankGroup | None = None
    """All ranks of its stage, over all these copies; None: those of `tensor`, or of `data`."""
    halves: Halves | None = None
    """Where steps of these copies are computed in halves."""
    links: StageLinks = field(default_factory=StageLinks)
    """Its neighbours in the pipeline."""
    world: RankGroup | None = None
    """All ranks of its copy of the model; None: those of `tensor`."""

    @property
    def expert_ranks(self) -> RankGroup:
        """That have the experts of its stage among them."""
        return self.experts or (self.data if self.data.size > 1 else self.tensor)

    @property
    def is_alone(self) -> bool:
        """Whether its steps exchange nothing with anybody."""
        return self.everyone.size == self.expert_ranks.size == self.data.size == 1 and self.links == StageLinks()

    @property
    def everyone(self) -> RankGroup:
        """All ranks of its copy of the model, which agree on sizes and share machines; not for steps."""
        return self.world or self.tensor
