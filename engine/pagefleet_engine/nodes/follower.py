"""A machine of an engine whose core is on another one: starts its own ranks, and passes on what they are told and tell.

It comes to the leader at once, fetches the model while it has its place, and ends when the leader or a rank does.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq
from pagefleet_kv.curve import FAILED_HANDSHAKES, dial_with, received
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.version import VERSION
from zmq.utils.monitor import parse_monitor_message

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.errors import ConfigError, EngineDead, EngineError, ModelLoadError
from pagefleet_engine.executor.local_node import LocalNode
from pagefleet_engine.executor.local_rank import RANK_COMMAND
from pagefleet_engine.executor.messages import Loaded, StartFailed
from pagefleet_engine.executor.messages import encode as encode_reply
from pagefleet_engine.executor.vital_signs import RankProgress
from pagefleet_engine.nodes.agreement import model_digest
from pagefleet_engine.nodes.far_pools import RAW, PoolServer
from pagefleet_engine.nodes.link import LINK_LIMITS
from pagefleet_engine.nodes.messages import (
    Answer,
    Ask,
    AskPlanes,
    Beat,
    Command,
    End,
    Ended,
    Failed,
    Hello,
    PlanesTold,
    Present,
    Refused,
    Start,
    ToFollower,
    Told,
    ToLeader,
    Welcome,
    decode_to_follower,
    encode,
)
from pagefleet_engine.nodes.plane_relay import PlaneRelay
from pagefleet_engine.ranks.doorbell import Doorbell
from pagefleet_engine.ranks.network import address_towards
from pagefleet_engine.ranks.together import CopyShares
from pagefleet_engine.worker.device import resolve_device

BEAT_S = 0.5
END_S = 3.0
"""That ranks get to end by themselves."""
_RECONNECT_MS = 200
_STRANGE = 3
"""Handshakes that fail one after another before it is the key."""
_READ_MOST = 256
_LAST_WORDS_MS = 1_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaderAddress:
    """Where the leader is, and the secret that it is known by."""

    host: str
    port: int
    key: FleetKey

    @property
    def endpoint(self) -> str:
        """As ZMQ writes it."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


class Follower:
    """Runs from `run` on, in one thread; others may call the rest, which does nothing once `run` is over.

    Args:
        config: of the engine.
        node_rank: which of its machines this is.
        leader: whom it follows.
        command: of a rank's process.
        welcomed: is called once the leader has let this machine in, with the commit of its model.
    """

    def __init__(
        self,
        config: EngineConfig,
        node_rank: int,
        leader: LeaderAddress,
        command: Sequence[str] = RANK_COMMAND,
        welcomed: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._node_rank = node_rank
        self._leader = leader
        self._command = command
        self._welcomed = welcomed
        self._name = f"node {node_rank} on {socket.gethostname()}"
        self._wake = Doorbell()
        self._post_lock = threading.Lock()
        self._is_over = False
        self._posted: deque[Callable[[], None]] = deque()
        self._folder: Path | None = None
        self._local: LocalNode | None = None
        self._asked: dict[int, Callable[[bytes], None]] = {}
        """Requests of ranks to the `Rendezvous` that are not answered yet."""
        self._num_asked = 0
        self._num_strange = 0
        self._beat_at = time.monotonic()
        self._loaded: dict[int, Loaded] = {}
        self._pools: PoolServer | None = None
        self._planes: PlaneRelay | None = None
        self._ends = threading.Event()
        """No rank is waited for any more."""
        self._is_welcome = False
        self.is_joined = False
        """Whether the leader has let this machine in."""
        self.is_ready = False
        """Whether all ranks of this machine have loaded."""

    def bring(self, folder: Path) -> None:
        """Say where the model is; from any thread."""
        self._post(lambda: self._present(folder))

    def give_up(self, error: EngineError) -> None:
        """Say that there is no model; from any thread. `run` raises the error."""
        self._post(lambda: self._fail(error))

    def stop(self) -> None:
        """Leave at once; from any thread."""
        self._post(self._stop)

    def progress(self) -> Sequence[RankProgress]:
        """Return how far the ranks have loaded; from any thread."""
        local = self._local
        return () if local is None else local.progress()

    def run(self) -> None:
        """Follow to the end.

        Raises:
            ConfigError: this machine does not belong to the leader's engine, or its ranks cannot be.
            EngineDead: the leader or a rank has ended.
        """
        context = zmq.Context()
        dealer = LINK_LIMITS.open(context, zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dial_with(dealer, self._leader.key, "node")
        self._dealer = dealer
        self._monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKES
        )
        _log.info("waiting for the leader at %s port %d", self._leader.host, self._leader.port)
        dealer.connect(self._leader.endpoint)
        try:
            self._follow()
        except _Stopped:
            return
        finally:
            self._ends.set()
            if self._pools is not None:
                self._pools.close()
            if self._planes is not None:
                self._planes.close()
            if self._local is not None:
                self._local.kill("")
                self._local.end(END_S)
            dealer.disable_monitor()
            context.destroy(linger=_LAST_WORDS_MS)
            with self._post_lock:
                self._is_over = True
                self._wake.close()

    def _post(self, call: Callable[[], None]) -> None:
        with self._post_lock:
            if not self._is_over:  # else the bell's descriptor may be somebody else's
                self._posted.append(call)
                self._wake.ring()

    # --- the thread that runs it

    def _follow(self) -> None:
        poller = zmq.Poller()
        for inbound in (self._dealer, self._monitor, self._wake.fileno()):
            poller.register(inbound, zmq.POLLIN)
        local = None
        while True:
            poller.poll(max(0, int((self._beat_at - time.monotonic()) * 1000)))
            self._wake.take()
            while self._posted:
                self._posted.popleft()()
            for frames in received(self._dealer, _READ_MOST):
                self._take(frames)
            self._see_events()
            if self._local is not None:
                if local is None:
                    local = self._local
                    poller.register(local.bell, zmq.POLLIN)
                self._relay(local)
            self._beat_if_due()

    def _take(self, frames: Sequence[bytes]) -> None:
        message: ToFollower = decode_to_follower(frames[0])
        match message:
            case Welcome(commit):
                _log.info("joined the leader at %s port %d", self._leader.host, self._leader.port)
                self._is_welcome = self.is_joined = True
                self._welcomed(commit)
                self._tell_present()
            case Refused(line):
                raise ConfigError(line)
            case Start():
                self._start(message)
            case Command():
                if self._local is not None:
                    self._local.send(frames[1:], self._make_way)
            case AskPlanes(rank):
                if self._planes is not None:
                    self._planes.ask(rank, frames[1:])
            case Answer(number):
                self._asked.pop(number)(frames[1])
            case End(why):
                raise EngineDead(f"{self._name}: the leader has ended ({why})")

    def _see_events(self) -> None:
        for frames in received(self._monitor, _READ_MOST):
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_strange = 0
                self._say_hello()
            elif event == zmq.EVENT_DISCONNECTED:
                if self._is_welcome:
                    where = f"the leader at {self._leader.host}"
                    raise EngineDead(f"{self._name}: {where} is out of reach: it ended, or the network failed")
            elif (strange := self._num_strange + 1) >= _STRANGE or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigError(
                    f"{self._name}: who listens at {self._leader.host} port {self._leader.port} has another fleet key, "
                    "or is no leader: give all nodes the same --fleet-key-file and --master-port"
                )
            else:
                self._num_strange = strange

    def _say_hello(self) -> None:
        address = address_towards(self._leader.host, self._leader.port)
        config = msgspec.Raw(msgspec.msgpack.encode(self._config))
        self._say(Hello(VERSION, self._node_rank, socket.gethostname(), address, config))
        self._address = address

    def _present(self, folder: Path) -> None:
        self._folder = folder
        self._tell_present()

    def _tell_present(self) -> None:
        if self._folder is not None and self._is_welcome:
            try:
                digest = model_digest(self._folder)
            except OSError as error:
                line = f"{self._folder} cannot be read ({error.strerror}): put the model there on every machine"
                self._fail(ModelLoadError(line))
            self._say(Present(digest, resolve_device(self._config.model.device).type))

    def _start(self, start: Start) -> None:
        own = self._config.execution.cache_dir
        config = replace(start.config, execution=replace(start.config.execution, cache_dir=own))
        try:
            ranks, device = range(*start.ranks), resolve_device(config.model.device)
            shares = [] if start.together is None else [CopyShares(start.together)] * len(ranks)
            local = LocalNode(ranks, config, device, self, self._address, shares)
            self._local = local
            local.start(str(self._folder), self._command, start.num_threads)
            if wires := local.plane_wires():
                self._planes = PlaneRelay(wires, self._planes_told, partial(self._post, self._planes_failed))
        except ConfigError as error:
            self._fail(error)

    def _relay(self, local: LocalNode) -> None:
        for rank, reply in local.receive():
            if isinstance(reply, Loaded):
                self._loaded[rank] = reply
                self.is_ready = len(self._loaded) == len(local.ranks)
                if self.is_ready and self._connects:
                    self._serve_pools(local)
            port = 0 if self._pools is None else self._pools.port
            self._say(Told(rank, port), *encode_reply(reply))
            if isinstance(reply, StartFailed):
                raise reply.error(f"rank {rank} on {local.host}")
        self._check_ranks()

    @property
    def _connects(self) -> bool:
        """Whether the leader has connectors, which reach all ranks' K/V."""
        return bool(self._config.kv_transfer.connectors)

    def _serve_pools(self, local: LocalNode) -> None:
        try:
            pools = local.pools([RAW] * local.ranks.stop, self._loaded, self._ends.is_set)
            by_rank = {rank: pool for rank, (_, pool) in zip(local.ranks, pools, strict=True)}
            self._pools = PoolServer(by_rank, local.num_finished, self._address, self._leader.key)
        except ConfigError as error:
            self._fail(error)

    def _planes_told(self, rank: int, parts: Sequence[bytes]) -> None:
        self._post(lambda: self._say(PlanesTold(rank), *parts))

    def _planes_failed(self) -> None:
        assert self._local is not None
        self._say(Ended(self._local.ranks[0], "passes no K/V any more, as its node's log says"))
        raise EngineDead(f"{self._name} passes no K/V any more")

    def _check_ranks(self) -> None:
        """Raises EngineDead where a rank has ended, and tells the leader."""
        if self._local is not None and (ended := self._local.ended()) is not None:
            rank, status = ended
            self._say(Ended(rank, status))
            raise EngineDead(f"rank {rank} on {self._local.host} {status}: the engine must be started again")

    def _make_way(self) -> None:
        """Ranks make no room for a command: one may wait to tell more than its own ring holds, or compute, and the
        leader must hear that it lives."""
        assert self._local is not None
        self._relay(self._local)
        self._beat_if_due()

    def _beat_if_due(self) -> None:
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + BEAT_S
            self._beat()

    def _beat(self) -> None:
        if (local := self._local) is None:
            return
        now = time.monotonic()
        self._say(Beat([one.moved(-now) for one in local.signs()], local.progress()))

    def ask(self, request: bytes, answer: Callable[[bytes], None]) -> None:
        """Implements `Rendezvous` for the ranks of this machine: the leader is asked."""
        self._num_asked += 1
        self._asked[self._num_asked] = answer
        self._say(Ask(self._num_asked), request)

    def _stop(self) -> None:
        if self._local is not None:
            self._say(Ended(self._local.ranks[0], "was ended with its node"))
        raise _Stopped

    def _fail(self, error: EngineError) -> NoReturn:
        """Tell the leader that this machine cannot do its part, and raise the error."""
        if self._is_welcome:
            self._say(Failed(str(error), isinstance(error, ModelLoadError)))
        raise error

    def _say(self, message: ToLeader, *parts: bytes | bytearray | memoryview) -> None:
        self._dealer.send_multipart([encode(message), *parts], zmq.NOBLOCK)


class _Stopped(Exception):
    """Whoever runs the follower wants its end."""
