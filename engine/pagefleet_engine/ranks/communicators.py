"""The groups that one rank is part of; a worker gets them from whoever started it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagefleet_engine.ranks.group import Alone, RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicators:
    """One rank's groups; by default it is alone."""

    tensor: RankGroup = field(default_factory=Alone)
    """The ranks that each layer is divided among."""
