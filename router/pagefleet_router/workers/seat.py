"""A worker's place: what it inherits from the parent, and so does whoever comes after it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Seat:
    """One of several workers."""

    index: int
    num_workers: int
    listener: socket.socket
    """Bound, and listening from the start."""
    folder: Path
    """Private to the workers; holds the sockets on which they tell each other their figures."""
    lifeline: int
    """File descriptor that becomes readable when the parent is gone."""
    is_replacement: bool = False
    """Whether another worker had this seat: connections may wait in its socket, and the other workers serve."""

    @property
    def figures_path(self) -> Path:
        """Where this worker tells its figures."""
        return figures_path(self.folder, self.index)

    @property
    def sibling_paths(self) -> tuple[Path, ...]:
        """Where the others do."""
        others = (index for index in range(self.num_workers) if index != self.index)
        return tuple(figures_path(self.folder, index) for index in others)


def figures_path(folder: Path, index: int) -> Path:
    """Return the path of a worker's socket."""
    return folder / f"{index}.sock"
