"""The rank's end of what a core asks of planes: a thread that opens them on the device, and does what they are asked.

A plane reads blocks, or may write to them, once the rank is done with the steps that `StepFence` names: its own are all
that touch its pool. What concerns a peer stays in order, and nothing else waits for that. Only turns to launch
transfers come among the rank's steps, so that all ranks have one order (`messages.Carry`).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pagefleet_kv.bell import wait_for_any
from pagefleet_kv.errors import TransfersDead
from pagefleet_kv.p2p.data_plane import Frame, Landing
from pagefleet_kv.p2p.planes.device.opening import NoPlane
from pagefleet_kv.p2p.planes.device.plane import DevicePlane
from pagefleet_kv.p2p.planes.local_device import LocalDevice

from pagefleet_engine.executor.plane_words import (
    Answer,
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
    PeerOrder,
    Question,
    Send,
    Told,
    Withdraw,
    decode_asked,
    encode,
)
from pagefleet_engine.executor.rank_pages import LOOK_S as STEP_LOOK_S
from pagefleet_engine.executor.ring import RingPair, RingReader, RingWriter

COUNT_S = 0.25
"""Between two accounts of what a plane counts."""

_log = logging.getLogger(__name__)


class _Orders:
    """What one plane is still to do, in order for each peer, each with what follows it in the ring."""

    def __init__(self) -> None:
        self._by_peer: dict[str, deque[tuple[PeerOrder, memoryview | None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_peer)

    def add(self, order: PeerOrder, held: memoryview | None) -> None:
        """Behind what is to be done for the same peer."""
        self._by_peer.setdefault(order.peer, deque()).append((order, held))

    def take(self, num_finished: int) -> Iterator[tuple[PeerOrder, memoryview | None]]:
        """Return what waits for no step, where the rank is done with so many."""
        for peer, orders in list(self._by_peer.items()):
            while orders and (not isinstance(orders[0][0], Send | Land) or orders[0][0].after <= num_finished):
                yield orders.popleft()
            if not orders:
                del self._by_peer[peer]

    def drop(self, is_void: Callable[[PeerOrder], bool]) -> None:
        """Do none of these."""
        kept = {peer: deque(one for one in orders if not is_void(one[0])) for peer, orders in self._by_peer.items()}
        self._by_peer = {peer: orders for peer, orders in kept.items() if orders}


class PlaneServer:
    """The rank's end: passes on what is asked and told.

    Args:
        device: of this rank.
        num_finished: returns how many steps the rank is done with.
    """

    def __init__(self, device: LocalDevice, handles: RingPair, num_finished: Callable[[], int]) -> None:
        self._device = device
        self._num_finished = num_finished
        self._asked = RingReader(handles.there)
        self._answers = RingWriter(handles.back)
        self._bells = select.poll()
        self._bells.register(self._asked.fileno(), select.POLLIN)
        self._planes: dict[str, DevicePlane] = {}
        self._orders: dict[str, _Orders] = {}
        """Of each of them."""
        self._counted: dict[str, dict[str, float]] = {}
        self._count_at = 0.0

    def launch(self, plane: str, turn: int) -> LaunchingTransfer:
        """Have a transfer launched whose turn it is; of another thread."""
        launching = LaunchingTransfer(lambda: plane in self._planes)
        if (found := self._planes.get(plane)) is not None:
            found.launch(turn, launching.end)
        return launching

    def run(self) -> None:
        """Serve for ever; a fault ends this process."""
        try:
            while True:
                self.turn()
        except Exception:  # the thread's top: the core would wait for its answers for ever
            _log.exception("no K/V is passed any more")
            os._exit(1)

    def turn(self) -> None:
        """Wait for something to do, though not for long, and do all that there is."""
        wait_for_any(self._bells, STEP_LOOK_S if any(self._orders.values()) else COUNT_S)
        while (parts := self._asked.receive(0)) is not None:
            asked = decode_asked(parts[0])
            if isinstance(asked.command, Question):
                self._say(self._answer(asked.plane, asked.command))
            elif asked.plane in self._planes:
                self._order(asked.plane, asked.command, parts[1:])
        for name in list(self._planes):
            self._obey(name)
            self._tell(name)
        self._count()

    def _answer(self, name: str, command: Question) -> Answer:
        """Do what somebody waits for."""
        if isinstance(command, Open):
            return self._open(name, command)
        if (plane := self._planes.get(name)) is None:  # it has failed, as was told
            return Answer()
        match command:
            case Invite(peer, terms):
                return Answer(plane.invite(peer, terms))
            case Disconnect(peer, end):
                self._obey(name)
                # A landing is none of a link, and `forget` ends it.
                void = Send if end == "source" else Connect
                self._orders[name].drop(lambda order: isinstance(order, void) and order.peer == peer)
                plane.disconnect(peer, end)
                self._tell(name)  # what was told before comes before the answer
            case Close():
                self._remove(name)
                plane.close()
        return Answer()

    def _open(self, name: str, command: Open) -> Answer:
        try:
            plane = self._device.open(command.opening)
        except NoPlane as error:
            return Answer(refused=str(error))
        self._planes[name], self._orders[name] = plane, _Orders()
        self._bells.register(plane.bell, select.POLLIN)
        return Answer()

    def _order(self, name: str, command: Order, held: Sequence[memoryview]) -> None:
        """Take in what nobody waits for, or do it."""
        match command:
            case Forget(transfer_id):
                self._obey(name)
                self._orders[name].drop(lambda one: isinstance(one, Land) and one.transfer_id == transfer_id)
                self._planes[name].forget(transfer_id)
            case Withdraw(transfer_id):
                self._obey(name)
                self._orders[name].drop(lambda one: isinstance(one, Send) and one.transfer_id == transfer_id)
                self._planes[name].withdraw(transfer_id)
            case _:
                self._orders[name].add(command, memoryview(bytearray(held[0])) if held else None)

    def _obey(self, name: str) -> None:
        """Do what waits for no step any more."""
        for order, held in self._orders[name].take(self._num_finished()):
            self._obey_one(self._planes[name], order, held)

    def _obey_one(self, plane: DevicePlane, order: PeerOrder, held: memoryview | None) -> None:
        match order:
            case Connect(peer, host, invitation, terms):
                plane.connect(peer, host, invitation, terms)
            case Send(peer, transfer_id, epoch, seq, first_block, blocks):
                plane.send(peer, Frame(transfer_id, epoch, seq, first_block, blocks, held))
            case Land(peer, transfer_id, epoch, first_block, blocks):
                plane.land(peer, Landing(transfer_id, epoch, first_block, blocks))
            case Hear(peer, data):
                plane.hear(peer, data)

    def _remove(self, name: str) -> None:
        self._bells.unregister(self._planes[name].bell)
        del self._planes[name], self._orders[name]

    def _tell(self, name: str) -> None:
        """Pass on what a plane tells."""
        try:
            events = self._planes[name].events()
        except TransfersDead:  # the log says why
            self._remove(name)
            self._say(Failed(name))
            return
        if events:
            self._say(Events.of(name, events))

    def _count(self) -> None:
        if (now := time.monotonic()) < self._count_at:
            return
        self._count_at = now + COUNT_S
        for name, plane in self._planes.items():
            if (counters := plane.counters()) != self._counted.get(name):
                self._counted[name] = counters
                self._say(Counted(name, counters))

    def _say(self, message: Told) -> None:
        self._answers.send([encode(message)], _wait_on)


class LaunchingTransfer:
    """Implements `Launching`; `is_passed`: whether there is still a plane that it is of."""

    def __init__(self, is_passed: Callable[[], bool]) -> None:
        self._is_passed = is_passed
        self._has_ended = threading.Event()

    @property
    def is_over(self) -> bool:
        """See Launching."""
        return self._has_ended.is_set() or not self._is_passed()

    def wait(self) -> None:
        """See Launching."""
        while not self._has_ended.wait(COUNT_S) and self._is_passed():
            pass

    def end(self) -> None:
        """Say that it is over."""
        self._has_ended.set()


def _wait_on() -> None:
    """An executor that is gone ends this process by itself."""
