"""The two ports of an engine's KV events, bound to one address, and who may connect.

With a fleet key both speak CURVE, and only routers that have the same key get in. Without one they are plain, which the
configuration allows on loopback alone. Peers can neither send more than a few kilobytes at once nor stay when silent.
"""

from __future__ import annotations

import hmac
import socket
from pathlib import Path

import zmq
from pagefleet_protocol.fleet_key import FleetKeyError, read_fleet_key
from pagefleet_protocol.kv_events import TOPIC
from zmq.utils import z85

from pagefleet_engine.config import KvEventsConfig
from pagefleet_engine.errors import ConfigError

MAX_REQUEST_BYTES = 4096
BATCHES_PER_SUBSCRIBER = 1000
"""Under way to one router; what a slower one misses it asks for."""
MESSAGES_PER_PEER = 64
"""Of an answer, under way to one router; the rest waits here."""
HANDSHAKE_MS = 5_000
HEARTBEAT_MS = 10_000
SILENCE_MS = 30_000
READ_MOST = 32
"""Messages of one kind in one turn."""
COUNT_MOST = 1000
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class EventSockets:
    """All sockets of the publisher's thread.

    Raises:
        ConfigError: the fleet key cannot be read, or a port cannot be used.

    Attributes:
        publish: sends batches.
        answers: receives requests and sends their answers.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self._context = zmq.Context()
        try:
            self._gate = _Gate(self._context, Path(config.fleet_key_file)) if config.fleet_key_file else None
            self.publish = self._open(zmq.XPUB, BATCHES_PER_SUBSCRIBER)
            self.publish.setsockopt(zmq.XPUB_MANUAL, 1)  # so that every byte that comes in is seen
            self.answers = self._open(zmq.ROUTER, MESSAGES_PER_PEER)
            self.answers.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that an answer is cut nowhere unseen
            self._monitors = [
                self.publish.get_monitor_socket(_FAILED_HANDSHAKES),
                self.answers.get_monitor_socket(_FAILED_HANDSHAKES),
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
        return sum(_count(monitor) for monitor in self._monitors)

    def take_subscriptions(self) -> int:
        """Let routers subscribe; return how many messages were something else."""
        num_dropped = 0
        for _ in range(READ_MOST):
            try:
                data = self.publish.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            topic = data[1:]
            if data[:1] in (b"\x00", b"\x01") and TOPIC.startswith(topic):
                self.publish.setsockopt(zmq.SUBSCRIBE if data[0] else zmq.UNSUBSCRIBE, topic)
            else:
                num_dropped += 1
        return num_dropped

    def take_requests(self) -> list[list[bytes]]:
        """Return the next messages on the answering port, the sender's identity first."""
        messages: list[list[bytes]] = []
        while len(messages) < READ_MOST:
            try:
                messages.append(self.answers.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        return messages

    def close(self) -> None:
        """Close all, without waiting for anybody."""
        for watched in (self.publish, self.answers):
            watched.disable_monitor()
        self._context.destroy(linger=0)

    def _open(self, kind: int, num_outgoing: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.IPV6, 1)
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.SNDHWM, num_outgoing)
        opened.setsockopt(zmq.RCVHWM, READ_MOST)
        opened.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        opened.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        opened.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        if self._gate is not None:
            self._gate.guard(opened)
        return opened


class _Gate:
    """CURVE with keys that come from the fleet key, and the ZAP handler that lets in one client key alone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key_file: Path) -> None:
        try:
            key = read_fleet_key(key_file)
        except FleetKeyError as error:
            raise ConfigError(f"fleet_key_file {key_file} {error}") from error
        self._secret = z85.encode(key.curve_secret("engine"))
        self._client = z85.decode(zmq.curve_public(z85.encode(key.curve_secret("router"))))
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)

    def guard(self, guarded: zmq.Socket[bytes]) -> None:
        """Make a socket ask here."""
        guarded.setsockopt(zmq.CURVE_SERVER, 1)
        guarded.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        guarded.setsockopt(zmq.ZAP_DOMAIN, b"pagefleet")

    def judge(self) -> None:
        """Answer those who wait for it (https://rfc.zeromq.org/spec/27)."""
        for _ in range(READ_MOST):
            try:
                version, request_id, _domain, _address, _identity, mechanism, *keys = self.socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            known = mechanism == b"CURVE" and len(keys) == 1 and hmac.compare_digest(keys[0], self._client)
            verdict = [b"200", b"OK", b"router"] if known else [b"400", b"unknown key", b""]
            self.socket.send_multipart([version, request_id, *verdict, b""])


def _bind(bound: zmq.Socket[bytes], host: str, port: int) -> None:
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        bound.bind(f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}")
    except (socket.gaierror, zmq.ZMQError) as error:
        reason = "unknown host" if isinstance(error, socket.gaierror) else zmq.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot publish KV events on {host} port {port} ({reason}): give another kv_events_port or kv_events_host"
        ) from error


def _count(monitor: zmq.Socket[bytes]) -> int:
    for number in range(COUNT_MOST):
        try:
            monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return number
    return COUNT_MOST
