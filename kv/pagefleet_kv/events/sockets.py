"""The two ports of an engine's KV events, bound to one address, and who may connect.

With a fleet key both speak CURVE, and only routers that have the same key get in. Without one they are plain, which the
configuration allows on loopback alone. Peers can neither send more than a few kilobytes at once nor stay when silent.
"""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass

import zmq
from pagefleet_protocol.kv_events import TOPIC, Dump, KvEventError, Replay, decode_request

from pagefleet_kv.config import KvEventsConfig
from pagefleet_kv.curve import FAILED_HANDSHAKES, CurveGate, SocketLimits, bind, count_events, load_fleet_key, received
from pagefleet_kv.errors import cannot_listen
from pagefleet_kv.events.history import History

MAX_REQUEST_BYTES = 4096
BATCHES_PER_SUBSCRIBER = 1000
"""Under way to one router; what a slower one misses it asks for."""
MESSAGES_PER_PEER = 64
"""Of an answer, under way to one router; the rest waits here."""
HEARTBEAT_MS = 10_000
SILENCE_MS = 30_000
READ_MOST = 32
"""Messages of one kind in one turn."""


class EventSockets:
    """All sockets of the publisher's thread.

    Raises:
        KVConfigError: the fleet key cannot be read, or a port cannot be used.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self._context = zmq.Context()
        try:
            key = load_fleet_key(config.fleet_key_file) if config.fleet_key_file else None
            self._gate = None if key is None else CurveGate(self._context, key, "router")
            self.publish = self._open(zmq.XPUB, BATCHES_PER_SUBSCRIBER)
            self.publish.setsockopt(zmq.XPUB_MANUAL, 1)  # so that every byte that comes in is seen
            self.answers = self._open(zmq.ROUTER, MESSAGES_PER_PEER)
            self.answers.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that an answer is cut nowhere unseen
            self._monitors = [
                self.publish.get_monitor_socket(FAILED_HANDSHAKES),
                self.answers.get_monitor_socket(FAILED_HANDSHAKES),
            ]
            _bind(self.publish, config.host, config.port)
            _bind(self.answers, config.host, config.port + 1)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def inbound(self) -> list[zmq.Socket[bytes]]:
        """Those on which something can arrive."""
        gate = [] if self._gate is None else [self._gate.socket]
        return [self.publish, self.answers, *self._monitors, *gate]

    def let_in(self) -> int:
        """Answer who asks to connect; return how many failed to since the last call."""
        if self._gate is not None:
            self._gate.judge()
        return sum(count_events(monitor) for monitor in self._monitors)

    def take_subscriptions(self) -> int:
        """Let routers subscribe; return how many messages were something else."""
        num_dropped = 0
        for data, *more in received(self.publish, READ_MOST):
            topic = data[1:]
            if not more and data[:1] in (b"\x00", b"\x01") and TOPIC.startswith(topic):
                self.publish.setsockopt(zmq.SUBSCRIBE if data[0] else zmq.UNSUBSCRIBE, topic)
            else:
                num_dropped += 1
        return num_dropped

    def take_requests(self) -> list[list[bytes]]:
        """Return the next messages on the answering port, the sender's identity first."""
        return list(received(self.answers, READ_MOST))

    def close(self) -> None:
        for watched in (self.publish, self.answers):
            watched.disable_monitor()
        self._context.destroy(linger=0)

    def _open(self, kind: int, num_outgoing: int) -> zmq.Socket[bytes]:
        limits = SocketLimits(num_outgoing, READ_MOST, MAX_REQUEST_BYTES, HEARTBEAT_MS, SILENCE_MS)
        opened = limits.open(self._context, kind)
        if self._gate is not None:
            self._gate.guard(opened)
        return opened


def _bind(bound: zmq.Socket[bytes], host: str, port: int) -> None:
    try:
        bind(bound, host, port)
    except OSError as error:
        raise cannot_listen(
            error,
            f"cannot publish KV events on {host} port {port} ({error.strerror}): "
            "give another kv_events_port or kv_events_host",
        ) from error


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
    """Answers to those who missed batches, as fast as they read, one question a peer at a time.

    Args:
        socket: takes (identity, message), and refuses at once what it cannot send now.
    """

    def __init__(self, history: History, socket: zmq.Socket[bytes]) -> None:
        self._history = history
        self._socket = socket
        self._sending: dict[bytes, _Answer] = {}
        self._want_dump: dict[bytes, bool] = {}
        """Peers, and whether each wants every group."""
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
            case Dump(every_group):
                self._want_dump[peer] = every_group
            case Replay(first, last) if 1 <= first <= last:
                self._sending[peer] = _Answer(deque(self._history.replay(request)), now + PATIENCE_S)
            case _:
                return False
        return True

    def send(self, now: float) -> None:
        """Send what the peers take now."""
        if self._want_dump and now >= self._dumped_at + DUMP_INTERVAL_S:
            self._dumped_at = now
            dumps = {every_group: self._history.dump(every_group) for every_group in set(self._want_dump.values())}
            for peer, every_group in self._want_dump.items():
                self._sending[peer] = _Answer(deque(dumps[every_group]), now + PATIENCE_S)
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
