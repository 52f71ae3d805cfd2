"""A real `pagefleet-route` process, what tests ask of it from outside, and programmed engines for it.

No test in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagefleet_protocol.endpoints import Endpoint, encode_endpoints
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.faulty_engine import Answer, Behaviour, Client, FaultyEngine, chat, post

WITHIN_S = 300.0


async def until(holds: Callable[[], bool | Awaitable[bool]], within: float = WITHIN_S) -> None:
    """Wait for something that others bring about."""
    async with asyncio.timeout(within):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


@dataclass
class RouteProcess:
    """One router."""

    process: asyncio.subprocess.Process
    port: int = 0
    num_silent: float = 0.0
    log: list[str] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def ask(self, request: bytes | None = None) -> Answer:
        """Send one request on a connection of its own."""
        client = await self.connect()
        async with asyncio.timeout(WITHIN_S):
            await client.send(post(chat()) if request is None else request)
            answer = await client.answer()
        client.close()
        self.clients.remove(client)
        return answer

    async def ask_many(self, num: int, request: bytes | None = None) -> list[Answer]:
        """Send some at once."""
        return list(await asyncio.gather(*(self.ask(request) for _ in range(num))))

    async def get(self, path: str) -> Answer:
        return await self.ask(f"GET {path} HTTP/1.1\r\nhost: r\r\n\r\n".encode())

    async def metric(self, name: str, **labels: str) -> float:
        """Return a series, or the sum of those that have these labels."""
        while True:
            text = (await self.get("/metrics")).body.decode()
            samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
            silent = sum(one.value for one in samples if one.name == "pagefleet_router_silent_workers_total")
            if silent == self.num_silent:
                break
            self.num_silent = silent  # one of its workers was stalled, and is missing in the sums
        wanted = [one for one in samples if one.name == f"pagefleet_router_{name}"]
        return sum(one.value for one in wanted if labels.items() <= one.labels.items())

    async def num_in_state(self, state: str) -> float:
        return await self.metric("endpoints", state=state)

    async def until_ready(self, engines: int) -> None:
        """Wait until so many engines may get requests."""

        async def are_ready() -> bool:
            return await self.num_in_state("ready") == engines

        await until(are_ready)

    async def ended(self) -> int:
        async with asyncio.timeout(WITHIN_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def route_process(*flags: str, stdout: int = asyncio.subprocess.DEVNULL) -> AsyncIterator[RouteProcess]:
    """Start a router on a free port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagefleet_router.cli", "--port", "0", *flags,
        stdout=stdout, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    made = RouteProcess(process)
    reading = asyncio.create_task(_read_log(made))
    try:
        await until(lambda: made.port > 0 or process.returncode is not None)
        assert made.port, "".join(made.log)
        yield made
    finally:
        for client in made.clients:
            client.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading
        assert "Traceback" not in "".join(made.log)


async def _read_log(made: RouteProcess) -> None:
    assert made.process.stderr is not None
    async for line in made.process.stderr:
        made.log.append(line.decode())
        _, found, address = made.log[-1].partition("listening on http://127.0.0.1:")
        if found:
            made.port = int(address.split(",")[0])


@dataclass
class ProgrammedFleet:
    """A router process and the engines of this process that it knows from a file."""

    router: RouteProcess
    engines: list[FaultyEngine]
    file: Path

    def list_engines(self, *urls: str, model: str = "m") -> None:
        write_endpoints(self.file, *(Endpoint(f"e{i}", url, model) for i, url in enumerate(urls)))

    @property
    def shares(self) -> list[int]:
        """How many requests each engine got."""
        return [len(engine.seen) for engine in self.engines]


def write_endpoints(file: Path, *endpoints: Endpoint) -> None:
    replace_file(file, encode_endpoints(endpoints))


def replace_file(file: Path, content: bytes) -> None:
    """Change a file as a whole."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.replace(file)


@contextlib.asynccontextmanager
async def programmed_engines(*behaviours: Behaviour) -> AsyncIterator[list[FaultyEngine]]:
    engines = [FaultyEngine(behave) for behave in behaviours]
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.kill()
        await asyncio.sleep(0.02)  # transports close in the next turns of the loop


@contextlib.asynccontextmanager
async def programmed_fleet(
    folder: Path, behaviours: Sequence[Behaviour], *flags: str
) -> AsyncIterator[ProgrammedFleet]:  # fmt: skip
    """Start one engine per behaviour (all of model `m`) and a router, and wait until it may send to all of them."""
    file = folder / "endpoints.json"
    async with programmed_engines(*behaviours) as engines:
        write_endpoints(file, *(Endpoint(f"e{i}", engine.url, "m") for i, engine in enumerate(engines)))
        async with route_process("--endpoints-file", str(file), *flags) as router:
            await router.until_ready(len(engines))
            yield ProgrammedFleet(router, engines, file)
