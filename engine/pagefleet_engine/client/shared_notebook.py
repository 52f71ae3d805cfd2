"""What the API processes of an engine tell each other without asking, in memory that they share.

Whoever owns a number writes it, and all read it: a number may be old by the time that it takes to look, and is never
half written. A process that ends leaves its row to the one that started it, which clears it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_engine.client.balance import NUM_COUNTS, PIECE, Counts, Prefixes, RankLoad, RankRoom, num_pieces

_WORD = 8


@dataclass(frozen=True, slots=True)
class NotebookShape:
    """Who shares it."""

    processes: int
    rooms: Sequence[RankRoom]
    """Of each data rank."""

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        rows = self.processes * (1 + NUM_COUNTS * len(self.rooms))
        return _WORD * (rows + sum(num_pieces(room.tokens) for room in self.rooms))


def make_notebook_memory() -> int:
    """Return a descriptor of memory without a name, for `SharedNotebook`.

    Raises:
        OSError: the system gives none.
    """
    return os.memfd_create("pagefleet-api-processes")


class SharedNotebook:
    """Implements `Notebook`.

    Args:
        fd: of the memory.
        shape: the same for all.
        index: of this process.

    Attributes:
        in_flight: of each process, the requests that it works on.
    """

    def __init__(self, fd: int, shape: NotebookShape, index: int) -> None:
        self._shape = shape
        self._index = index
        os.ftruncate(fd, shape.num_bytes)  # whoever comes first; what is written stays
        memory = memoryview(mmap.mmap(fd, shape.num_bytes))
        num = shape.processes
        end_of_counts = _WORD * num * (1 + NUM_COUNTS * len(shape.rooms))
        counts = memory[:end_of_counts].cast("q")
        rows = [counts[start : start + NUM_COUNTS] for start in range(num, len(counts), NUM_COUNTS)]
        self.in_flight: Counts = counts[:num]
        self._rows = [rows[start : start + num] for start in range(0, len(rows), num)]
        """By rank, then by process."""
        self._words = memory[end_of_counts:].cast("Q")

    def load(self, rank: int, room: RankRoom) -> RankLoad:
        """See Notebook."""
        return RankLoad(room, self._rows[rank], self._index)

    def prefixes(self, rank: int, room: RankRoom) -> Prefixes:
        """See Notebook."""
        sizes = [num_pieces(one.tokens) for one in self._shape.rooms]
        start = sum(sizes[:rank])
        return SharedPrefixes(self._words[start : start + sizes[rank]])

    def clear(self, index: int) -> None:
        """Forget what a process noted that is gone."""
        self.in_flight[index] = 0
        for rows in self._rows:
            for number in range(NUM_COUNTS):
                rows[index][number] = 0


class SharedPrefixes:
    """Implements `Prefixes`: each piece has one place, by its hash, where the last of those that share it stands.

    Args:
        words: a place for each piece that the rank's cache holds.
    """

    def __init__(self, words: Counts) -> None:
        self._words = words

    def find(self, pieces: Sequence[BlockHash]) -> int:
        """See Prefixes."""
        words, found = self._words, 0
        for piece in pieces:
            word = int.from_bytes(piece[:_WORD])
            if words[word % len(words)] != word:
                break
            found += PIECE
        return found

    def add(self, pieces: Sequence[BlockHash]) -> None:
        """See Prefixes."""
        words = self._words
        for piece in reversed(pieces):  # where two pieces share a place, that nearer the beginning stays
            word = int.from_bytes(piece[:_WORD])
            words[word % len(words)] = word

    def clear(self) -> None:
        """See Prefixes."""
        for place in range(len(self._words)):
            self._words[place] = 0
