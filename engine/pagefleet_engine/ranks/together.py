"""What copies of a model share that step together, as whoever starts them makes it. Knows no torch."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

import msgspec

from pagefleet_engine.ranks.doorbell import Doorbell
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.ranks.shared_handles import PAGE, SharedHandles, closed_on_failure, make_bells, make_shared_group


def patience_s(parallel: Parallelism) -> float:
    """How long ranks that serve wait for those of other copies, which compute the same steps: but the stage before one
    of them may have longer prompts."""
    return 9.0 if parallel.pipeline_parallel_size == 1 else 60.0


class CopyShares(msgspec.Struct, frozen=True, array_like=True):
    """What one rank shares with those of other copies of the model."""

    copy: int
    """Which of them it is of."""
    data: SharedHandles | None = None
    """Of the group of the ranks that have its number in each copy, which exchange tensors within a step; None: they are
    reached over the network, and so are those of the groups below."""
    experts: SharedHandles | None = None
    """Of the group of all ranks of its stage, over all copies; None: that is the group above."""
    second: SharedHandles | None = None
    """As `data`, for the second half of steps that are computed in halves; None: none are."""
    meeting: int = -1
    """Of the memory that is the file of torch's store, where ranks with GPUs of one machine meet."""

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors."""
        groups = (self.data, self.experts, self.second)
        meeting = () if self.meeting < 0 else (self.meeting,)
        return (*(fd for group in groups if group is not None for fd in group.fds), *meeting)


class TogetherHandles(msgspec.Struct, frozen=True, array_like=True):
    """Descriptors, for the cores that inherit them, and their ranks."""

    data: Sequence[SharedHandles]
    """By the number of a rank: see CopyShares; none where ranks are reached over the network."""
    experts: Sequence[SharedHandles]
    """By stage: see CopyShares; none where each is one rank."""
    second: Sequence[SharedHandles]
    """By the number of a rank: see CopyShares; none where no step is computed in halves."""
    agreement: SharedHandles
    """Of the group of the cores, which agrees on steps: which are computed in halves, and on the last of a wave."""
    board: int
    """Of the memory in which each core says which wave it calls for, and behind these at which place it receives."""
    bells: Sequence[int]
    """Of each core: rung where a wave begins."""
    meeting: int
    """See CopyShares; where ranks are reached over the network, what a `JointTable` is in."""
    turn_bells: Sequence[int]
    """Of each core: rung where others receive no more, for who waits for that (`TurnBoard`)."""

    @property
    def fds(self) -> tuple[int, ...]:
        """All of them."""
        groups = (*self.data, *self.experts, *self.second, self.agreement)
        return (*(fd for group in groups for fd in group.fds), self.board, *self.bells, self.meeting, *self.turn_bells)

    def of_rank(self, copy: int, rank: int) -> CopyShares:
        """What a rank of a copy needs of it."""
        if not self.data:
            return CopyShares(copy)
        abreast = len(self.data) // len(self.experts) if self.experts else 1
        experts = self.experts[rank // abreast] if self.experts else None
        return CopyShares(copy, self.data[rank], experts, self.second[rank] if self.second else None, self.meeting)

    def close(self) -> None:
        """Close what this process has of it; call this once."""
        for fd in self.fds:
            os.close(fd)


def make_together(parallel: Parallelism) -> TogetherHandles:
    """Make what the copies share; it has no name, so nothing is left of it.

    Raises:
        OSError: the system gives no memory, or no more descriptors.
    """
    copies, abreast = parallel.data_parallel_size, parallel.tensor_parallel_size
    with closed_on_failure() as made:

        def groups(count: int, size: int) -> list[SharedHandles]:
            found = []
            for _ in range(count):
                found.append(make_shared_group(size))
                made.extend(found[-1].fds)
            return found

        here = 0 if parallel.is_networked else parallel.world_size
        data = groups(here, copies)
        experts = groups(parallel.pipeline_parallel_size if abreast > 1 and here else 0, copies * abreast)
        second = groups(here if parallel.enable_dbo else 0, copies)
        (agreement,) = groups(1, copies)
        made.append(board := os.memfd_create("pagefleet-waves"))
        os.ftruncate(board, _board_bytes(copies))
        made.append(meeting := os.memfd_create("pagefleet-meeting"))
        bells = make_bells(2 * copies)
        return TogetherHandles(data, experts, second, agreement, board, bells[:copies], meeting, bells[copies:])


def _board_bytes(copies: int) -> int:
    return PAGE * (1 + 16 * copies // PAGE)


class _Board:
    """Words in memory, of which each core writes its own and all read all, and a bell of each, which the others ring.

    Args:
        handles: of all copies.
        index: of this one.
        first: place of the first word, in words.
        bells: of all cores.
    """

    def __init__(self, handles: TogetherHandles, index: int, first: int, bells: Sequence[int]) -> None:
        self._index = index
        memory = mmap.mmap(handles.board, _board_bytes(len(bells)))
        self._words = memoryview(memory).cast("Q")[first : first + len(bells)]
        self._own = Doorbell(bells[index])
        self._others = [Doorbell(fd) for rank, fd in enumerate(bells) if rank != index]

    @property
    def bell(self) -> int:
        """A descriptor that is readable when another core has written."""
        return self._own.fileno()

    def _write(self, word: int) -> None:
        self._words[self._index] = word
        for bell in self._others:
            bell.ring()


class WaveBoard(_Board):
    """Where cores call for waves: each writes its own number, and all read the largest.

    Args:
        handles: of all copies.
        index: of this one.
    """

    def __init__(self, handles: TogetherHandles, index: int) -> None:
        super().__init__(handles, index, 0, handles.bells)

    def call(self, wave: int) -> None:
        """Have all copies begin a wave."""
        self._write(wave)

    def newest(self) -> int:
        """Return the latest wave that any copy has called for; 0: none yet."""
        self._own.take()
        return max(self._words)


class TurnBoard(_Board):
    """Where cores of copies say at which place among the steps they receive K/V on their ranks' devices, as they do so
    only at one at a time. Used by one thread.

    A copy's word is one more than the steps before what it receives; 0: nothing. The bell rings when others may have
    received what `begin` was refused for.

    Args:
        handles: of all copies.
        index: of this one.
    """

    def __init__(self, handles: TogetherHandles, index: int) -> None:
        super().__init__(handles, index, len(handles.bells), handles.turn_bells)
        # Opened anew: copies inherit what is open, and a lock on that would be all of theirs.
        self._lock = os.open(f"/proc/self/fd/{handles.board}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._lock)

    def silence(self) -> None:
        """Take the bell's ring."""
        self._own.take()

    def begin(self, num_steps: int) -> bool:
        """Receive behind so many steps; False: another copy receives behind more, or fewer."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            if not {*self._words} <= {0, num_steps + 1}:
                return False
            self._words[self._index] = num_steps + 1
            return True
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def rest(self) -> None:
        """Nothing is received here any more."""
        self._write(0)
