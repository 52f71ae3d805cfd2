"""The thread that passes K/V between engines: it drives both ends of the protocol and owns all that they act through.

The engine's loop leaves calls in a queue and takes what ended from another; a bell stands at each. Everything else
happens here: control messages, the events of data planes, timers, and the actions that the state machines ask for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import zmq
from pagefleet_protocol.kv_control import KvControlError, PlaneName, decode

from pagefleet_kv.p2p.control_plane import Received
from pagefleet_kv.p2p.data_plane import PlaneEvent, Tell
from pagefleet_kv.p2p.driver import Action, Driver, DriverParts
from pagefleet_kv.p2p.thread import CommandThread
from pagefleet_kv.p2p.transfer.actions import LegSettled, SourceAction, TargetAction, Unpin
from pagefleet_kv.p2p.transfer.source import Source
from pagefleet_kv.p2p.transfer.target import Target
from pagefleet_kv.port import LoadDone, TransfersDone

TICK_S = 0.1
COPY_LOOK_S = 0.002
"""Between two looks at a copy to host memory that still runs."""
LISTEN_INTERVAL_S = 0.001
"""Between two looks at the control sockets: a flood must not take the interpreter from the engine's loop."""
DRAIN_S = 1.0
"""At the end, for frames under way."""
MOST_AWAY_S = 1.0
"""Between two readings of a clock, as far as they count."""

_log = logging.getLogger(__name__)


class TurnClock:
    """The time that a thread had turns for, in seconds; it reads this far more often than each `MOST_AWAY_S`.

    A process that was stopped, or whose machine was, has heard from nobody meanwhile: its peers are not dead for that.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at = clock()
        self._away = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._away += max(0.0, now - self._read_at - MOST_AWAY_S)
        self._read_at = now
        return now - self._away


class TransferAgent:
    """Runs from construction until `close`."""

    def __init__(self, parts: DriverParts) -> None:
        self._parts = parts
        self._clock = TurnClock()
        self._num_lacking = 0
        """Blocks that the pool lacks, as was told last."""
        self._thread = CommandThread[LoadDone | Unpin | LegSettled]("kv agent", self._turn, self._end)
        self._driver = Driver(parts, self._thread.tell)
        self._gauges: dict[str, float] = {}
        """Replaced, never changed: read by another thread."""
        self._measure()
        self._tick_at = 0.0
        self._listen_at = 0.0
        self._poller = zmq.Poller()
        self._polled: list[object] = []
        self._thread.start()

    @property
    def bell(self) -> int:
        """Readable while `finished` has something to tell."""
        return self._thread.bell

    def at_source(self, call: Callable[[Source, float], Sequence[SourceAction]]) -> None:
        """Have something told to the prefill side; returns at once."""
        self._thread.do(lambda: self._driver.carry_out(call(self._parts.source, self._clock())))

    def at_target(self, call: Callable[[Target, float], Sequence[TargetAction]]) -> None:
        """Have something told to the decode side; returns at once."""
        self._thread.do(lambda: self._driver.carry_out(call(self._parts.target, self._clock())))

    def ring(self) -> None:
        """Make the bell readable, for news that the connector has itself."""
        self._thread.alert()

    def relieve(self, num_blocks: int) -> None:
        """The pool lacks so many blocks now; looked at with the next tick, when what was freed before is known."""
        self._num_lacking = num_blocks

    def finished(self) -> tuple[TransfersDone, list[LegSettled]]:
        """Return what has ended since the last call, and the prefill legs whose transfers are over.

        Raises:
            TransfersDead: the thread has ended by a mistake of ours, so nothing would ever end.
        """
        ended = self._thread.events()
        loads = [one for one in ended if isinstance(one, LoadDone)]
        saves = [one.save for one in ended if isinstance(one, Unpin)]
        return TransfersDone(loads, saves), [one for one in ended if isinstance(one, LegSettled)]

    def gauges(self) -> dict[str, float]:
        """Return what is now, a moment old at most."""
        return self._gauges

    def close(self) -> None:
        """End all transfers and threads; nothing touches the pages afterwards."""
        self._thread.close()

    # --- the thread

    def _end(self) -> None:
        parts = self._parts
        try:
            if not self._thread.crashed:
                self._drain()
        finally:
            for plane in parts.planes.values():
                plane.close()
            parts.control.close()
            parts.peers.close()

    def _drain(self) -> None:
        """Let peers know, and give frames under way a moment to end."""
        now = self._clock()
        self._driver.carry_out([*self._parts.source.close(), *self._parts.target.close(now)])
        while self._parts.source.num_transfers and self._clock() < now + DRAIN_S:
            self._turn()

    def _turn(self) -> None:
        now = self._clock()
        listens = now >= self._listen_at
        self._poll(self._wait_s(now), listens)
        now = self._clock()
        # Landings and the like are in place before what other threads and peers have to say is looked at.
        self._thread.obey()
        if listens:
            self._listen(now)
        for name, plane in self._parts.planes.items():
            for event in plane.events():
                self._driver.carry_out(self._on_event(name, event, now))
        self._driver.carry_out(self._driver.end_copies(now))
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._driver.carry_out([*self._parts.source.tick(now), *self._parts.target.tick(now)])
            self._driver.carry_out(self._parts.target.keep_peers(self._parts.peers.allows, now))
            self._relieve()
            self._measure()
        self._thread.ring()

    def _wait_s(self, now: float) -> float:
        wait = self._tick_at - now
        if now < self._listen_at:
            wait = min(wait, self._listen_at - now)
        if self._driver.num_copies:
            wait = min(wait, COPY_LOOK_S)
        return max(0.0, wait)

    def _poll(self, wait_s: float, listens: bool) -> None:
        """Wait for a bell or, unless it was just listened to, for a control socket."""
        wanted: list[object] = [self._thread.wake.fileno(), *(plane.bell for plane in self._parts.planes.values())]
        if listens:
            wanted += self._parts.control.inbound
        if wanted != self._polled:
            self._polled = wanted
            self._poller = zmq.Poller()
            for one in wanted:
                self._poller.register(one, zmq.POLLIN)
        self._poller.poll(int(wait_s * 1000) + (wait_s > 0))

    def _listen(self, now: float) -> None:
        received = self._parts.control.receive()
        if received:
            self._listen_at = now + LISTEN_INTERVAL_S
        for message in received:
            self._driver.carry_out(self._on_message(message, now))

    def _on_message(self, received: Received, now: float) -> Sequence[Action]:
        parts = self._parts
        try:
            message = decode(received.data, parts.compatibility)
        except KvControlError as error:
            _log.debug("refused a control message from %s: %s", received.peer, error)
            if received.is_answer:
                return parts.target.refused(received.peer, error, now)
            return parts.source.refused(received.peer, error)
        if received.is_answer:
            return parts.target.message(received.peer, message, now)
        return parts.source.message(received.peer, message, now)

    def _on_event(self, plane: PlaneName, event: PlaneEvent, now: float) -> Sequence[Action]:
        source, target = self._parts.source, self._parts.target
        if isinstance(event, Tell):
            return [*source.tell(plane, event), *target.tell(plane, event)]
        return [*source.plane_event(event, now), *target.plane_event(event, now)]

    def _relieve(self) -> None:
        """Pass on what the engine's loop said last; it says it again while it holds."""
        lacking, self._num_lacking = self._num_lacking, 0
        if lacking:
            self._driver.carry_out(self._parts.source.relieve(lacking))

    def _measure(self) -> None:
        parts = self._parts
        gauges = {f'peers{{state="{state}"}}': float(count) for state, count in parts.target.peers().items()}
        gauges["pinned_blocks"] = float(parts.source.num_pinned_blocks)
        gauges["spilled_blocks"] = float(parts.source.num_spilled_blocks)
        self._gauges = gauges
