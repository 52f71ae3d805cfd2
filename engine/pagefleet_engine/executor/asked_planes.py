"""Planes of connectors on a rank's device, which only its process reaches: the rank opens them when it is asked to.

What the core's connector asks of a plane goes to the rank through a ring, and what the plane tells comes back through
another. A plane reads blocks, or may write to them, once the rank is done with the steps that `StepFence` names: its
own are all that touch its pool. What concerns a peer stays in order, and nothing else waits for that. Only turns to
launch transfers come among the rank's steps, so that all ranks have one order (`messages.Carry`).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, get_args

import msgspec
from pagefleet_kv.errors import TransfersDead
from pagefleet_kv.p2p.data_plane import End, Frame, Landing, PlaneEvent
from pagefleet_kv.p2p.planes.device.lanes import LaneTerms
from pagefleet_kv.p2p.planes.device.opening import NoPlane, PlaneOpening
from pagefleet_kv.p2p.planes.device.plane import DevicePlane
from pagefleet_kv.p2p.planes.local_device import LocalDevice

from pagefleet_engine.executor.asked_pool import LOOK_S, close_all, duplicated
from pagefleet_engine.executor.rank_pages import LOOK_S as STEP_LOOK_S
from pagefleet_engine.executor.rank_pages import StepFence
from pagefleet_engine.executor.ring import Buffer, RingPair, RingReader, RingWriter

COUNT_S = 0.25
"""Between two accounts of what a plane counts."""
_KINDS = get_args(PlaneEvent)


class _Open(msgspec.Struct, frozen=True, array_like=True, tag=0):
    opening: PlaneOpening


class _Invite(msgspec.Struct, frozen=True, array_like=True, tag=1):
    peer: str
    terms: LaneTerms


class _Connect(msgspec.Struct, frozen=True, array_like=True, tag=2):
    peer: str
    host: str
    invitation: bytes
    terms: LaneTerms


class _Disconnect(msgspec.Struct, frozen=True, array_like=True, tag=3):
    peer: str
    end: End


class _Send(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """What `Frame.held` has follows, if it has anything."""

    peer: str
    transfer_id: bytes
    epoch: int
    seq: int
    first_block: int
    blocks: Sequence[int]
    after: int
    """Steps that the rank is to be done with before."""


class _Land(msgspec.Struct, frozen=True, array_like=True, tag=5):
    peer: str
    transfer_id: bytes
    epoch: int
    first_block: int
    blocks: Sequence[int]
    after: int


class _Forget(msgspec.Struct, frozen=True, array_like=True, tag=6):
    transfer_id: bytes


class _Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=7):
    transfer_id: bytes


class _Hear(msgspec.Struct, frozen=True, array_like=True, tag=8):
    peer: str
    data: bytes


class _Close(msgspec.Struct, frozen=True, array_like=True, tag=9):
    pass


_Question = _Open | _Invite | _Disconnect | _Close
_PeerOrder = _Connect | _Send | _Land | _Hear
_Order = _PeerOrder | _Forget | _Withdraw


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    plane: str
    command: _Question | _Order


class _Answer(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """To who opens, invites, disconnects or closes."""

    data: bytes = b""
    refused: str | None = None


class _Events(msgspec.Struct, frozen=True, array_like=True, tag=1):
    plane: str
    events: Sequence[Sequence[Any]]
    """Each with its kind first."""


class _Counted(msgspec.Struct, frozen=True, array_like=True, tag=2):
    plane: str
    counters: dict[str, float]


class _Failed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A plane's thread has ended."""

    plane: str


_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(_Asked)
_told: msgspec.msgpack.Decoder[_Answer | _Events | _Counted | _Failed] = msgspec.msgpack.Decoder(
    _Answer | _Events | _Counted | _Failed
)


class _Orders:
    """What one plane is still to do, in order for each peer, each with what follows it in the ring."""

    def __init__(self) -> None:
        self._by_peer: dict[str, deque[tuple[_PeerOrder, memoryview | None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_peer)

    def add(self, order: _PeerOrder, held: memoryview | None) -> None:
        """Behind what is to be done for the same peer."""
        self._by_peer.setdefault(order.peer, deque()).append((order, held))

    def take(self, num_finished: int) -> Iterator[tuple[_PeerOrder, memoryview | None]]:
        """Return what waits for no step, where the rank is done with so many."""
        for peer, orders in list(self._by_peer.items()):
            while orders and (not isinstance(orders[0][0], _Send | _Land) or orders[0][0].after <= num_finished):
                yield orders.popleft()
            if not orders:
                del self._by_peer[peer]

    def drop(self, is_void: Callable[[_PeerOrder], bool]) -> None:
        """Do none of these."""
        kept = {peer: deque(one for one in orders if not is_void(one[0])) for peer, orders in self._by_peer.items()}
        self._by_peer = {peer: orders for peer, orders in kept.items() if orders}


class PlaneServer:
    """The rank's end: a thread that passes on what is asked and told.

    Args:
        device: of this rank.
        num_finished: returns how many steps the rank is done with.
    """

    def __init__(self, device: LocalDevice, handles: RingPair, num_finished: Callable[[], int]) -> None:
        self._device = device
        self._num_finished = num_finished
        self._asked = RingReader(handles.there)
        self._answers = RingWriter(handles.back)
        self._planes: dict[str, DevicePlane] = {}
        self._orders: dict[str, _Orders] = {}
        """Of each of them."""
        self._counted: dict[str, dict[str, float]] = {}
        self._count_at = 0.0
        threading.Thread(target=self._run, name="kv planes", daemon=True).start()

    def launch(self, plane: str, turn: int) -> None:
        """Have a transfer launched whose turn it is, and wait until it is or will never be; of another thread."""
        if (found := self._planes.get(plane)) is None:
            return
        launched = threading.Event()
        found.launch(turn, launched.set)
        while not launched.wait(COUNT_S) and plane in self._planes:
            pass

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except Exception:  # the thread's top: the core would wait for its answers for ever
            _log.exception("no K/V is passed any more")
            os._exit(1)

    def _turn(self) -> None:
        bells = [self._asked.fileno(), *(plane.bell for plane in self._planes.values())]
        select.select(bells, [], [], STEP_LOOK_S if any(self._orders.values()) else COUNT_S)
        while (parts := self._asked.receive(0)) is not None:
            asked = _asked.decode(parts[0])
            if isinstance(asked.command, _Question):
                self._say(self._answer(asked.plane, asked.command))
            elif asked.plane in self._planes:
                self._order(asked.plane, asked.command, parts[1:])
        for name in list(self._planes):
            self._obey(name)
            self._tell(name)
        self._count()

    def _answer(self, name: str, command: _Question) -> _Answer:
        """Do what somebody waits for."""
        if isinstance(command, _Open):
            try:
                self._planes[name], self._orders[name] = self._device.open(command.opening), _Orders()
            except NoPlane as error:
                return _Answer(refused=str(error))
            return _Answer()
        if (plane := self._planes.get(name)) is None:  # it has failed, as was told
            return _Answer()
        match command:
            case _Invite(peer, terms):
                return _Answer(plane.invite(peer, terms))
            case _Disconnect(peer, end):
                self._obey(name)
                # A landing is none of a link, and `forget` ends it.
                void = _Send if end == "source" else _Connect
                self._orders[name].drop(lambda order: isinstance(order, void) and order.peer == peer)
                plane.disconnect(peer, end)
                self._tell(name)  # what was told before comes before the answer
            case _Close():
                plane.close()
                self._remove(name)
        return _Answer()

    def _order(self, name: str, command: _Order, held: Sequence[memoryview]) -> None:
        """Take in what nobody waits for, or do it."""
        match command:
            case _Forget(transfer_id):
                self._obey(name)
                self._orders[name].drop(lambda one: isinstance(one, _Land) and one.transfer_id == transfer_id)
                self._planes[name].forget(transfer_id)
            case _Withdraw(transfer_id):
                self._obey(name)
                self._orders[name].drop(lambda one: isinstance(one, _Send) and one.transfer_id == transfer_id)
                self._planes[name].withdraw(transfer_id)
            case _:
                self._orders[name].add(command, memoryview(bytearray(held[0])) if held else None)

    def _obey(self, name: str) -> None:
        """Do what waits for no step any more."""
        for order, held in self._orders[name].take(self._num_finished()):
            self._obey_one(self._planes[name], order, held)

    def _obey_one(self, plane: DevicePlane, order: _PeerOrder, held: memoryview | None) -> None:
        match order:
            case _Connect(peer, host, invitation, terms):
                plane.connect(peer, host, invitation, terms)
            case _Send(peer, transfer_id, epoch, seq, first_block, blocks):
                plane.send(peer, Frame(transfer_id, epoch, seq, first_block, blocks, held))
            case _Land(peer, transfer_id, epoch, first_block, blocks):
                plane.land(peer, Landing(transfer_id, epoch, first_block, blocks))
            case _Hear(peer, data):
                plane.hear(peer, data)

    def _remove(self, name: str) -> None:
        del self._planes[name], self._orders[name]

    def _tell(self, name: str) -> None:
        """Pass on what a plane tells."""
        try:
            events = self._planes[name].events()
        except TransfersDead:  # the log says why
            self._remove(name)
            self._say(_Failed(name))
            return
        if events:
            self._say(_Events(name, [(_KINDS.index(type(event)), *astuple(event)) for event in events]))

    def _count(self) -> None:
        if (now := time.monotonic()) < self._count_at:
            return
        self._count_at = now + COUNT_S
        for name, plane in self._planes.items():
            if (counters := plane.counters()) != self._counted.get(name):
                self._counted[name] = counters
                self._say(_Counted(name, counters))

    def _say(self, message: _Answer | _Events | _Counted | _Failed) -> None:
        self._answers.send([_encode(message)], _wait_on)


def _wait_on() -> None:
    """An executor that is gone ends this process by itself."""


class AskedDevice:
    """Implements `PlaneDevice` for a rank's, at the core's end of the rings. Used by one thread at a time.

    Args:
        fence: tells which steps are to be over.
        is_over: whether the rank is gone: then nothing is done, and the engine ends by itself.
    """

    def __init__(self, handles: RingPair, fence: StepFence, is_over: Callable[[], bool]) -> None:
        own = duplicated(handles)  # who made the others closes them as soon as the ranks are over
        weakref.finalize(self, close_all, own.fds)
        self._asking = RingWriter(own.there)
        self._answers = RingReader(own.back)
        self._is_over = is_over
        self._planes: dict[str, AskedPlane] = {}
        self.fence = fence

    @property
    def bell(self) -> int:
        """Readable while there is something to take in."""
        return self._answers.fileno()

    def open(self, opening: PlaneOpening) -> AskedPlane:
        """See PlaneDevice."""
        if (answer := self.wait(opening.name, _Open(opening))).refused is not None:
            raise NoPlane(answer.refused)
        plane = self._planes[opening.name] = AskedPlane(opening.name, self)
        return plane

    def ask(self, plane: str, command: _Question | _Order, held: Sequence[Buffer] = ()) -> None:
        """Have the rank do something."""
        try:
            self._asking.send([_encode(_Asked(plane, command)), *held], self._raise_over)
        except OSError:
            assert self._is_over()

    def wait(self, plane: str, command: _Question) -> _Answer:
        """Have the rank do something, and wait until it has."""
        self.ask(plane, command)
        while not self._is_over():
            if (answer := self.take_in(LOOK_S)) is not None:
                return answer
        return _Answer(refused="the engine's ranks are gone")

    def take_in(self, timeout_s: float = 0.0) -> _Answer | None:
        """Give planes what the rank tells of them, up to an answer."""
        while not self._is_over() and (parts := self._answers.receive(timeout_s)) is not None:
            match _told.decode(parts[0]):
                case _Answer() as answer:
                    return answer
                case _Events(name, events):
                    self._planes[name].told.extend(_KINDS[kind](*fields) for kind, *fields in events)
                case _Counted(name, counters):
                    self._planes[name].counted = counters
                case _Failed(name):
                    self._planes[name].has_failed = True
        return None

    def _raise_over(self) -> None:
        if self._is_over():
            raise OSError("the engine's ranks are gone")


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
        return self._device.wait(self._name, _Invite(peer, terms)).data

    def connect(self, peer: str, host: str, invitation: bytes, terms: LaneTerms) -> None:
        """See RankPlane."""
        self._ask(_Connect(peer, host, invitation, terms))

    def disconnect(self, peer: str, end: End) -> None:
        """See RankPlane."""
        self._device.wait(self._name, _Disconnect(peer, end))

    def send(self, peer: str, frame: Frame) -> None:
        """See RankPlane."""
        place = (frame.transfer_id, frame.epoch, frame.seq, frame.first_block)
        command = _Send(peer, *place, [*frame.blocks], self._device.fence.steps_to_read)
        self._device.ask(self._name, command, () if frame.held is None else (frame.held,))

    def withdraw(self, transfer_id: bytes) -> None:
        """See RankPlane."""
        self._ask(_Withdraw(transfer_id))

    def land(self, peer: str, landing: Landing) -> None:
        """See RankPlane."""
        place = (landing.transfer_id, landing.epoch, landing.first_block)
        self._ask(_Land(peer, *place, [*landing.blocks], self._device.fence.steps_to_write))

    def forget(self, transfer_id: bytes) -> None:
        """See RankPlane."""
        self._ask(_Forget(transfer_id))

    def hear(self, peer: str, data: bytes) -> None:
        """See RankPlane."""
        self._ask(_Hear(peer, data))

    def events(self) -> Sequence[PlaneEvent]:
        """See RankPlane."""
        self._device.take_in()
        if self.has_failed:
            raise TransfersDead("the thread that passes a rank's K/V has ended")
        return [self.told.popleft() for _ in range(len(self.told))]

    def counters(self) -> dict[str, float]:
        """See RankPlane."""
        return self.counted

    def close(self) -> None:
        """See RankPlane."""
        self._device.wait(self._name, _Close())

    def _ask(self, command: _Order) -> None:
        self._device.ask(self._name, command)
