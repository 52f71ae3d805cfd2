"""One engine core and the socket to it: its start, its messages, its health, its end. For one event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from pagefleet_protocol.load_progress import LoadProgress

from pagefleet_engine.client.core_process import CoreAtHand, CoreProcess
from pagefleet_engine.engine_core.messages import (
    CoreStats,
    FromCore,
    Profiled,
    Ready,
    RequestOutput,
    StartFailed,
    StartProfile,
    StepOutputs,
    StopProfile,
    ToCore,
)
from pagefleet_engine.engine_core.progress import EngineHealth, ProgressReader, judge
from pagefleet_engine.engine_core.transport import BadMessage, ClientSocket, decode_from_core, socket_address
from pagefleet_engine.errors import AddressTaken, ConfigError, EngineDead, EngineError, ModelLoadError, ProfileRefused

_log = logging.getLogger(__name__)


class CoreLink:
    """A core, which runs after `load`.

    Args:
        process: of the core.
        deliver: gets the outputs of each step.
        on_death: called once, in words, when the core ends without being asked to.
        asker: number of this API process.

    Attributes:
        process: of the core.
        stats: its latest figures; None before the first request.
        messages_dropped: bytes from its side that were no message.
        owes_nothing: set while no K/V of requests that have ended is on its way from it to other engines.
    """

    def __init__(
        self,
        process: CoreProcess | CoreAtHand,
        deliver: Callable[[list[RequestOutput]], Awaitable[None]],
        on_death: Callable[[str], None],
        asker: int = 0,
    ) -> None:
        self.process = process
        self.stats: CoreStats | None = None
        self.messages_dropped = 0
        self.owes_nothing = asyncio.Event()
        self.owes_nothing.set()
        self._deliver = deliver
        self._on_death = on_death
        self._socket = ClientSocket(socket_address(process.folder, asker))
        self._progress = ProgressReader(process.folder / "progress", is_first=asker == 0)
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None] | None = None
        self._num_open = 0
        self._work_since: float | None = None
        self._is_over = False
        self._profiles: deque[asyncio.Future[Profiled]] = deque()
        """Of what was asked about profiles, which the core answers in order."""

    async def load(self) -> Ready:
        """Start the core and wait until it has loaded the model; returns what it said.

        Raises:
            ConfigError: a setting cannot work, in the core's words.
            ModelLoadError: the model cannot be loaded, in the core's words.
        """
        self._begin()
        return await self._started

    def join(self, ready: Ready) -> None:
        """Take part in a core that runs already, as it said of itself."""
        self._started.set_result(ready)
        self._begin()

    @property
    def loading(self) -> LoadProgress:
        """How far the loading is, without waiting or asking the core."""
        return self._progress.loading()

    @property
    def ready(self) -> Ready:
        """What the core said about the loaded model."""
        return self._started.result()

    def health(self) -> EngineHealth:
        """Return the state now, without waiting or asking the core."""
        return judge(self._progress.read(), not self._is_over, self._work_since, time.monotonic())

    def send(self, message: ToCore) -> None:
        """Queue a message; nothing where the core is gone."""
        if not self._is_over:
            self._socket.send(message)

    async def ask_profile(self, message: StartProfile | StopProfile) -> str:
        """Return the path that the core answers with, if any.

        Raises:
            ProfileRefused: it did not do it.
            EngineDead: it is gone.
        """
        if self._is_over:
            raise EngineDead("The engine stopped unexpectedly.")
        told: asyncio.Future[Profiled] = asyncio.get_running_loop().create_future()
        self._profiles.append(told)
        self._socket.send(message)
        answer = await told
        if answer.refused:
            raise ProfileRefused(answer.refused)
        return answer.path

    def count_open(self, change: int) -> None:
        """Note that so many outputs more, or fewer, are waited for: a core that has none may rest."""
        self._num_open += change
        if not self._num_open:
            self._work_since = None
        elif self._work_since is None:
            self._work_since = time.monotonic()

    def end(self) -> None:
        """End the core at once; nothing of it is delivered any more."""
        self._give_up("The engine was shut down.")
        self.process.stop()
        if self._reader is None or self._reader.done():
            self._socket.close()
        else:
            self._reader.add_done_callback(lambda _: self._socket.close())
            self._reader.cancel()
        if self._started.done() and not self._started.cancelled():
            self._started.exception()  # seen, whoever waited for it
        self._started.cancel()

    async def close(self) -> None:
        """End the core; returns when nothing of it is left."""
        self.end()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    def _begin(self) -> None:
        self.process.start(self._core_ended)
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self._reader.add_done_callback(self._reader_ended)

    async def _read(self) -> None:
        while True:
            data = await self._socket.receive()
            try:
                message = decode_from_core(data)
            except BadMessage as error:
                self.messages_dropped += 1
                _log.warning("dropped a message of %d bytes from the engine core: %s", len(data), error.reason)
                continue
            await self.take(message)

    async def take(self, message: FromCore) -> None:
        """Take a message of the core in."""
        match message:
            case StepOutputs():
                self.stats = message.stats
                (self.owes_nothing.clear if message.stats.transfers_owed else self.owes_nothing.set)()
                await self._deliver(message.outputs)
            case Ready():
                if not self._started.done():
                    self._started.set_result(message)
            case Profiled():
                if self._profiles and not (told := self._profiles.popleft()).done():
                    told.set_result(message)
            case StartFailed():
                blamed = ConfigError if message.by_setting else ModelLoadError
                self.refuse_start((AddressTaken if message.address_taken else blamed)(message.message))

    def refuse_start(self, error: EngineError) -> None:
        """End the wait for its start, if anybody waits, with an error."""
        if not self._started.done():
            self._started.set_exception(error)

    def _core_ended(self) -> None:
        """The process is gone."""
        if self._is_over:
            return
        status = self.process.exit_status()
        if not self._started.done():
            # Its last words may still be in the socket; they say more than a status.
            asyncio.get_running_loop().call_later(
                0.5,
                self.refuse_start,
                ModelLoadError(f"the engine core {status} while it loaded the model: see the log"),
            )
            return
        self._die(f"the engine core (pid {self.process.pid}) {status}")

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        """Nobody delivers any more: the core is as good as dead, and must not look alive."""
        if reader.cancelled() or self._is_over:
            return
        _log.error("reading from the engine core failed", exc_info=reader.exception())
        self.refuse_start(ModelLoadError("the engine core could not be understood: see the log"))
        self._die("the client of the engine core failed")

    def _die(self, why: str) -> None:
        self._give_up("The engine stopped unexpectedly.")
        self._on_death(why)

    def _give_up(self, why: str) -> None:
        """Wait for nothing of the core any more."""
        self._is_over = True
        self.owes_nothing.set()
        for told in self._profiles:
            if not told.done():
                told.set_exception(EngineDead(why))
        self._profiles.clear()
