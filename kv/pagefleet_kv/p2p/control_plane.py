"""The sockets that control messages of transfers take: one that decode engines ask, and one to each prefill engine.

All speak CURVE with keys from the fleet key: without it nobody is heard, and nobody is spoken to. Messages may be lost,
as the protocol expects: what a peer does not take is dropped, never waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import zmq
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_control import MAX_MESSAGE_BYTES

from pagefleet_kv.curve import FAILED_HANDSHAKES, CurveGate, SocketLimits, bind, count_events, dial_with, received
from pagefleet_kv.errors import cannot_listen

MESSAGES_PER_PEER = 128
"""Under way to one peer; more are dropped."""
READ_MOST = 64
"""From one socket in one turn."""
HEARTBEAT_MS = 2_000
SILENCE_MS = 6_000
RECONNECT_MS = 100
RECONNECT_MOST_MS = 2_000

Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Received:
    """One message, not decoded.

    Attributes:
        peer: who sent it: the key of an asking engine's socket, or the address that was dialled.
        is_answer: whether it came on a socket that we dialled.
        data: of any content.
    """

    peer: str
    is_answer: bool
    data: bytes


class ControlPlane:
    """All control sockets of one engine. Used by one thread.

    Args:
        host: address to listen on.
        port: to listen on; 0: a free one.
        key: of the fleet.

    Raises:
        KVConfigError: the port cannot be used.

    Attributes:
        num_refused: connections without the fleet's key, and messages that cannot be any.
    """

    def __init__(self, host: str, port: int, key: FleetKey) -> None:
        self.num_refused = 0
        self._key = key
        self._context = zmq.Context()
        self._dialled: dict[str, Socket] = {}
        try:
            self._gate = CurveGate(self._context, key, "engine-peer")
            self._router = self._open(zmq.ROUTER)
            self._gate.guard(self._router)
            self._monitor = self._router.get_monitor_socket(FAILED_HANDSHAKES)
            self.port = bind(self._router, host, port)
        except OSError as error:
            self._context.destroy(linger=0)
            raise cannot_listen(
                error,
                f"cannot listen for K/V transfers on {host} port {port} ({error.strerror}): "
                "give another kv_port or kv_host",
            ) from error

    @property
    def inbound(self) -> list[Socket]:
        """Those on which something can arrive; changes with `dial` and `hang_up`."""
        return [self._router, self._gate.socket, self._monitor, *self._dialled.values()]

    def dial(self, address: str, numeric: str) -> None:
        """Connect to a prefill engine, now and whenever the connection breaks.

        Args:
            address: by which it is named from now on.
            numeric: where it is, HOST:PORT in numbers.
        """
        if address in self._dialled:
            return
        dialled = self._open(zmq.DEALER)
        dialled.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dialled.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
        dial_with(dialled, self._key, "engine-peer")
        dialled.connect(f"tcp://{numeric}")
        self._dialled[address] = dialled

    def hang_up(self, address: str) -> None:
        dialled = self._dialled.pop(address, None)
        if dialled is not None:
            dialled.close(linger=0)

    def send(self, peer: str, data: bytes) -> None:
        """Send a message to who asked, or to who was dialled; dropped where it cannot go at once."""
        dialled = self._dialled.get(peer)
        try:
            if dialled is not None:
                dialled.send(data, zmq.NOBLOCK)
            elif peer.startswith(_ASKING):
                self._router.send_multipart([bytes.fromhex(peer.removeprefix(_ASKING)), data], zmq.NOBLOCK)
        except zmq.Again:
            return

    def receive(self) -> list[Received]:
        """Let engines of the fleet in, and return what has come, up to a limit for each socket."""
        self._gate.judge()
        self.num_refused += count_events(self._monitor)
        received = [Received(_ASKING + frames[0].hex(), False, frames[1]) for frames in self._take(self._router, 2)]
        for address, dialled in self._dialled.items():
            received += [Received(address, True, frames[0]) for frames in self._take(dialled, 1)]
        return received

    def close(self) -> None:
        self._router.disable_monitor()
        self._context.destroy(linger=0)

    def _open(self, kind: int) -> Socket:
        most = MESSAGES_PER_PEER
        return SocketLimits(most, most, MAX_MESSAGE_BYTES, HEARTBEAT_MS, SILENCE_MS).open(self._context, kind)

    def _take(self, inbound: Socket, num_frames: int) -> Iterable[list[bytes]]:
        for frames in received(inbound, READ_MOST):
            if len(frames) == num_frames:
                yield frames
            else:
                self.num_refused += 1


_ASKING = "asking:"
"""Before the identity of a socket that connected to ours: no address looks so."""
