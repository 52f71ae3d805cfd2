"""An API process's place among those that serve one engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagefleet_engine.client.balance import RankRoom
from pagefleet_engine.client.shared_notebook import NotebookShape, SharedNotebook


class ApiSeat(msgspec.Struct, frozen=True):
    """Where it sits. The first has started the cores and the other processes, and ends with them."""

    index: int = 0
    num: int = 1
    start: int = 0
    """Number of this start among all of the engine; 0: of the first process."""
    memory: int = -1
    """Descriptor of what the processes share, where there are several."""

    @property
    def mark(self) -> str:
        """Tells the requests of this start from all others."""
        return f"{self.start}." if self.start else ""

    def notebook(self, rooms: Sequence[RankRoom]) -> SharedNotebook | None:
        """Return what all processes note, once it is known what the ranks hold; None where there is one process."""
        if self.num == 1:
            return None
        return SharedNotebook(self.memory, NotebookShape(self.num, rooms), self.index)


ALONE = ApiSeat()
