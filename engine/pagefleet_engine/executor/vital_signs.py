"""How the executor sees that a rank lives and how far it is, without asking: words in shared memory.

A process that is gone is seen by its sentinel. One that is stopped, or that never comes back from a step, is seen here:
a thread of each rank stamps the time, also that at which the others last computed; the rank says whom it waits for, and
counts the steps that it launches and those that it is done with.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from pathlib import Path
from typing import Self, get_args

import msgspec
from pagefleet_protocol.load_progress import LoadPhase

STAMP_S = 0.5
_LEAST_WORK_NS = 100_000
"""Of a processor's time, for all that a step may do: to be woken takes less."""

RankProgress = tuple[LoadPhase, int, int]
"""Of a rank that loads; see `startup.Tell`."""

_PHASES: tuple[LoadPhase, ...] = get_args(LoadPhase)
_WORDS = 12
_STAMP, _WORKED, _AWAITS, _LAUNCHED, _FINISHED, _PHASE, _DONE, _TOTAL, _LAYERS, _PATIENCE, _BURNT, _DEVICE = range(
    _WORDS
)


class Awaited(IntEnum):
    """Whom a rank waits for. Of several threads that compute, the least number of theirs is the rank's."""

    NOBODY = 0
    """It computes, or should."""
    EXECUTOR = 1
    """It has nothing to do."""
    TENSOR = 2
    """The other ranks of its stage."""
    STAGE = 3
    """The stage before it or behind it, or another copy of the model."""


class Signs(msgspec.Struct, frozen=True, array_like=True):
    """Of one rank, in monotonic seconds."""

    stamped_at: float = 0.0
    worked_at: float = 0.0
    """When a stamp last found that the process had computed."""
    awaits: Awaited = Awaited.NOBODY
    awaits_since: float = 0.0
    launched: int = 0
    """Steps, in all."""
    finished: int = 0
    layers: int = 0
    """Of all steps, that it has come through, where it counts them."""
    patience_s: float | None = None
    """That one may take now; None: not known."""
    burnt_s: float = 0.0
    """Of processors' time, in all."""
    device_patience_s: float | None = None
    """That a GPU may take for the step that it has; None: not known, or it has none."""

    def moved(self, seconds: float) -> Self:
        """The same by another clock."""
        return msgspec.structs.replace(
            self,
            stamped_at=self.stamped_at + seconds,
            worked_at=self.worked_at + seconds,
            awaits_since=self.awaits_since + seconds,
        )


def make_signs(size: int) -> int:
    """Make the memory for `size` ranks; returns its descriptor."""
    memory = os.memfd_create("pagefleet-signs")
    os.ftruncate(memory, size * _WORDS * 8)
    return memory


def _words_of(memory: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(memory, size * _WORDS * 8)).cast("Q")


class OwnSigns:
    """What the rank in place `place` of so many on its machine tells."""

    def __init__(self, memory: int, size: int, place: int) -> None:
        self._words = _words_of(memory, size)[place * _WORDS : (place + 1) * _WORDS]
        self._worked_ns = 0
        self._awaited: dict[int, Awaited] = {}
        """By threads that have ever waited for somebody, whom they do now."""
        self._lock = threading.Lock()

    def stamp(self) -> None:
        """Say that the process runs, and whether other threads than this one, or a compiler that they started, have
        computed since; of one thread."""
        now = time.monotonic_ns()
        worked_ns = time.process_time_ns() - time.thread_time_ns()
        if worked_ns - self._worked_ns > _LEAST_WORK_NS or _has_children():
            self._worked_ns = worked_ns
            self._words[_WORKED] = now
        self._words[_BURNT] = max(0, worked_ns)
        self._words[_STAMP] = now

    def launch(self) -> None:
        """Count a step that was launched."""
        self._words[_LAUNCHED] += 1

    def finish(self) -> None:
        """Count a step that touches nothing of the rank's K/V any more."""
        self._words[_FINISHED] += 1

    @property
    def num_finished(self) -> int:
        """Steps that were counted by `finish`."""
        return self._words[_FINISHED]

    def be_patient(self, seconds: float | None) -> None:
        """Say how long a layer of the step that begins may take; None: nobody knows."""
        self._words[_PATIENCE] = _patience_word(seconds)

    def be_patient_with_device(self, seconds: float | None) -> None:
        """Say how long the GPU may take for the step that it has; None: nobody knows, or it has none."""
        self._words[_DEVICE] = _patience_word(seconds)

    def come_to_layer(self) -> float:
        """Count a layer that was computed; returns the seconds since the one before, or since others were met."""
        since, now = self._words[_AWAITS], time.monotonic_ns()
        self._words[_AWAITS] = now & ~3
        self._words[_LAYERS] += 1
        return (now - since) / 1e9

    def loading(self, phase: LoadPhase, done: int, total: int) -> None:
        """Say how far loading is; see `startup.Tell`."""
        for word, value in ((_PHASE, _PHASES.index(phase)), (_DONE, done), (_TOTAL, total)):
            self._words[word] = value

    def awaiting(self, whom: Awaited) -> AbstractContextManager[None]:
        """Return a context to wait in, as often as need be, by threads that compute: a rank waits where all of them do.
        One that has never waited is unknown."""
        return _Awaiting(self, whom)

    def turn_to(self, whom: Awaited) -> None:
        """Say for whom the calling thread waits from now on."""
        with self._lock:
            self._awaited[threading.get_ident()] = whom
            # both for whom and since when in one word, so that nobody reads one alone
            self._words[_AWAITS] = time.monotonic_ns() & ~3 | min(self._awaited.values())


def _patience_word(seconds: float | None) -> int:
    return 0 if seconds is None else 1 + int(seconds * 1e9)


def _has_children() -> bool:
    """Whether the main thread has started a process that goes on; False where the system does not tell."""
    try:
        return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_bytes())
    except OSError:
        return False


class _Awaiting:
    """Says within it that a thread of a rank waits."""

    __slots__ = ("_signs", "_whom")

    def __init__(self, signs: OwnSigns, whom: Awaited) -> None:
        self._signs, self._whom = signs, whom

    def __enter__(self) -> None:
        self._signs.turn_to(self._whom)

    def __exit__(self, *error: object) -> None:
        self._signs.turn_to(Awaited.NOBODY)


class VitalSigns:
    """The words of all ranks of a machine, for who watches them."""

    def __init__(self, memory: int, size: int) -> None:
        self._words = _words_of(memory, size).cast("B").cast("Q", (size, _WORDS))
        self._size = size

    @property
    def num_finished(self) -> int:
        """Steps that all ranks have finished."""
        return min(self._words[rank, _FINISHED] for rank in range(self._size))

    def read(self) -> list[Signs]:
        """Return the signs of all ranks."""
        words = self._words
        found = []
        for at in range(self._size):
            awaits, patience, device = words[at, _AWAITS], words[at, _PATIENCE], words[at, _DEVICE]
            found.append(
                Signs(
                    words[at, _STAMP] / 1e9,
                    words[at, _WORKED] / 1e9,
                    Awaited(awaits & 3),
                    awaits / 1e9,
                    words[at, _LAUNCHED],
                    words[at, _FINISHED],
                    words[at, _LAYERS],
                    patience / 1e9 if patience else None,
                    words[at, _BURNT] / 1e9,
                    device / 1e9 if device else None,
                )
            )
        return found

    def progress(self) -> list[RankProgress]:
        """Return how far each rank has loaded."""
        words = self._words
        return [(_PHASES[words[at, _PHASE]], words[at, _DONE], words[at, _TOTAL]) for at in range(self._size)]


def least_progress(ranks: Sequence[RankProgress]) -> RankProgress:
    """Return the phase of the rank that is least far, and what ranks in it have done of all that they have to."""
    phases = [phase for phase, _, _ in ranks]
    named = [phase for phase in phases if phase != "other"]
    phase = min(named or phases, key=_PHASES.index)
    within = [(done, total) for one, done, total in ranks if one == phase]
    return phase, sum(done for done, _ in within), sum(total for _, total in within)
