"""The leader's end of the link to the other machines: one port, one thread, one `RemoteNode` for each machine.

The thread owns the sockets: it lets in who has the fleet's key, checks that all were started alike, answers what ranks
ask to meet, and sees who is gone. Whoever drives the ranks talks to the nodes, which are rung by it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq
from pagefleet_kv.curve import FAILED_HANDSHAKES, CurveGate, SocketLimits, bind, received
from pagefleet_protocol.fleet_key import FleetKey
from zmq.utils.monitor import parse_monitor_message

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.errors import AddressTaken, ConfigError
from pagefleet_engine.executor.messages import StartFailed, decode_reply
from pagefleet_engine.executor.ring import Buffer
from pagefleet_engine.nodes.agreement import refusal_of, unlike_model
from pagefleet_engine.nodes.messages import (
    Answer,
    Ask,
    Beat,
    Ended,
    Failed,
    Hello,
    PlanesTold,
    Present,
    Refused,
    Start,
    Still,
    ToFollower,
    Told,
    ToLeader,
    Welcome,
    decode_to_leader,
    encode,
)
from pagefleet_engine.nodes.model_copy import ONLY_COPY, ModelCopy
from pagefleet_engine.nodes.remote_node import RemoteNode
from pagefleet_engine.ranks.doorbell import Doorbell

HEARTBEAT_MS, SILENCE_MS = 1_000, 7_000
"""Of connections: one that is silent for so long counts as lost on either side."""
LINK_LIMITS = SocketLimits(0, 0, 1 << 30, HEARTBEAT_MS, SILENCE_MS)
"""Nothing is dropped: ranks in lockstep have a few messages under way."""
PROBE_MS, LOOK_MS = 50, 1_000
"""Between two looks whether nodes are there, after somebody's connection was lost, and else."""
_SUSPECT_S = 1.0
_READ_MOST = 256
_OUT_OF_REACH = "is out of reach: its machine, `pagefleet serve` there or the network failed"
_LINK_FAILED = "cannot be heard: the link to other nodes failed, as the log says"
_TELL_S = 10.0
"""Between two warnings of strangers."""

Socket = zmq.Socket[bytes]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """What followers must agree with."""

    config: EngineConfig
    present: Present
    """What the leader has itself."""
    num_threads: int
    """Of each rank on a CPU."""
    commit: str | None = None
    """Of the model."""
    of: ModelCopy = ONLY_COPY


class NodeLink:
    """Listens, from its construction to `close`.

    Args:
        terms: of this engine.
        host: to listen on, where that is an address of this machine; else it listens on all of them.
        port: to listen on; 0: a free one.
        key: of the fleet.
        nodes: number and ranks of each of the other machines.

    Raises:
        ConfigError: the port cannot be used; AddressTaken: somebody else listens there.

    Attributes:
        nodes: the other machines.
        port: that it listens on.
        rendezvous: answers ranks of all machines.
    """

    def __init__(self, terms: Terms, host: str, port: int, key: FleetKey, nodes: Sequence[tuple[int, range]]) -> None:
        self._terms = terms
        self._context = zmq.Context()
        self._wake = Doorbell()
        self._outbox: deque[tuple[int, list[bytes]]] = deque()
        self._put_lock = threading.Lock()
        self._is_closed = False
        self._is_begun, self._is_over = threading.Event(), threading.Event()
        self._begin_lock = threading.Lock()
        """No node comes or leaves while it is decided whether all are there."""
        self._suspect_until = 0.0
        self._warn_at = 0.0
        self.rendezvous = terms.of.rendezvous()
        self.nodes = {node: RemoteNode(node, ranks, self._put, key) for node, ranks in nodes}
        try:
            self._gate = CurveGate(self._context, key, "node")
            self._router = LINK_LIMITS.open(self._context, zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._gate.guard(self._router)
            self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKES)
            self.port = _bound(self._router, host, port)
        except ConfigError:
            self._context.destroy(linger=0)
            self._wake.close()
            raise
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Deliver what is queued, and end; call this once."""
        self._is_over.set()
        self._wake.ring()
        self._thread.join()
        with self._put_lock:
            self._is_closed = True
            self._wake.close()
        for node in self.nodes.values():
            node.close()

    def begin(self) -> bool:
        """Have all nodes start their ranks, as soon as they have the model; False: not all are there."""
        with self._begin_lock:
            if self.missing():
                return False
            self._is_begun.set()
        self._wake.ring()
        return True

    def missing(self) -> list[RemoteNode]:
        """Return the nodes that have not come."""
        return [node for node in self.nodes.values() if not node.has_come]

    def _put(self, node: int, message: ToFollower, parts: Sequence[Buffer]) -> None:
        frames = [encode(message), *map(bytes, parts)]
        with self._put_lock:
            if not self._is_closed:  # else the bell's descriptor may be somebody else's
                self._outbox.append((node, frames))
                self._wake.ring()

    # --- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # whoever waits for a node must not wait for this thread
            _log.exception("the link to other nodes failed")
            for node in self.nodes.values():
                node.left(_LINK_FAILED, is_begun=True)
        finally:
            self._router.disable_monitor()
            self._context.destroy(linger=500)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for inbound in (self._router, self._gate.socket, self._monitor, self._wake.fileno()):
            poller.register(inbound, zmq.POLLIN)
        while not self._is_over.is_set():
            is_suspect = time.monotonic() < self._suspect_until
            poller.poll(PROBE_MS if is_suspect else LOOK_MS)
            self._wake.take()
            self._gate.judge()
            self._send_all()
            for peer, *frames in received(self._router, _READ_MOST):
                try:
                    self._take(peer, frames)
                except (msgspec.DecodeError, ValueError, IndexError) as error:
                    _log.warning("a node's message cannot be read: %s", error)
            self._see_events()
            for node in self.nodes.values():
                if node.peer is not None:
                    self._send(node.peer, encode(self._next_for(node)))
        self._send_all()

    def _next_for(self, node: RemoteNode) -> ToFollower:
        if not (node.is_present and self._is_begun.is_set()):
            return Still()
        node.is_present = False
        ranks = node.ranks.start, node.ranks.stop
        return Start(self._terms.config, ranks, self._terms.num_threads, self._terms.of.together)

    def _send_all(self) -> None:
        while self._outbox:
            node, frames = self._outbox.popleft()
            if (peer := self.nodes[node].peer) is not None:
                self._send(peer, *frames)

    def _send(self, peer: bytes, *frames: bytes) -> None:
        """Send to whoever has the connection; who cannot be sent to is gone."""
        try:
            self._router.send_multipart([peer, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            with self._begin_lock:
                is_begun = self._is_begun.is_set()
                for node in self.nodes.values():
                    if node.peer == peer:
                        node.left(_OUT_OF_REACH, is_begun)

    def _see_events(self) -> None:
        for frames in received(self._monitor, _READ_MOST):
            event = parse_monitor_message(frames)["event"]
            now = time.monotonic()
            if event == zmq.EVENT_DISCONNECTED:
                self._suspect_until = now + _SUSPECT_S
            elif now > self._warn_at:
                self._warn_at = now + _TELL_S
                _log.warning("somebody without this engine's fleet key came to port %d", self.port)

    def _take(self, peer: bytes, frames: Sequence[bytes]) -> None:
        message: ToLeader = decode_to_leader(frames[0])
        if isinstance(message, Hello):
            self._meet(peer, message)
            return
        node = next((node for node in self.nodes.values() if node.peer == peer), None)
        if node is not None:
            self._take_of(node, peer, message, frames)

    def _take_of(self, node: RemoteNode, peer: bytes, message: ToLeader, frames: Sequence[bytes]) -> None:
        match message:
            case Told(rank, pools_port):
                if rank in node.ranks:
                    node.told(rank, decode_reply(frames[1:]), pools_port)
            case PlanesTold(rank):
                node.planes_told(rank, frames[1:])
            case Beat():
                node.beat(message)
            case Ask(number):
                self._send(peer, encode(Answer(number)), self.rendezvous.answer(frames[1]))
            case Present():
                self._check_present(peer, node, message)
            case Ended(rank, status):
                node.lost(rank, status)
            case Failed(line, by_model):
                node.told(node.ranks[0], StartFailed("model" if by_model else "config", line))

    def _meet(self, peer: bytes, hello: Hello) -> None:
        why = refusal_of(hello, self._terms.config)
        node, last = self.nodes.get(hello.node_rank), self._terms.config.parallel.nnodes - 1
        if why is None and node is None and not 0 < hello.node_rank <= last:
            why = f"nodes beside the leader have --node-rank 1 to {last}: give it one of these"
        elif why is None and node is not None and node.has_come:
            why = f"node {hello.node_rank} is {node.host} already: give each node a --node-rank of its own"
        if why is not None:
            line = f"node {hello.node_rank} on {hello.host}: {why}"
            if node is not None and not node.has_come:
                node.last_refusal = line
            _log.warning("refused %s", line)
            self._send(peer, encode(Refused(line)))
            return
        if node is not None:  # else its ranks are of other copies
            node.came(peer, hello)
            _log.info("node %d is %s (%s)", hello.node_rank, hello.host, hello.address)
        self._send(peer, encode(Welcome(self._terms.commit)))

    def _check_present(self, peer: bytes, node: RemoteNode, present: Present) -> None:
        why = unlike_model(present, self._terms.present)
        if why is None:
            node.is_present = True
            return
        node.told(node.ranks[0], StartFailed("config", why))
        self._send(peer, encode(Refused(f"node {node.node} on {node.host}: {why}")))


def _bound(router: Socket, host: str, port: int) -> int:
    """Bind to a host's address, or where it is none of this machine's, to all.

    Raises:
        ConfigError: the port cannot be used; AddressTaken: somebody else listens there.
    """
    try:
        return bind(router, host, port)
    except OSError as error:
        if error.errno == zmq.EADDRINUSE:
            raise _taken(port) from error
    try:
        return bind(router, "::", port)
    except OSError as error:
        if error.errno == zmq.EADDRINUSE:
            raise _taken(port) from error
        raise ConfigError(
            f"cannot listen for other nodes on port {port} ({error.strerror}): give another --master-port"
        ) from error


def _taken(port: int) -> AddressTaken:
    return AddressTaken(
        f"port {port}, where other nodes are to come, is taken: give all nodes another --master-port, or end who "
        "listens there"
    )
