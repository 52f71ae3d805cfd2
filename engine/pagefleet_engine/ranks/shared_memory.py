"""Ranks of one machine that compute on CPUs exchange tensors through shared memory.

Each rank writes its part into a slot of its own, rings, and when all have rung every rank reads all slots in the order
of the ranks: so each gets the same bits. There are two sets of slots, which take turns: who has heard all others ring
for the second set knows that they are done with the first.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagefleet_engine.ranks.doorbell import Doorbell
from pagefleet_engine.ranks.group import Reduction, own_rows, rows_each
from pagefleet_engine.ranks.shared_handles import PAGE, SLOT_BYTES, SharedHandles
from pagefleet_engine.ranks.stages import NOBODY_LOOKS, Awaiting

SPIN_S = 2e-5
"""Ranks do the same work, so they come within microseconds of each other, if they have a core each.
Where they have not, to spin longer takes the time of the one that is waited for."""

WAIT_S = 1.0
"""Longest wait at a time. One that takes twice as long tells that this process was stopped meanwhile."""


class SharedGroup:
    """Implements `RankGroup`; used by one thread.

    Args:
        handles: of the group.
        index: of this rank.
        spin_s: how long to look for the others before going to sleep.
        awaiting: what it waits in.

    Attributes:
        patience_s: how long the others are waited for while this process runs; None: for ever.
    """

    def __init__(
        self, handles: SharedHandles, index: int, spin_s: float = SPIN_S, awaiting: Awaiting = NOBODY_LOOKS
    ) -> None:
        self.size = handles.size
        self.index = index
        self.patience_s: float | None = None
        self._spin_s = spin_s
        self._awaiting = awaiting
        memory = mmap.mmap(handles.memory, PAGE + 2 * self.size * SLOT_BYTES)
        self._rounds = memoryview(memory)[:PAGE].cast("Q")
        """Per rank: how often it has rung. Tells who is late; nothing else hangs on it."""
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE).view(2, self.size, SLOT_BYTES)
        self._slots = [[slots[turn, rank] for rank in range(self.size)] for turn in range(2)]
        self._others = [[Doorbell(fd) for rank, fd in enumerate(fds) if rank != index] for fds in handles.bells]
        self._own = [Doorbell(fds[index]) for fds in handles.bells]
        self._round = 0
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        """See RankGroup."""
        flat = x.view(-1)
        for piece in _pieces(flat):
            parts = self._exchange(piece)
            _REDUCE[reduction](parts, piece)
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See RankGroup."""
        rows = x.shape[:-1].numel()
        own = x.contiguous().view(-1)
        flat = [own.new_empty(rows * width) for width in widths]
        longest = max(widths) * rows
        per_piece = SLOT_BYTES // own.itemsize
        for start in range(0, longest, per_piece):
            parts = self._exchange(own[start : start + per_piece], min(per_piece, longest - start))
            for to, part in zip(flat, parts, strict=True):
                piece = to[start : start + per_piece]
                piece.copy_(part[: len(piece)])
        shaped = [to.view(*x.shape[:-1], width) for to, width in zip(flat, widths, strict=True)]
        return torch.cat(shaped, -1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        out = x.new_zeros(rows_each(len(x), self.size), *x.shape[1:])
        own, row = own_rows(len(x), self.size, self.index), x.shape[1:].numel()
        first, last, offset, to = own.start * row, own.stop * row, 0, out.view(-1)
        for piece in _pieces(x.view(-1)):
            parts = self._exchange(piece)
            start, stop = max(first, offset), min(last, offset + len(piece))
            if start < stop:
                _sum([part[start - offset : stop - offset] for part in parts], to[start - first : stop - first])
            offset += len(piece)
        return out

    def gather_rows(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        offset, ranks = 0, out.view(self.size, -1).unbind()
        for piece in _pieces(x.view(-1)):
            for to, part in zip(ranks, self._exchange(piece), strict=True):
                to[offset : offset + len(piece)].copy_(part)
            offset += len(piece)
        return out

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """See RankGroup. Each rank copies what is its own out of what the others have written."""
        width, flat = x.shape[1:].numel(), x.view(-1)
        firsts = [sum(sent[: self.index]) * width for sent in rows]
        room = x.new_empty(sum(sent[self.index] for sent in rows), *x.shape[1:])
        ranks = room.view(-1).split_with_sizes([sent[self.index] * width for sent in rows])
        longest, per_piece = max(map(sum, rows)) * width, SLOT_BYTES // x.itemsize
        for offset in range(0, longest, per_piece):
            parts = self._exchange(flat[offset : offset + per_piece], min(per_piece, longest - offset))
            for first, to, part in zip(firsts, ranks, parts, strict=True):
                start, stop = max(first, offset), min(first + len(to), offset + per_piece)
                if start < stop:
                    to[start - first : stop - first].copy_(part[start - offset : stop - offset])
        return room

    def barrier(self) -> None:
        """See RankGroup."""
        self._meet()

    def _exchange(self, piece: Tensor, length: int | None = None) -> list[Tensor]:
        """Give all ranks this one's elements; returns those of all, which hold until the next call but one.

        `length`: elements of the longest; by default all have as many.
        """
        parts = self._typed(piece.dtype, len(piece) if length is None else length)
        own = parts[self.index]
        (own if length is None else own[: len(piece)]).copy_(piece)
        self._meet()
        return parts

    def _typed(self, dtype: torch.dtype, length: int) -> list[Tensor]:
        """Views of the slots whose turn it is."""
        key = (self._round & 1, dtype, length)
        views = self._views.get(key)
        if views is None:
            if len(self._views) > 256:  # lengths come and go with the sizes of steps
                self._views.clear()
            num_bytes = length * dtype.itemsize
            with torch.inference_mode(False):  # they are written to within that mode and without
                views = self._views[key] = [slot[:num_bytes].view(dtype) for slot in self._slots[key[0]]]
        return views

    def _meet(self) -> None:
        """Ring for all others, and wait until all have rung.

        Raises:
            RuntimeError: some did not in time.
        """
        turn = self._round & 1
        self._round += 1
        self._rounds[self.index] = self._round
        for bell in self._others[turn]:
            bell.ring()
        missing = self.size - 1
        with self._awaiting:
            while missing:
                came = self._hear(self._own[turn])
                if not came:
                    late = [str(rank) for rank in range(self.size) if self._rounds[rank] < self._round]
                    raise RuntimeError(f"waited {self.patience_s:g} s for rank {', '.join(late)}")
                missing -= came

    def _hear(self, bell: Doorbell) -> int:
        """Wait for others to ring; 0 when none did in time. Time in which this process was stopped does not count:
        the others were stopped too, probably, and go on with it."""
        if self.patience_s is None:
            return bell.wait(None, self._spin_s)
        left, spin_s = self.patience_s, self._spin_s
        while left > 0:
            wait_s = min(left, WAIT_S)
            began = time.monotonic()
            if came := bell.wait(wait_s, spin_s):
                return came
            if time.monotonic() - began < wait_s + WAIT_S:
                left -= wait_s
            spin_s = 0.0
        return 0


def _pieces(flat: Tensor) -> Iterator[Tensor]:
    per_piece = SLOT_BYTES // flat.itemsize
    if len(flat) <= per_piece:
        yield flat
        return
    for start in range(0, len(flat), per_piece):
        yield flat[start : start + per_piece]


def _sum(parts: Sequence[Tensor], to: Tensor) -> None:
    """Add in the order of the ranks; halves of more than two ranks are rounded once."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=to)
    elif to.is_floating_point() and to.itemsize < 4:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        to.copy_(total)
    else:
        torch.add(parts[0], parts[1], out=to)
        for part in parts[2:]:
            to += part


def _max(parts: Sequence[Tensor], to: Tensor) -> None:
    torch.amax(torch.stack(list(parts)), 0, out=to)


def _min(parts: Sequence[Tensor], to: Tensor) -> None:
    torch.amin(torch.stack(list(parts)), 0, out=to)


_REDUCE = {"sum": _sum, "max": _max, "min": _min}
