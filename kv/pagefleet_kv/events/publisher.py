"""The publisher: a thread that tells routers what the engine core's prefix cache gains and loses.

The core's loop notes changes in a dictionary and rings a bell after a turn with some. All else happens on the thread,
which owns the sockets: nothing that arrives there, and nobody who reads slowly, can hold up the loop. Changes of short
steps are told together, since each batch takes the interpreter from the loop for a tenth of a millisecond.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from types import TracebackType
from typing import Self

import zmq
from pagefleet_protocol.kv_events import TOPIC

from pagefleet_kv.config import KvEventsConfig
from pagefleet_kv.events.answers import Answers
from pagefleet_kv.events.changes import CacheChanges
from pagefleet_kv.events.history import History
from pagefleet_kv.events.sockets import EventSockets

HEARTBEAT_S = 1.0
"""So a router can tell silence from a lost subscription, and learns soon that it missed the last batch."""
BATCH_INTERVAL_S = 0.005
"""Between two batches."""
LISTEN_INTERVAL_S = 0.01
"""Between two looks at what arrives: a flood must not take the interpreter from the engine's loop."""
CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class KvEventPublisher:
    """Publishes from construction until the end of its `with` block.

    Args:
        config: where.
        incarnation: of this engine.
        heartbeat_s: after so long without news an empty batch tells that it lives.

    Raises:
        KVConfigError: the ports cannot be used, or the fleet key cannot be read.

    Attributes:
        num_published: batches so far.
        num_dropped: messages and connections that were nothing for us.
    """

    def __init__(self, config: KvEventsConfig, incarnation: str, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.num_published = 0
        self.num_dropped = 0
        self._heartbeat_s = heartbeat_s
        self._changes = CacheChanges()
        self._history = History(incarnation)
        self._sockets = EventSockets(config)
        self._answers = Answers(self._history, self._sockets.answers)
        self._bell, self._ears = socket.socketpair()
        self._bell.setblocking(False)
        self._ears.setblocking(False)
        self._closing = False
        self._rung = False
        """The bell has been rung for changes that the thread has not taken yet."""
        self._news = False
        """The thread has heard it."""
        self._told_at = float("-inf")
        self._listen_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    @property
    def cache_events(self) -> CacheChanges:
        """What the KV cache tells its changes to; they are published after the next `flush`."""
        return self._changes

    def flush(self) -> None:
        """Have the changes so far published; returns at once."""
        if self._changes.pending and not self._rung:
            self._rung = True
            self._ring()

    def close(self) -> None:
        """Close the ports."""
        self._closing = True
        self._ring()
        self._thread.join(CLOSE_S)
        self._bell.close()
        self._ears.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._bell.send(b"\x00")

    def _run(self) -> None:
        bell = zmq.Poller()
        bell.register(self._ears, zmq.POLLIN)
        everything = zmq.Poller()
        for watched in (self._ears, *self._sockets.inbound):
            everything.register(watched, zmq.POLLIN)
        try:
            while not self._closing:
                now = time.monotonic()
                ready = (everything if now >= self._listen_at else bell).poll(self._wait_ms(now))
                self._turn(any(isinstance(readable, zmq.Socket) for readable, _ in ready))
        except Exception:  # the thread's top: the engine serves on, and routers see that its events end
            _log.exception("KV events are not published any more")
        finally:
            self._sockets.close()

    def _wait_ms(self, now: float) -> int:
        until_batch = self._told_at + (BATCH_INTERVAL_S if self._news else self._heartbeat_s) - now
        until_listening = self._listen_at - now if now < self._listen_at else float("inf")
        wait_s = min(until_batch, until_listening, self._answers.wait_s(now))
        return max(0, int(wait_s * 1000) + 1) if wait_s > 0 else 0

    def _turn(self, something_came: bool) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ears.recv(4096)
            self._news = True
        now = time.monotonic()
        # Before a question is read: its answer holds all that was noted before it was asked.
        if something_came or now >= self._told_at + (BATCH_INTERVAL_S if self._news else self._heartbeat_s):
            self._publish(now)
        if something_came:
            self._listen_at = now + LISTEN_INTERVAL_S
            self._listen(now)
        self._answers.send(now)

    def _publish(self, now: float) -> None:
        """Tell what there is to tell; if nothing, and for long, that."""
        self._rung = self._news = False  # before the changes are taken: for later ones it rings again
        changes = self._changes.take()
        if changes is not None:
            batches = self._history.tell(changes.cleared, changes.removed, changes.stored)
        elif now >= self._told_at + self._heartbeat_s:
            batches = self._history.tell(cleared=False, removed=(), stored=())
        else:
            return
        self._told_at = now
        for batch in batches:
            self._sockets.publish.send_multipart([TOPIC, batch])
        self.num_published += len(batches)

    def _listen(self, now: float) -> None:
        num_dropped = self._sockets.let_in() + self._sockets.take_subscriptions()
        num_dropped += sum(not self._answers.ask(frames, now) for frames in self._sockets.take_requests())
        self.num_dropped += num_dropped
