"""The process around the app: the listening socket, signals, the drain, the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import uvicorn
from pagefleet_protocol.workers.listeners import bind_together
from starlette.types import ASGIApp, Receive, Scope, Send

from pagefleet_engine.client.balance import Counts
from pagefleet_engine.errors import AddressTaken, ConfigError, QueueFull
from pagefleet_engine.server.access import is_counted
from pagefleet_engine.server.errors import ServerStoppingError
from pagefleet_engine.server.http_protocol import BoundedHttpProtocol
from pagefleet_engine.server.interruption import OpenRequests


class Drain:
    """Whether the server takes new requests, and how many it works on.

    Args:
        max_in_flight: more than the engine would run and queue are refused before their bodies are read.
        in_flight: how many each of its processes works on; None: there is one.
        index: of this process.
    """

    def __init__(self, max_in_flight: int, in_flight: Counts | None = None, index: int = 0) -> None:
        self.draining = False
        self._max_in_flight = max_in_flight
        self._all: Counts = [0] if in_flight is None else in_flight
        self._index = index
        self._in_flight = 0
        self._passed_on = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Take no new requests from now on."""
        self.draining = True

    async def wait_until_idle(self) -> None:
        """Return when no request is being worked on."""
        await self._idle.wait()

    def enter(self) -> None:
        """Count a request.

        Raises:
            ServerStoppingError: none is taken any more.
            QueueFull: too many are worked on.
        """
        if self.draining:
            raise ServerStoppingError
        if (in_flight := sum(self._all)) >= self._max_in_flight:
            raise QueueFull(f"The server works on {in_flight} requests already. Try again later.", 1.0)
        self._count(1)

    def leave(self) -> None:
        """Count a request's end."""
        self._count(-1)

    @contextlib.contextmanager
    def passing_on(self) -> Iterator[None]:
        """Wait for a request too that another process works on, and counts."""
        self._passed_on += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._passed_on -= 1
            self._count(0)

    def _count(self, change: int) -> None:
        self._in_flight += change
        self._all[self._index] = self._in_flight
        if self._in_flight or self._passed_on:
            self._idle.clear()
        else:
            self._idle.set()


class DrainGate:
    """ASGI middleware that counts requests; probes and metrics are answered until the very end."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or not is_counted(scope["path"]):
            await self._app(scope, receive, send)
            return
        self._drain.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.leave()


logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""Time for error events to leave once everything is to end."""
KEEP_ALIVE_S = 75

T = TypeVar("T")


class Listener:
    """A bound socket, closed with the `with` block. It listens from the moment its `FrontDoor` is there."""

    def __init__(self, sock: socket.socket, host: str, others: Sequence[socket.socket] = ()) -> None:
        self.sock = sock
        self.others = others
        """Of other API processes, on the same port."""
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{sock.getsockname()[1]}"

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self.sock, *self.others):
            sock.close()


def bind(host: str, port: int, num: int = 1) -> Listener:
    """Bind before the model loads, so that a port in use is told at once; `num` processes have a socket each.

    Raises:
        ConfigError: the address cannot be used; AddressTaken: somebody else uses it.
    """
    try:
        sock, *others = (_bind_alone(host, port),) if num == 1 else bind_together(host, port, num)
    except OSError as error:
        reason = error.strerror or "unknown host"
        refusal = AddressTaken if error.errno == errno.EADDRINUSE else ConfigError
        raise refusal(f"cannot listen on {host} port {port} ({reason}): give another host or port") from error
    return Listener(sock, host, others)


def _bind_alone(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as on_error:
        sock = on_error.enter_context(socket.socket(family, kind, protocol))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        on_error.pop_all()
    return sock


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Signals, counted while the `with` block runs."""

    def __init__(self, numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self._numbers = numbers
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __enter__(self) -> StopSignals:
        for number in self._numbers:
            asyncio.get_running_loop().add_signal_handler(number, self.received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._numbers:
            asyncio.get_running_loop().remove_signal_handler(number)

    def received(self) -> None:
        """Count one signal."""
        (self.second if self.first.is_set() else self.first).set()

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` returns; None when the first signal comes before, and then `work` is cancelled."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.first.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return None
        return await task


class LastTransfers(Protocol):
    """What an engine may still owe to others when its last request has ended."""

    def drain(self) -> None:
        """Take nothing on for other engines any more."""
        ...

    async def transfers_over(self) -> None:
        """Return when nothing is owed to any."""
        ...


class OtherProcesses(Protocol):
    """API processes of the same engine."""

    def drain(self) -> None:
        """Have them take no requests any more, and end with the last; a second time: end at once."""
        ...

    async def over(self) -> None:
        """Return when all have ended."""
        ...


class FrontDoor:
    """Answers on a socket from the start of the `async with` block: by `until_open`, and by another app after `open`.

    Until then the port tells how far the loading is; nobody has to guess from refused connections.
    """

    def __init__(self, sock: socket.socket, until_open: ASGIApp) -> None:
        self._app = until_open
        self._sock = sock
        self._server = _Server(_uvicorn_config(self._answer))
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FrontDoor:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self.closed

    @property
    def closed(self) -> asyncio.Task[None]:
        """Done when nothing is answered any more."""
        assert self._serving is not None, "outside of the block"
        return self._serving

    async def listening(self) -> None:
        """Return when connections are taken."""
        await self._server.up.wait()

    def open(self, app: ASGIApp, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Let `app` answer from now on. `headers` are added to every answer, also to what is no HTTP."""
        self._app = app
        self._server.add_headers(headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Running:
    """What the end has to deal with."""

    drain: Drain
    open_requests: OpenRequests
    engine_died: asyncio.Event
    drain_timeout_s: float
    transfers: LastTransfers | None = None
    """Waited for after the open requests, within the same time."""
    others: OtherProcesses | None = None
    """They end too."""


async def run_until_stopped(door: FrontDoor, signals: StopSignals, running: Running) -> int:
    """Serve until a signal or the engine's death; end every open request; return the exit status."""
    await first_of(signals.first, running.engine_died, door.closed)
    running.drain.begin()
    if running.others is not None:
        running.others.drain()
    if not running.engine_died.is_set() and not door.closed.done():
        logger.info("stopping: waiting up to %.0f s for open requests", running.drain_timeout_s)
        idle = asyncio.create_task(_come_to_rest(running))
        await first_of(idle, signals.second, running.engine_died, timeout_s=running.drain_timeout_s)
        idle.cancel()
    if not running.engine_died.is_set():
        running.open_requests.end_all(ServerStoppingError())
        if running.others is not None:
            running.others.drain()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_all_idle(running), LAST_WORDS_S)
    return 1 if running.engine_died.is_set() else 0


async def _come_to_rest(running: Running) -> None:
    if running.transfers is not None:
        running.transfers.drain()
    await _all_idle(running)
    if running.transfers is not None:
        await running.transfers.transfers_over()


async def _all_idle(running: Running) -> None:
    if running.others is not None:
        await running.others.over()
    await running.drain.wait_until_idle()


async def first_of(*waited: asyncio.Event | asyncio.Task[None], timeout_s: float | None = None) -> None:
    """Wait until any event is set or any task done. Tasks go on."""
    own = [asyncio.create_task(event.wait()) for event in waited if isinstance(event, asyncio.Event)]
    others = [task for task in waited if isinstance(task, asyncio.Task)]
    await asyncio.wait([*own, *others], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in own:
        task.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the drain's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    def add_headers(self, headers: Sequence[tuple[str, str]]) -> None:
        """Add headers to every answer from now on; what uvicorn has ready is made anew once a second only."""
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self.config.encoded_headers = [*self.config.encoded_headers, *encoded]
        self.server_state.default_headers = [*self.server_state.default_headers, *encoded]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(LAST_WORDS_S),
    )
    config.load()
    return config
