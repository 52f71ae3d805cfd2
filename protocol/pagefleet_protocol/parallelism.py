"""Over how many ranks an engine is spread, as people write it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pagefleet_protocol.resource_base import Object

MAX_RANKS = 16
"""Of an engine on one node: no node has more GPUs."""
MAX_COPIES = 4 * MAX_RANKS
"""Of the model in one engine."""
MAX_NODES = 64
"""Of one engine."""


class Parallelism(Object):
    """Over how many ranks each engine is spread: processes, each with a GPU or its share of the cores."""

    tensor: Annotated[int, Field(ge=1, le=MAX_RANKS * 4)] | None = None
    """Ranks that compute every layer together, each a part of its heads; default: one for each GPU of a node."""
    pipeline: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Stages, each of which has some of the layers; default: one for each node."""
    data: Annotated[int, Field(ge=1, le=MAX_COPIES)] | None = None
    """Copies of the model, each with tensor * pipeline ranks and an engine by itself for routers; default 1. On several
    nodes only with `expert`."""
    expert: bool | None = None
    """Whether ranks have some experts of a mixture whole, not a part of each. Copies then have each expert once among
    them, and are one engine for routers; default: false."""

    @property
    def counted(self) -> bool:
        """Whether a number of ranks is written."""
        return any(one is not None for one in (self.tensor, self.pipeline, self.data))

    def over(self, default: Parallelism) -> Parallelism:
        """These, where a number of ranks is written, else those of `default`; `expert` is taken by itself."""
        expert = default.expert if self.expert is None else self.expert
        return (self if self.counted else default).model_copy(update={"expert": expert})
