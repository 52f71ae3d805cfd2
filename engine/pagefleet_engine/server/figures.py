"""The figures of an engine that several API processes serve: whichever is asked answers for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from pagefleet_protocol.workers.exposition import merge
from pagefleet_protocol.workers.siblings import FIGURES, Siblings

from pagefleet_engine.metrics import EngineMetrics


class EngineFigures:
    """Tells them.

    Args:
        metrics: of this process.
        siblings: the other processes; None: there are none.

    Attributes:
        siblings: the same.
    """

    def __init__(self, metrics: EngineMetrics, siblings: Siblings | None = None) -> None:
        self._metrics = metrics
        self.siblings = siblings
        if siblings is not None:
            siblings.answer(FIGURES, metrics.counted_here)
            metrics.include(lambda: silent_series(siblings))

    async def text(self) -> bytes:
        """Return the exposition of the engine; a process that does not answer in time is left out."""
        if self.siblings is None:
            return self._metrics.render()
        others = await self.siblings.ask(FIGURES)
        return merge(self._metrics.counted_here(), others) + self._metrics.of_engine()


def silent_series(siblings: Siblings) -> Mapping[str, float]:
    """Return what a process counts of the others, for `EngineMetrics.include`."""
    return {"pagefleet_engine_silent_api_processes_total": siblings.num_silent}
