"""How the executor sees that a rank lives and how far it is, without asking: words in shared memory.

A process that is gone is seen by its sentinel. One that is stopped, or that never comes back from a step, is seen here:
a thread of each rank stamps the time, and the ranks count the steps that they launch, which they do in lockstep, and
those that they are done with.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from pagefleet_protocol.load_progress import LoadPhase

STAMP_S = 0.5
HANG_S = 8.0
"""Without a stamp, or behind the other ranks, before a rank counts as hung."""
STAGE_HANG_S = 60.0
"""Behind other stages: long prompts on a slow processor take seconds."""
LOOK_S = 1.0
"""Between two looks."""

RankProgress = tuple[LoadPhase, int, int]
"""Of a rank that loads; see `startup.Tell`."""

_PHASES: tuple[LoadPhase, ...] = get_args(LoadPhase)
_WORDS = 8
_STAMP, _LAUNCHED, _FINISHED, _PHASE, _DONE, _TOTAL = range(6)


class OwnSigns(Protocol):
    """What a rank that serves says of itself."""

    def launch(self) -> None:
        """Count a step that was launched."""
        ...

    def finish(self) -> None:
        """Count a step that touches nothing of the rank's K/V any more."""
        ...


@dataclass(frozen=True, slots=True)
class Signs:
    """Of one rank."""

    stamped_at: float
    """Monotonic seconds."""
    launched: int
    """Steps, in all."""


def make_signs(size: int) -> int:
    """Make the memory for `size` ranks; returns its descriptor."""
    memory = os.memfd_create("pagefleet-signs")
    os.ftruncate(memory, size * _WORDS * 8)
    return memory


class VitalSigns:
    """The words of all ranks, in one process: each rank writes its own."""

    def __init__(self, memory: int, size: int) -> None:
        self._words = memoryview(mmap.mmap(memory, size * _WORDS * 8)).cast("Q", (size, _WORDS))
        self._size = size

    def stamp(self, rank: int) -> None:
        """Say that the rank's process runs."""
        self._words[rank, _STAMP] = time.monotonic_ns()

    def of(self, rank: int) -> OwnSigns:
        """Return those that a rank writes while it serves."""
        return _OneRank(self._words, rank)

    @property
    def num_finished(self) -> int:
        """Steps that all ranks have finished."""
        return min(self._words[rank, _FINISHED] for rank in range(self._size))

    def loading(self, rank: int, phase: LoadPhase, done: int, total: int) -> None:
        """Say how far the rank's loading is; see `startup.Tell`."""
        for word, value in ((_PHASE, _PHASES.index(phase)), (_DONE, done), (_TOTAL, total)):
            self._words[rank, word] = value

    def read(self) -> list[Signs]:
        """Return the signs of all ranks."""
        words = self._words
        return [Signs(words[rank, _STAMP] / 1e9, words[rank, _LAUNCHED]) for rank in range(self._size)]

    def progress(self) -> list[RankProgress]:
        """Return how far each rank has loaded."""
        words = self._words
        return [(_PHASES[words[at, _PHASE]], words[at, _DONE], words[at, _TOTAL]) for at in range(self._size)]


class _OneRank:
    """Implements `OwnSigns`."""

    __slots__ = ("_rank", "_words")

    def __init__(self, words: memoryview, rank: int) -> None:
        self._words, self._rank = words, rank

    def launch(self) -> None:
        """See OwnSigns."""
        self._words[self._rank, _LAUNCHED] += 1

    def finish(self) -> None:
        """See OwnSigns."""
        self._words[self._rank, _FINISHED] += 1


def least_progress(ranks: Sequence[RankProgress]) -> RankProgress:
    """Return the phase of the rank that is least far, and what ranks in it have done of all that they have to."""
    phases = [phase for phase, _, _ in ranks]
    named = [phase for phase in phases if phase != "other"]
    phase = min(named or phases, key=_PHASES.index)
    within = [(done, total) for one, done, total in ranks if one == phase]
    return phase, sum(done for done, _ in within), sum(total for _, total in within)


class HangWatch:
    """Judges the signs of ranks that serve, look by look.

    A look that comes late says nothing about the ranks: this process was stopped itself, maybe with all of them. The
    ranks that divide layers among them are level; the stages of a pipeline are steps apart, and one that computes while
    the others have nothing to do does not hang before it takes very long. Then the first of those that are least far is
    it: stages behind it wait for what it gives.

    Args:
        abreast: how many neighbours are level.

    Attributes:
        num_given: steps that were sent to all ranks, as their sender counts them.
    """

    def __init__(self, abreast: int) -> None:
        self._abreast = abreast
        self.num_given = 0
        self._looked_at = -HANG_S
        self._watched_since = 0.0
        self._behind: dict[int, tuple[int, float]] = {}
        """Of ranks that others are ahead of: the steps that each had launched, and since when."""

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next look."""
        return now - self._looked_at >= LOOK_S

    def look(self, signs: Sequence[Signs], now: float) -> tuple[int, str] | None:
        """Return a rank that hangs and how that shows, if there is one."""
        if now - self._looked_at > 3 * LOOK_S:
            self._watched_since = now
            self._behind = {}
        self._looked_at = now
        farthest = max(sign.launched for sign in signs)
        if self._abreast < len(signs):  # nothing else tells of the first stage, which the others wait for
            farthest = max(farthest, self.num_given)
        for rank, sign in enumerate(signs):
            first = rank - rank % self._abreast
            level = max(one.launched for one in signs[first : first + self._abreast])
            silent = now - max(sign.stamped_at, self._watched_since)
            if silent > HANG_S:
                return rank, f"gave no sign of life for {silent:.0f} s"
            before = self._behind.pop(rank, None)
            if sign.launched == farthest:
                continue
            since = before[1] if before is not None and before[0] == sign.launched else now
            if now - since > (HANG_S if sign.launched < level else STAGE_HANG_S):
                return rank, f"did not come out of a step for {now - since:.0f} s"
            self._behind[rank] = (sign.launched, since)
        return None
