"""Planes of connectors on a rank's device, which only its process reaches: the core's end.

What the core's connector asks of a plane goes to the rank's `PlaneServer` by a wire, and what the plane tells comes
back: through rings to ranks of this machine, over the link to those of another.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from pagefleet_kv.errors import TransfersDead
from pagefleet_kv.p2p.data_plane import End, Frame, Landing, PlaneEvent
from pagefleet_kv.p2p.planes.device.lanes import LaneTerms
from pagefleet_kv.p2p.planes.device.opening import NoPlane, PlaneOpening

from pagefleet_engine.executor.asked_pool import LOOK_S, close_all, duplicated
from pagefleet_engine.executor.plane_words import (
    Answer,
    Asked,
    Close,
    Connect,
    Counted,
    Disconnect,
    Events,
    Failed,
    Forget,
    Hear,
    Invite,
    Land,
    Open,
    Order,
    Question,
    Send,
    Withdraw,
    decode_told,
    encode,
)
from pagefleet_engine.executor.rank_pages import StepFence
from pagefleet_engine.executor.ring import ROOM_LOOK_S, Buffer, RingPair, RingReader, RingWriter

ANSWER_S = 8.0
"""That a rank gets to take in what it is asked, and to answer; while this process is stopped none of it passes."""


class PlaneWire(Protocol):
    """To one rank's `PlaneServer` and back, in order; nothing is lost while the rank is there. Used by one thread at a
    time."""

    @property
    def bell(self) -> int:
        """Readable while there is something to receive; it may also be there already, so `receive` first."""
        ...

    def send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        """Ask for something; `or_raise` is called while there is no room for it, and may give up."""
        ...

    def receive(self, timeout_s: float) -> Sequence[Buffer] | None:
        """Return the next of what is told, whose parts hold until the next call; None when it did not come in time."""
        ...


class PlaneRings:
    """Implements `PlaneWire` to a rank of this machine."""

    def __init__(self, handles: RingPair) -> None:
        own = duplicated(handles)  # who made the others closes them as soon as the ranks are over
        weakref.finalize(self, close_all, own.fds)
        self._asking = RingWriter(own.there)
        self._answers = RingReader(own.back)

    @property
    def bell(self) -> int:
        """See PlaneWire."""
        return self._answers.fileno()

    def send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        """See PlaneWire."""
        self._asking.send(parts, or_raise)

    def receive(self, timeout_s: float) -> Sequence[Buffer] | None:
        """See PlaneWire."""
        return self._answers.receive(timeout_s)


class AskedDevice:
    """Implements `PlaneDevice` for a rank's. Used by one thread at a time.

    Args:
        wire: to the rank.
        name: of the rank and its machine.
        fence: tells which steps are to be over.
        is_over: whether the rank is gone: then nothing is done, and the engine ends by itself.
    """

    def __init__(self, wire: PlaneWire, name: str, fence: StepFence, is_over: Callable[[], bool]) -> None:
        self._wire = wire
        self._name = name
        self._is_over = is_over
        self._left_s = ANSWER_S
        """Patience with what is asked just now; none is left with a rank that has not answered."""
        self._planes: dict[str, AskedPlane] = {}
        self.fence = fence

    @property
    def bell(self) -> int:
        """Readable while there is something to take in."""
        return self._wire.bell

    def open(self, opening: PlaneOpening) -> AskedPlane:
        """See PlaneDevice."""
        if (answer := self.wait(opening.name, Open(opening))).refused is not None:
            raise NoPlane(answer.refused)
        plane = self._planes[opening.name] = AskedPlane(opening.name, self)
        return plane

    @property
    def silence(self) -> str:
        """What to say of a rank that has not answered; empty: it always did."""
        if self._left_s > 0:
            return ""
        return f"{self._name} did not answer for {ANSWER_S:g} s about K/V that it passes: start the engine again"

    def ask(self, plane: str, command: Question | Order, held: Sequence[Buffer] = ()) -> None:
        """Have the rank do something."""
        if self._is_gone:
            return
        self._left_s = ANSWER_S
        try:
            self._wire.send([encode(Asked(plane, command)), *held], self._make_way)
        except OSError:
            assert self._is_gone

    def wait(self, plane: str, command: Question) -> Answer:
        """Have the rank do something, and wait until it has."""
        self.ask(plane, command)
        while not self._is_gone:
            began = time.monotonic()
            if (answer := self.take_in(LOOK_S)) is not None:
                return answer
            self._left_s -= min(LOOK_S, time.monotonic() - began)
        return Answer(refused=self.silence or "the engine's ranks are gone")

    def take_in(self, timeout_s: float = 0.0) -> Answer | None:
        """Give planes what the rank tells of them, up to an answer."""
        while not self._is_gone and (parts := self._wire.receive(timeout_s)) is not None:
            match decode_told(parts[0]):
                case Answer() as answer:
                    return answer
                case Events(name) as told:
                    self._planes[name].told.extend(told.events())
                case Counted(name, counters):
                    self._planes[name].counted = counters
                case Failed(name):
                    self._planes[name].has_failed = True
        return None

    @property
    def _is_gone(self) -> bool:
        return self._left_s <= 0 or self._is_over()

    def _make_way(self) -> None:
        """The rank makes no room. It may wait for some itself, to tell what it has to."""
        self._left_s -= ROOM_LOOK_S
        if self._is_gone:
            raise OSError("the rank takes nothing in")
        answer = self.take_in()
        assert answer is None, "what is asked now it has not read"


class AskedPlane:
    """Implements `RankPlane` for one of a rank's planes.

    Attributes:
        told: what it told, and nobody has taken.
        counted: what it counts, a moment old at most; replaced, never changed.
        has_failed: whether its thread has ended.
    """

    def __init__(self, name: str, device: AskedDevice) -> None:
        self._name = name
        self._device = device
        self.told: deque[PlaneEvent] = deque()
        self.counted: dict[str, float] = {}
        self.has_failed = False

    @property
    def bell(self) -> int:
        """See RankPlane: rings for other planes of the device too."""
        return self._device.bell

    def invite(self, peer: str, terms: LaneTerms) -> bytes:
        """See RankPlane."""
        return self._device.wait(self._name, Invite(peer, terms)).data

    def connect(self, peer: str, host: str, invitation: bytes, terms: LaneTerms) -> None:
        """See RankPlane."""
        self._ask(Connect(peer, host, invitation, terms))

    def disconnect(self, peer: str, end: End) -> None:
        """See RankPlane."""
        self._device.wait(self._name, Disconnect(peer, end))

    def send(self, peer: str, frame: Frame) -> None:
        """See RankPlane."""
        place = (frame.transfer_id, frame.epoch, frame.seq, frame.first_block)
        command = Send(peer, *place, [*frame.blocks], self._device.fence.steps_to_read)
        self._device.ask(self._name, command, () if frame.held is None else (frame.held,))

    def withdraw(self, transfer_id: bytes) -> None:
        """See RankPlane."""
        self._ask(Withdraw(transfer_id))

    def land(self, peer: str, landing: Landing) -> None:
        """See RankPlane."""
        place = (landing.transfer_id, landing.epoch, landing.first_block)
        self._ask(Land(peer, *place, [*landing.blocks], self._device.fence.steps_to_write))

    def forget(self, transfer_id: bytes) -> None:
        """See RankPlane."""
        self._ask(Forget(transfer_id))

    def hear(self, peer: str, data: bytes) -> None:
        """See RankPlane."""
        self._ask(Hear(peer, data))

    def events(self) -> Sequence[PlaneEvent]:
        """See RankPlane."""
        self._device.take_in()
        if silence := self._device.silence:
            raise TransfersDead(silence)
        if self.has_failed:
            raise TransfersDead("the thread that passes a rank's K/V has ended")
        return [self.told.popleft() for _ in range(len(self.told))]

    def counters(self) -> dict[str, float]:
        """See RankPlane."""
        return self.counted

    def close(self) -> None:
        """See RankPlane."""
        self._device.wait(self._name, Close())

    def _ask(self, command: Order) -> None:
        self._device.ask(self._name, command)
