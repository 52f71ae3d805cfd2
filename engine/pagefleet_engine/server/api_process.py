"""An API process beside the first: `python -m pagefleet_engine.server.api_process`, started by that one.

Its standard input carries lines of JSON: `ApiStart`, and then words. When it closes the first process is gone, and so
are the cores: what is open ends with an error, and so does this process. Signals are the first one's business.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import IO

import msgspec
import uvloop
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.settings.log import set_up_logging
from pagefleet_protocol.workers.siblings import Siblings

from pagefleet_engine.client.api_seat import ApiSeat
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.core_process import CoreAtHand, RunningCore
from pagefleet_engine.config import EngineConfig, ServerConfig
from pagefleet_engine.server import text_work
from pagefleet_engine.server.app import create_app
from pagefleet_engine.server.assembly import Around, Inputs, Keys, log_errors_of_uvicorn, make_parts
from pagefleet_engine.server.lifecycle import LAST_WORDS_S, FrontDoor, Running, StopSignals, run_until_stopped
from pagefleet_engine.server.operations import identity_headers
from pagefleet_engine.server.relay import Relay

API_COMMAND = (sys.executable, "-P", "-m", "pagefleet_engine.server.api_process")


class ApiStart(msgspec.Struct, frozen=True):
    """What a new API process is told first: enough to read the model's text."""

    seat: ApiSeat
    sentinel: int
    """Descriptor that the first process watches: it closes when this one ends. A byte says that it serves."""
    listener: int
    """Descriptor of its socket on the common port."""
    folder: str
    """Private to the API processes."""
    config: EngineConfig
    server: ServerConfig


class ApiOpen(msgspec.Struct, frozen=True, tag="open"):
    """The cores have loaded the model: serve."""

    cores: Sequence[RunningCore]
    facts: EngineFacts
    created: int
    startup_seconds: dict[str, float]


class ApiDrain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no requests any more, and end with the last; a second time: end at once."""


class ApiEnd(msgspec.Struct, frozen=True, tag="end"):
    """A core has ended."""


Word = ApiOpen | ApiDrain | ApiEnd


class _FirstProcess:
    """What the first process says.

    Attributes:
        signals: count what is said of the end.
        opened: done when it says that the cores have loaded.
        gone: set when a core has ended, or the first process itself.
    """

    def __init__(self) -> None:
        self.signals = StopSignals()
        self.opened: asyncio.Future[ApiOpen] = asyncio.get_running_loop().create_future()
        self._on_end: Callable[[], None] = self.signals.received

    def at_end(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` when a core has ended; until then this process simply ends."""
        self._on_end = on_end

    def listen(self, lines: IO[bytes]) -> None:
        """Hear what it says from now on, in a thread."""
        threading.Thread(target=self._listen, args=(asyncio.get_running_loop(), lines), daemon=True).start()

    def _listen(self, loop: asyncio.AbstractEventLoop, lines: IO[bytes]) -> None:
        decoder = msgspec.json.Decoder(Word)
        for line in lines:
            loop.call_soon_threadsafe(self._take, decoder.decode(line))
        loop.call_soon_threadsafe(self._take, ApiEnd())
        time.sleep(2 * LAST_WORDS_S)  # an event loop that does not turn must not outlive the engine
        os._exit(1)

    def _take(self, word: Word) -> None:
        match word:
            case ApiOpen():
                self.opened.set_result(word)
            case ApiDrain():
                self.signals.received()
            case ApiEnd():
                self._on_end()


async def _serve(start: ApiStart, lines: IO[bytes]) -> int:
    first, died = _FirstProcess(), asyncio.Event()
    first.listen(lines)
    config, server, seat = start.config, start.server, start.seat
    async with AsyncExitStack() as after:
        pool = after.enter_context(ThreadPoolExecutor(text_work.THREADS, "text"))
        listener = after.enter_context(socket.socket(fileno=start.listener))
        loop = asyncio.get_running_loop()
        inputs = await loop.run_in_executor(pool, Inputs.read, config, server)
        after.push_async_callback(asyncio.to_thread, inputs.tracer.close)
        opened = await first.signals.unless_stopped(_result(first.opened))
        if opened is None:
            return 0
        cores = [CoreAtHand(core, config) for core in opened.cores]
        engine = AsyncEngineClient(cores, inputs.text.tokenizer, died.set, seat)
        after.push_async_callback(engine.close)
        engine.join([core.ready for core in opened.cores])
        first.at_end(cores[0].ended)
        siblings = Siblings(Path(start.folder), seat.index, seat.num)
        around = Around(
            engine, opened.facts, opened.created, pool, seat, siblings, startup_seconds=opened.startup_seconds
        )
        parts = make_parts(config, server, Keys.read(config, server), inputs, around)
        relay = Relay(create_app(parts, server), Path(start.folder), parts.drain, parts.open_requests, server)
        after.push_async_callback(relay.close)
        await siblings.start()
        after.push_async_callback(siblings.stop)
        front = await after.enter_async_context(FrontDoor(listener, relay))
        front.open(relay, identity_headers(parts.facts))
        await front.listening()
        os.write(start.sentinel, b"1")
        running = Running(parts.drain, parts.open_requests, died, server.drain_timeout)
        return await run_until_stopped(front, first.signals, running)


async def _result(future: asyncio.Future[ApiOpen]) -> ApiOpen:
    return await future


def main() -> int:
    """Run the process to its end; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lines = open(0, "rb", buffering=0)  # noqa: SIM115 - a buffer's lock would outlive the interpreter
    start = msgspec.json.decode(lines.readline(), type=ApiStart)
    os.set_inheritable(start.sentinel, False)
    set_up_logging(f"server {start.seat.index}", "pagefleet_engine", "pagefleet_kv")
    log_errors_of_uvicorn()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(start, lines))


if __name__ == "__main__":
    sys.exit(main())
