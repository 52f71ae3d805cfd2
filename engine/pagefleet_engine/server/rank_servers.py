"""`pagefleet serve --data-parallel-multi-port-external-lb`: a server for each data rank, and who keeps them running.

SIGTERM                      -> passed on: ranks drain -> exit 0
again                        -> passed on: ranks end what is open
a rank ends that has served  -> it is started anew, the others serve on
one ends that never has      -> the others drain -> exit with its status
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import aiohttp
import msgspec
import uvloop
from pagefleet_protocol.errors import Fault, shape_of
from pagefleet_protocol.load_progress import LoadProgress, decode_loading, encode_loading
from pagefleet_protocol.settings.log import set_up_logging
from starlette.types import Receive, Scope, Send

from pagefleet_engine.client.child_process import ChildProcess
from pagefleet_engine.client.data_ranks import furthest_behind, rank_devices
from pagefleet_engine.config import EngineConfig, ServerConfig
from pagefleet_engine.gpu_size import visible_gpus
from pagefleet_engine.rank_settings import rank_settings, supervisor_port
from pagefleet_engine.server.lifecycle import FrontDoor, StopSignals, bind, first_of
from pagefleet_engine.server.loading import READINESS
from pagefleet_engine.server.responses import json_response

logger = logging.getLogger(__name__)

RANK_COMMAND = (sys.executable, "-P", "-m", "pagefleet_engine.server.rank_process")
MOST_FAILURES = 5
"""Starts in a row of a rank that has served before. Then its device is at fault, and whoever started all has to see."""
_ENDS_WITHIN_S = 15.0
"""Beside the time to drain: a server that ends by itself has done so by then."""
_ANSWERS_WITHIN_S = 3.0
"""Less than anybody's probe waits for all of them."""


class RankStart(msgspec.Struct, frozen=True):
    """What a rank's process is told."""

    sentinel: int
    """Descriptor that is watched: it closes when the process ends. A byte says that it serves."""
    config: EngineConfig
    server: ServerConfig


def serve_ranks(config: EngineConfig, server: ServerConfig) -> int:
    """Run the servers of all data ranks until told to stop, or one cannot start.

    Returns:
        Exit status: 0 after a signal, else that of the rank that failed.

    Raises:
        ConfigError: there are not as many GPUs as they take, or a port cannot be listened on.
    """
    set_up_logging("data ranks", "pagefleet_engine")
    settings, devices = rank_settings(config, server), rank_devices(config, visible_gpus())
    for _, own in settings:
        with bind(own.host, own.port):
            pass  # a port that is taken is told at once
    with (
        bind(server.host, supervisor_port(config, server)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        ranks = [_Rank(number, *own, devices[number]) for number, own in enumerate(settings)]
        logger.info("the state of all ranks is at %s", listener.url)
        return runner.run(_serve(ranks, server.drain_timeout, listener.sock))


async def _serve(ranks: Sequence[_Rank], drain_s: float, sock: socket.socket) -> int:
    servers = RankServers(ranks)
    with StopSignals() as signals:
        async with RankProbes(servers) as probes, FrontDoor(sock, probes):
            try:
                servers.start()
                await first_of(signals.first, servers.failed)
                servers.stop()
                await first_of(servers.over, signals.second, timeout_s=drain_s + _ENDS_WITHIN_S)
                if not servers.over.is_set():
                    servers.stop()
                    await first_of(servers.over, timeout_s=_ENDS_WITHIN_S)
                return servers.status
            finally:
                servers.close()


@dataclass(slots=True)
class _Rank:
    number: int
    config: EngineConfig
    server: ServerConfig
    devices: Mapping[str, str]
    child: ChildProcess | None = None
    serves: bool = False
    """Its process does; or did until now."""
    has_served: bool = False
    num_failures: int = 0
    """Starts in a row that came to nothing."""

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.server.host, self.server.host)  # noqa: S104 compared
        return f"http://[{host}]:{self.server.port}" if ":" in host else f"http://{host}:{self.server.port}"


class RankServers:
    """The processes. All methods belong to one event loop.

    Attributes:
        ranks: in their order.
        failed: set when a rank cannot start.
        over: set when none runs any more, which they were told to.
        status: to exit with.
    """

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self.ranks = ranks
        self.failed = asyncio.Event()
        self.over = asyncio.Event()
        self.status = 0
        self._stopping = False

    @property
    def ready_once(self) -> bool:
        """Whether each rank has served since the start."""
        return all(one.has_served for one in self.ranks)

    @property
    def stopping(self) -> bool:
        """Whether they were told to end."""
        return self._stopping

    def start(self) -> None:
        """Start all.

        Raises:
            OSError: the system starts no more processes.
        """
        for rank in self.ranks:
            self._start(rank)

    def stop(self) -> None:
        """Tell them to take no requests any more, and end with the last; a second time: to end at once."""
        self._stopping = True
        for child in self._children():
            child.terminate()
        self._note_end()

    def close(self) -> None:
        """End those that are left."""
        self._stopping = True
        for child in self._children():
            child.stop()

    def _children(self) -> Iterator[ChildProcess]:
        return (one.child for one in self.ranks if one.child is not None)

    def _start(self, rank: _Rank) -> None:
        if self._stopping:
            return
        # Bars of several processes would be drawn over each other.
        child = ChildProcess(RANK_COMMAND, {**rank.devices, "TERM": "dumb"})
        rank.serves = False

        def told(sentinel: int) -> bytes:
            return msgspec.json.encode(RankStart(sentinel, rank.config, rank.server))

        child.start(told, partial(self._ended, rank), on_word=partial(self._serves, rank))
        rank.child = child

    def _serves(self, rank: _Rank) -> None:
        rank.serves = rank.has_served = True
        rank.num_failures = 0

    def _ended(self, rank: _Rank) -> None:
        assert rank.child is not None
        words = rank.child.exit_status()
        rank.child.stop()
        code = rank.child.returncode()
        rank.child = None
        self._note_end()
        if self._stopping:
            return
        rank.num_failures += not rank.serves
        if not rank.has_served or rank.num_failures >= MOST_FAILURES:
            logger.error("data rank %d %s: see the log", rank.number, words)
            self.status = code if code > 0 else 1
            self.failed.set()
            return
        pause_s = float(2**rank.num_failures)
        logger.error("data rank %d %s: it starts again in %.0f s", rank.number, words, pause_s)
        asyncio.get_running_loop().call_later(pause_s, self._start_again, rank)

    def _start_again(self, rank: _Rank) -> None:
        try:
            self._start(rank)
        except OSError as error:
            logger.error("data rank %d cannot be started (%s)", rank.number, error.strerror)
            self.status = 1
            self.failed.set()

    def _note_end(self) -> None:
        if self._stopping and not any(self._children()):
            self.over.set()


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    status: int
    """Of HTTP; 0: nothing listens there, -1: there is no answer in time."""
    body: bytes = b""


class RankProbes:
    """ASGI: how all ranks are, for who takes them for one; each has its own address for all else.

    Ready is who has every rank loaded, and then as long as any is: a router sees each for itself, and need not lose
    those that serve because one does not.
    """

    def __init__(self, servers: RankServers) -> None:
        self._servers = servers
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ANSWERS_WITHIN_S))

    async def __aenter__(self) -> RankProbes:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a probe."""
        path = scope["path"]
        if path == "/livez":
            status, body = lives(await self._ask(path))
        elif path in READINESS:
            answers = await self._ask(path)
            status, body = readiness(answers, self._servers.ready_once, self._servers.stopping)
        else:
            ports = [one.server.port for one in self._servers.ranks]
            told = f"This port tells the state of all data ranks: ask one of them, on port {ports[0]} to {ports[-1]}."
            status, body = 404, Fault(404, told).body(shape_of(path))
        await json_response(body, status)(scope, receive, send)

    async def _ask(self, path: str) -> Sequence[ProbeAnswer]:
        return await asyncio.gather(*(self._answer(one.url + path) for one in self._servers.ranks))

    async def _answer(self, url: str) -> ProbeAnswer:
        try:
            async with self._session.get(url) as answer:
                return ProbeAnswer(answer.status, await answer.read())
        except aiohttp.ClientConnectorError:
            return ProbeAnswer(0)
        except (TimeoutError, aiohttp.ClientError):
            return ProbeAnswer(-1)


def lives(ranks: Sequence[ProbeAnswer]) -> tuple[int, bytes]:
    """Return status and body: every rank has to live; one that does not listen is about to be started."""
    dead = [number for number, one in enumerate(ranks) if one.status not in (0, 200)]
    if dead:
        return 503, msgspec.json.encode({"status": "dead", "ranks": dead})
    return 200, b'{"status":"live"}'


def readiness(ranks: Sequence[ProbeAnswer], ready_once: bool, stopping: bool) -> tuple[int, bytes]:
    """Return status and body."""
    ready = [number for number, one in enumerate(ranks) if one.status == 200]
    if ready and ready_once and not stopping:
        return 200, msgspec.json.encode({"status": "ready", "ranks": ready})
    if ready_once:
        return 503, b'{"status":"not ready"}'
    loading = [decode_loading(one.body) or LoadProgress() for one in ranks if one.status != 200]
    return 503, encode_loading(furthest_behind(loading)) if loading else b'{"status":"not ready"}'
