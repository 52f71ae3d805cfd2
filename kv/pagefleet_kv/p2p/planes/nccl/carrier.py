"""Slots over NCCL: communicators of two ranks, one per direction, made when a peer is dialled and when frames wait.

They are given up when others need their room. A send is launched once the target has said Go, and then the receive
runs or is next on its communicator. So no kernel of ours waits for a launch that waits for it, whatever the order of
links, and each holds at most `MAX_CTAS` multiprocessors for as long as a frame takes. All calls are made by the
plane's thread. Where others launch NCCL's kernels on the device, as the sums of several ranks do, each launch has its
turn (`device/turns.py`). NCCL's connections are not encrypted: who is met knows an id that only the control plane
carries, but this plane is for networks that you trust.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.device.link import Say
from pagefleet_kv.p2p.planes.device.turns import Turns
from pagefleet_kv.p2p.planes.device.words import Go, Meet, Park, PleasePark, Seat, Taken, Want, Word
from pagefleet_kv.p2p.planes.nccl.communicator import (
    SOURCE_RANK,
    TARGET_RANK,
    Communicator,
    CommunicatorEnd,
    CommunicatorSettings,
    NcclTransfer,
)
from pagefleet_kv.p2p.planes.nccl.library import NcclError, NcclFunctions, version_text
from pagefleet_kv.p2p.planes.shell import LinkBroken

MAX_CTAS = 2
INIT_S = 20.0
ASK_AGAIN_S = 0.5
"""Before a source is asked to give up a communicator again."""


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class NcclTotals:
    """What is counted over all links."""

    made: int = 0
    parked: int = 0


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the halves of one direction share."""

    communicators: CommunicatorSettings
    seats: Seats
    totals: NcclTotals


class _Half:
    """What both halves of a link have: a seat, and a communicator on it once both have met."""

    def __init__(self, peer: str, say: Say, shared: _Shared, turns: Turns | None) -> None:
        self._peer = peer
        self._say = say
        self._shared = shared
        self._turns = turns
        self._communicator: Communicator | None = None
        self._now = 0.0

    @property
    def num_bytes(self) -> int:
        made = self._communicator  # read once: counters are asked for by another thread
        return 0 if made is None else made.num_bytes

    @property
    def _works(self) -> bool:
        """Whether NCCL is to be looked after."""
        made = self._communicator
        return made is not None and not (made.ready and made.idle)

    @property
    def _idles(self) -> bool:
        """Whether there is a communicator that could be given up."""
        made = self._communicator
        return made is not None and made.ready and made.idle

    def poll(self, now: float) -> Sequence[int]:
        self._now = now
        try:
            return () if self._communicator is None else self._communicator.poll(now)
        except NcclError as error:
            raise LinkBroken(str(error)) from None

    def _make(self, owner: Seated, unique_id: bytes, rank: int, name: str) -> None:
        shared = self._shared
        try:
            end = CommunicatorEnd(unique_id, rank, name, shared.seats.stream(owner), self._turns, self._launched)
            self._communicator = Communicator(shared.communicators, end, self._now)
        except NcclError as error:
            raise LinkBroken(str(error)) from None
        shared.totals.made += 1

    def _launched(self, number: int) -> None:
        """A transfer was launched."""

    def _leave(self, owner: Seated) -> None:
        made, self._communicator = self._communicator, None
        if made is not None:
            try:
                made.abort()
            except NcclError as error:  # nothing is left to be done for it
                _log.warning("a communicator could not be aborted: %s", error)
        self._shared.seats.leave(owner)


class NcclSource(_Half):
    """Implements `SourceCarrier`."""

    def __init__(self, peer: str, say: Say, shared: _Shared, turns: Turns | None) -> None:
        super().__init__(peer, say, shared, turns)
        self._generation = 0
        self._wanted = False
        self._seated = False
        """The target has room."""
        self._waiting: dict[int, Tensor] = {}
        """Announced frames for which the target has not said Go."""

    @property
    def under_way(self) -> bool:
        """Whether NCCL, or the wait for a seat, is to be looked after."""
        return self._seated or self._works

    def ready(self, now: float) -> bool:
        """See SourceCarrier. Takes a seat, asks the target for one, and meets it."""
        if self._communicator is not None:
            return self._communicator.ready
        if not self._shared.seats.take(self):
            return False
        if not self._wanted:
            self._wanted = True
            self._generation += 1
            self._say(Want(self._generation))
        elif self._seated:
            self._seated = False
            self._meet()
        return False

    def announced(self, number: int, slot: Tensor) -> None:
        self._waiting[number] = slot
        self._shared.seats.use(self)

    def hear(self, word: Word) -> None:
        match word:
            case Seat(generation):
                self._seated = generation == self._generation and self._wanted and self._communicator is None
            case Go(number):
                slot = self._waiting.pop(number, None)
                if slot is None or self._communicator is None:
                    raise LinkBroken(f"it said Go for frame {number}, which does not wait")
                self._communicator.give(NcclTransfer(number, slot.data_ptr(), len(slot)), self._now)
            case Taken():
                pass  # the send's end says the same
            case PleasePark(generation):
                if generation == self._generation:
                    self.give_up()
            case _:
                raise LinkBroken("it said what only a source says")

    def close(self) -> None:
        self._waiting.clear()
        self._drop()

    def _meet(self) -> None:
        try:
            unique_id = self._shared.communicators.library.unique_id()
        except NcclError as error:
            raise LinkBroken(str(error)) from None
        self._say(Meet(self._generation, unique_id))
        self._make(self, unique_id, SOURCE_RANK, f"kv to {self._peer[:12]}")

    def give_up(self) -> bool:
        """See Seated: park."""
        if not self._idles or self._waiting:
            return False
        self._shared.totals.parked += 1
        self._say(Park(self._generation))
        self._drop()
        return True

    def _drop(self) -> None:
        self._wanted = self._seated = False
        self._leave(self)


class NcclTarget(_Half):
    """Implements `TargetCarrier`."""

    by_copies = False

    def __init__(self, peer: str, say: Say, shared: _Shared, turns: Turns | None) -> None:
        super().__init__(peer, say, shared, turns)
        self._wanted: int | None = None
        """Generation that waits for a seat."""
        self._generation: int | None = None
        """That has one."""
        self._asked_at = float("-inf")
        self._asked_first_at: float | None = None
        """When the source was first asked for the seat that it has not used since."""

    @property
    def under_way(self) -> bool:
        """Whether NCCL, or the wait for a seat, is to be looked after."""
        return self._wanted is not None or self._asked_first_at is not None or self._works

    def fetch(self, number: int, remote_slot: int, into: Tensor) -> None:
        """See TargetCarrier. Which slot of the source's it is does not matter."""
        if self._communicator is None:
            raise LinkBroken(f"frame {number} was announced without a communicator")
        self._communicator.give(NcclTransfer(number, into.data_ptr(), len(into)), self._now)
        if self._turns is None:
            self._say(Go(number))
        self._shared.seats.use(self)
        self._asked_first_at = None

    def hear(self, word: Word) -> None:
        match word:
            case Want(generation):
                if self._communicator is not None:
                    raise LinkBroken("it wants a second communicator")
                self._wanted = generation
            case Meet(generation, unique_id):
                if generation != self._generation or self._communicator is not None:
                    raise LinkBroken("it would meet where there is no seat for it")
                name = f"kv from {self._peer[:12]}"
                self._make(self, unique_id, TARGET_RANK, name)
            case Park(generation):
                if generation == self._generation:
                    self._shared.totals.parked += 1
                    self._drop()
            case _:
                raise LinkBroken("it said what only a target says")

    def poll(self, now: float) -> Sequence[int]:
        if self._wanted is not None and self._shared.seats.take(self):
            self._generation, self._wanted = self._wanted, None
            self._say(Seat(self._generation))
        if self._asked_first_at is not None and now - self._asked_first_at > self._shared.communicators.stall_s:
            raise LinkBroken("it keeps a seat that others wait for")
        return super().poll(now)

    def _launched(self, number: int) -> None:
        """In turn the source is told no sooner: its send would wait for our turn, and all behind it."""
        if self._turns is not None:
            self._say(Go(number))

    def close(self) -> None:
        self._wanted = None
        self._drop()

    def give_up(self) -> bool:
        """See Seated: ask the source to park."""
        if not self._idles or self._now < self._asked_at + ASK_AGAIN_S:
            return False
        self._asked_at = self._now
        if self._asked_first_at is None:
            self._asked_first_at = self._now
        assert self._generation is not None
        self._say(PleasePark(self._generation))
        return True

    def _drop(self) -> None:
        self._generation = self._asked_first_at = None
        self._leave(self)


class NcclCarriers:
    """Implements `Carriers` with NCCL.

    Args:
        max_sending: communicators to targets.
        max_receiving: communicators to sources.
    """

    name = "nccl"

    def __init__(
        self,
        library: NcclFunctions,
        copies: DeviceCopies,
        max_sending: int,
        max_receiving: int,
        stall_s: float,
        init_s: float = INIT_S,
    ) -> None:
        self._library = library
        self._copies = copies
        self._totals = NcclTotals()
        settings = CommunicatorSettings(library, copies, MAX_CTAS, init_s, stall_s)
        self._sending, self._receiving = (
            _Shared(settings, Seats([copies.new_stream() for _ in range(most)], copies.free_bytes), self._totals)
            for most in (max_sending, max_receiving)
        )

    def facts(self) -> bytes:
        """See Carriers: NCCL's version, which must be one for both."""
        return self._library.version.to_bytes(4, "little")

    def send_slots(self, count: int) -> Tensor:
        return self._copies.slots(count)

    def to_target(self, peer: str, say: Say, turns: Turns | None) -> NcclSource:
        return NcclSource(peer, say, self._sending, turns)

    def to_source(self, peer: str, facts: bytes, say: Say, turns: Turns | None) -> NcclTarget:
        if facts != self.facts():
            theirs = int.from_bytes(facts[:4], "little")
            raise LinkBroken(f"NCCL is {version_text(theirs)} there, {version_text(self._library.version)} here")
        return NcclTarget(peer, say, self._receiving, turns)

    def counters(self) -> dict[str, float]:
        directions = (self._sending.seats, self._receiving.seats)
        return {
            "communicators": float(sum(map(len, directions))),
            "communicator_bytes": float(sum(seats.num_bytes for seats in directions)),
            "communicators_made_total": float(self._totals.made),
            "communicators_parked_total": float(self._totals.parked),
        }

    def close(self) -> None:
        """See Carriers: the links had all there was."""


MIN_FREE_BYTES = 256 << 20
"""NCCL takes some 50 to 100 MB of device memory for a communicator; less than this, and no more are made."""


class Seated(Protocol):
    """Who has a communicator, or is about to make one."""

    @property
    def num_bytes(self) -> int:
        """Device memory of its communicator."""

    def give_up(self) -> bool:
        """Leave the seat, now or soon, if nothing is under way; return whether it does."""


class Seats:
    """Room for communicators: so many at a time, and only while the device has memory for one more.

    Sources and targets have rooms of their own. A source takes its seat before it asks the target for one, and who
    holds a target's seat waits for nothing but a source that has its own: so no circle of engines waits for each other.
    The least recently used goes first. Used by one thread, but for `len` and `num_bytes`.

    Args:
        streams: one for each seat, made once: torch hands out some 32 in turn, and two links on one would wait for
            each other. None on a CPU.
        free_bytes: returns what the device has left.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream | None], free_bytes: Callable[[], int]) -> None:
        self._streams = list(streams)
        self._free_bytes = free_bytes
        self._taken: OrderedDict[Seated, torch.cuda.Stream | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def num_bytes(self) -> int:
        return sum(owner.num_bytes for owner in list(self._taken))

    def take(self, owner: Seated) -> bool:
        """Return whether the owner has a seat now; if not, one that idles is asked to leave, so ask again."""
        if owner in self._taken:
            return True
        if self._streams and self._free_bytes() >= MIN_FREE_BYTES:
            self._taken[owner] = self._streams.pop()
            return True
        for other in list(self._taken):
            if other.give_up():
                return other not in self._taken and self.take(owner)
        return False

    def stream(self, owner: Seated) -> torch.cuda.Stream | None:
        return self._taken[owner]

    def use(self, owner: Seated) -> None:
        if owner in self._taken:
            self._taken.move_to_end(owner)

    def leave(self, owner: Seated) -> None:
        if owner in self._taken:
            self._streams.append(self._taken.pop(owner))
