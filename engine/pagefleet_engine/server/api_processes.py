"""The API processes beside the first one, as that sees them: starts them, replaces those that die, ends them.

One that dies takes its own requests with it and no others, and another takes its place within seconds: the cores keep
the model, whose loading takes minutes. The first one has started the cores, and they end with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from pagefleet_protocol.private_folder import PrivateFolder
from starlette.types import ASGIApp

from pagefleet_engine.client.api_seat import ApiSeat
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.child_process import ChildProcess
from pagefleet_engine.client.shared_notebook import make_notebook_memory
from pagefleet_engine.config import EngineConfig, ServerConfig
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.server.api_process import API_COMMAND, ApiDrain, ApiEnd, ApiOpen, ApiStart, Word
from pagefleet_engine.server.lifecycle import FrontDoor
from pagefleet_engine.server.relay import relay_path

logger = logging.getLogger(__name__)

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
"""Before a process is replaced: doubled each time, until one has lived for HEALTHY_S."""
HEALTHY_S = 10.0


@dataclass(slots=True)
class _Seat:
    """A place on the common port, and who has it."""

    listener: socket.socket
    child: ChildProcess | None = None
    start: int = 0
    """Number of its start."""
    started_at: float = 0.0
    delay_s: float = FIRST_DELAY_S


class ApiProcesses:
    """Those beside this one. All methods belong to one event loop.

    Args:
        config: of the engine, whose model is on this machine.
        server: its settings.
        listeners: a socket on the common port for each.

    Attributes:
        folder: private to all API processes.
        first_seat: of this process.
    """

    def __init__(self, config: EngineConfig, server: ServerConfig, listeners: Sequence[socket.socket]) -> None:
        self._config = config
        self._server = server
        self._private = PrivateFolder("pagefleet-servers-")
        self.folder = self._private.path
        self._memory = make_notebook_memory()
        self._num = 1 + len(listeners)
        self.first_seat = ApiSeat(0, self._num, 0, self._memory)
        self._seats = {index: _Seat(listener) for index, listener in enumerate(listeners, 1)}
        self._num_starts = 0
        self._opening: bytes | None = None
        self._engine: AsyncEngineClient | None = None
        loop = asyncio.get_running_loop()
        self._served: dict[int, asyncio.Future[None]] = {index: loop.create_future() for index in self._seats}
        self._ending = False
        self._all_ended = asyncio.Event()

    def start(self) -> None:
        """Start all; they read the model's text.

        Raises:
            OSError: the system starts no more processes.
        """
        for index in self._seats:
            self._start(index)

    def open(self, word: ApiOpen, engine: AsyncEngineClient) -> None:
        """Let them serve, and those that take their place.

        Args:
            word: what they are told.
            engine: whose requests end with them.
        """
        self._engine = engine
        self._opening = msgspec.json.encode(word)
        self._tell_all(word)

    async def opened(self) -> None:
        """Return when all serve.

        Raises:
            ModelLoadError: one ended before.
        """
        await asyncio.gather(*self._served.values())

    def relayed_to(self, app: ASGIApp) -> FrontDoor:
        """Return the door at which the others pass on what this process alone can answer."""
        door = socket.socket(socket.AF_UNIX)
        door.bind(str(relay_path(self.folder)))
        return FrontDoor(door, app)

    def stats(self) -> Mapping[str, float]:
        """Return counters and gauges, by the metrics' names."""
        return restart_series(self._num_starts - len(self._seats))

    def drain(self) -> None:
        """Have them take no requests any more, and end with the last; a second time: end at once."""
        self._stop_replacing()
        self._tell_all(ApiDrain())

    def end(self) -> None:
        """Tell them that a core has ended."""
        self._stop_replacing()
        self._tell_all(ApiEnd())

    async def over(self) -> None:
        """Return when all have ended, which they were told to."""
        await self._all_ended.wait()

    async def close(self) -> None:
        """End those that are left; returns when nothing of them is left."""
        self._stop_replacing()
        for future in self._served.values():
            future.cancel()
        for seat in self._seats.values():
            if seat.child is not None:
                seat.child.stop()
            seat.listener.close()
        self._private.remove()
        os.close(self._memory)

    def _start(self, index: int) -> None:
        seat = self._seats[index]
        self._num_starts += 1
        own = ApiSeat(index, self._num, self._num_starts, self._memory)
        child = ChildProcess(API_COMMAND, {})

        def told(sentinel: int) -> bytes:
            listener = seat.listener.fileno()
            return msgspec.json.encode(ApiStart(own, sentinel, listener, str(self.folder), self._config, self._server))

        fds = (seat.listener.fileno(), self._memory)
        child.start(told, partial(self._ended, index), fds, partial(self._serves, index))
        seat.child, seat.start, seat.started_at = child, own.start, time.monotonic()
        if self._opening is not None:
            child.tell(self._opening)

    def _serves(self, index: int) -> None:
        if not self._served[index].done():
            self._served[index].set_result(None)

    def _ended(self, index: int) -> None:
        seat = self._seats[index]
        assert seat.child is not None
        status = seat.child.exit_status()
        seat.child.stop()
        seat.child = None
        self._note_end()
        if self._ending:
            return
        if not self._served[index].done():
            self._served[index].set_exception(ModelLoadError(f"API process {index} {status}: see the log"))
            return
        if self._engine is not None:
            self._engine.asker_gone(index, seat.start)
        lived_s = time.monotonic() - seat.started_at
        seat.delay_s = FIRST_DELAY_S if lived_s > HEALTHY_S else seat.delay_s
        logger.error("API process %d %s: the next one starts in %.1f s", index, status, seat.delay_s)
        asyncio.get_running_loop().call_later(seat.delay_s, self._replace, index)
        seat.delay_s = min(MAX_DELAY_S, 2.0 * seat.delay_s)

    def _replace(self, index: int) -> None:
        if self._ending:
            return
        try:
            self._start(index)
        except OSError as error:
            logger.error("API process %d cannot be started (%s)", index, error.strerror)
            asyncio.get_running_loop().call_later(MAX_DELAY_S, self._replace, index)

    def _stop_replacing(self) -> None:
        """Nobody else holds the sockets open from now on."""
        self._ending = True
        for seat in self._seats.values():
            seat.listener.close()
        self._note_end()

    def _note_end(self) -> None:
        if self._ending and all(seat.child is None for seat in self._seats.values()):
            self._all_ended.set()

    def _tell_all(self, word: Word) -> None:
        for seat in self._seats.values():
            if seat.child is not None:
                seat.child.tell(msgspec.json.encode(word))


def restart_series(num: int) -> Mapping[str, float]:
    """Return what is told of processes that were replaced, for `EngineMetrics.include`."""
    return {"pagefleet_engine_api_process_restarts_total": num}
