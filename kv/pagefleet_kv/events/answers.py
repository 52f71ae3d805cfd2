"""Answers those who missed batches, as fast as they read, one question a peer at a time."""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass

import zmq
from pagefleet_protocol.kv_events import Dump, KvEventError, Replay, decode_request

from pagefleet_kv.events.history import History

MOST_PEERS = 64
DUMP_INTERVAL_S = 0.25
"""Between two dumps, which all who wait for one share: its making takes the interpreter from the engine's loop."""
RETRY_S = 0.01
PATIENCE_S = 30.0


@dataclass(slots=True)
class _Answer:
    messages: deque[bytes]
    until: float


class Answers:
    """The answers under way on a ROUTER socket.

    Args:
        history: what there is to answer.
        socket: takes (identity, message), and refuses at once what it cannot send now.
    """

    def __init__(self, history: History, socket: zmq.Socket[bytes]) -> None:
        self._history = history
        self._socket = socket
        self._sending: dict[bytes, _Answer] = {}
        self._want_dump: set[bytes] = set()
        self._dumped_at = float("-inf")

    def ask(self, frames: list[bytes], now: float) -> bool:
        """Take a request; False: it is none, or the peer or all together have asked too much already."""
        if len(frames) != 2:
            return False
        peer, data = frames
        if peer in self._sending or peer in self._want_dump:
            return False
        if len(self._sending) + len(self._want_dump) >= MOST_PEERS:
            return False
        try:
            request = decode_request(data)
        except KvEventError:
            return False
        match request:
            case Dump():
                self._want_dump.add(peer)
            case Replay(first, last) if 1 <= first <= last:
                self._sending[peer] = _Answer(deque(self._history.replay(request)), now + PATIENCE_S)
            case _:
                return False
        return True

    def send(self, now: float) -> None:
        """Send what the peers take now."""
        if self._want_dump and now >= self._dumped_at + DUMP_INTERVAL_S:
            self._dumped_at = now
            messages = self._history.dump()
            self._sending.update({peer: _Answer(deque(messages), now + PATIENCE_S) for peer in self._want_dump})
            self._want_dump.clear()
        for peer, answer in list(self._sending.items()):
            if not self._send(peer, answer) or now > answer.until:
                del self._sending[peer]

    def wait_s(self, now: float) -> float:
        """Seconds until `send` should be called again; infinite where nobody waits."""
        if self._sending:
            return RETRY_S
        return max(0.0, self._dumped_at + DUMP_INTERVAL_S - now) if self._want_dump else float("inf")

    def _send(self, peer: bytes, answer: _Answer) -> bool:
        """Return whether there is more to send later."""
        while answer.messages:
            try:
                self._socket.send_multipart([peer, answer.messages[0]], zmq.NOBLOCK)
            except zmq.Again:
                return True
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                return False  # it has left
            answer.messages.popleft()
        return False
