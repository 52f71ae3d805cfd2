"""An engine whose answers and faults a test programs, in the test's own event loop; and a client that sees raw bytes.

No test in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from pagefleet_protocol.endpoints import Endpoint, encode_endpoints
from pagefleet_router.app import Router
from pagefleet_router.config import RouterConfig
from pagefleet_router.scheduling.outliers import OutlierDetector, OutlierRules
from pagefleet_router.signals.monitor import MonitorTiming
from pagefleet_router.wire.client_connection import ConnectionTiming

from tests.fakes.free_ports import free_ports

CHAT = "/v1/chat/completions"
FAST_MONITOR = MonitorTiming(period=0.05, unready_period=0.02, timeout=5.0)
GAUGES = (
    'pagefleet_engine_requests_running{model_name="m"} 0\n'
    'pagefleet_engine_requests_waiting{model_name="m"} 0\n'
    'pagefleet_engine_kv_usage_ratio{model_name="m"} 0\n'
)


@dataclass
class Seen:
    """One request as the engine got it."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


Behaviour = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


def whole(status: int = 200, body: bytes = b'{"ok":true}', extra: str = "") -> Behaviour:
    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}content-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    return answer


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(events: Sequence[bytes], gap: float = 0.0, then: str = "end") -> Behaviour:
    """Send events; `then` ends well, resets, or goes silent."""

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD)
        for event in events:
            writer.write(chunked(event))
            await writer.drain()
            await asyncio.sleep(gap)
        if then == "end":
            writer.write(b"0\r\n\r\n")
        elif then == "reset":
            writer.transport.abort()
        else:
            await asyncio.sleep(3600)

    return answer


async def reset(seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def silent(seen: Seen, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


def raw(data: bytes, close: bool = True) -> Behaviour:
    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()

    return answer


class FaultyEngine:
    """Listens on a free port; probes and questions for facts are answered from fields, all else by `behave`."""

    def __init__(self, behave: Behaviour | None = None) -> None:
        self.behave = behave or whole()
        self.ready = 200
        self.readiness = b"{}"
        """The body of that answer."""
        self.is_hung = False
        """Whether probes get no answer."""
        self.metrics = GAUGES
        self.incarnation: str | None = None
        self.internal: dict[str, bytes] = {}
        """What /internal/v1/... answers; 404 for what is not here."""
        self.num_asked: Counter[str] = Counter()
        """Of /internal/v1/..., by path."""
        self.seen: list[Seen] = []
        self.num_connections = 0
        """Ever made."""
        self.num_probes = 0
        self.num_open = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_connected(self) -> int:
        """Connections that are open."""
        return len(self._writers)

    async def start(self) -> None:
        self.port = self.port or free_ports()  # one that nobody takes while it is killed
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def kill(self) -> None:
        """End as a killed process does: nothing listens, every connection is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.num_connections += 1
        try:
            while (seen := await read_request(reader)) is not None:
                path = seen.line.split(" ")[1]
                if path in ("/readyz", "/metrics"):
                    self.num_probes += 1
                    body = self.metrics.encode() if path == "/metrics" else self.readiness
                    while self.is_hung:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                    extra = f"x-pagefleet-incarnation: {self.incarnation}\r\n" if self.incarnation else ""
                    await whole(self.ready if path == "/readyz" else 200, body, extra)(seen, writer)
                    continue
                if path.startswith("/internal/"):
                    self.num_asked[path] += 1
                    await whole(200 if path in self.internal else 404, self.internal.get(path, b"{}"))(seen, writer)
                    continue
                self.seen.append(seen)
                await self._answer(seen, reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer, unless the client leaves first."""
        self.num_open += 1
        answering = asyncio.ensure_future(self.behave(seen, writer))
        leaving = asyncio.ensure_future(_until_closed(reader, writer))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ConnectionResetError
            answering.result()
        finally:
            self.num_open -= 1
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)


async def _until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # asyncio tells nobody about a connection's end unless they read.
    while not reader.at_eof() and not writer.is_closing() and reader.exception() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def read_request(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *lines = head[:-4].decode("latin-1").split("\r\n")
    headers = [(key.lower(), value.strip()) for key, _, value in (one.partition(":") for one in lines)]
    length = next((int(value) for key, value in headers if key == "content-length"), 0)
    return Seen(line, headers, await reader.readexactly(length))


@dataclass
class Answer:
    """One answer as the client got it. `cut`: the connection ended before the body's end."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    cut: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass
class Client:
    """One raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """Read one answer, whole or as far as it goes."""
        head = await self.head()
        return await self.rest(head)

    async def head(self) -> Answer:
        line, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        headers = {key.lower(): value.strip() for key, _, value in (one.partition(":") for one in lines)}
        return Answer(int(line.split(" ")[1]), headers)

    async def rest(self, answer: Answer) -> Answer:
        try:
            if answer.status in (204, 304):
                pass  # which have no body
            elif "content-length" in answer.headers:
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
            elif "transfer-encoding" in answer.headers:
                parts = []
                try:
                    while part := await self.chunk():
                        parts.append(part)
                finally:
                    answer.body = b"".join(parts)
            else:
                answer.body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            answer.cut = True
        return answer

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def ended(self) -> bool:
        """Whether nothing more comes."""
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.transport.abort()


def post(body: bytes | dict[str, Any], path: str = CHAT, headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: r\r\n{headers}content-length: {len(data)}\r\n\r\n".encode() + data


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


@dataclass
class Fleet:
    """A router before faulty engines."""

    router: Router
    port: int
    engines: list[FaultyEngine]
    folder: Path
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def ask(self, request: bytes) -> Answer:
        """Send one request on a connection of its own."""
        client = await self.connect()
        await client.send(request)
        try:
            return await client.answer()
        finally:
            client.close()

    async def get(self, path: str, headers: str = "") -> Answer:
        return await self.ask(f"GET {path} HTTP/1.1\r\nhost: r\r\n{headers}\r\n".encode())

    def write_endpoints(self, *endpoints: Endpoint) -> None:
        target = self.folder / "endpoints.json"
        new = target.with_suffix(".new")
        new.write_bytes(encode_endpoints(endpoints))
        new.replace(target)

    async def until(self, condition: Callable[[], bool], within: float = 120.0) -> None:
        """Wait for something that other tasks bring about."""
        async with asyncio.timeout(within):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def keep_ejected(self) -> None:
        """Let no ejection end while the test lasts, however slow the machine is."""
        self.router._dispatcher.outliers = OutlierDetector(OutlierRules(first_ejection=1e6, longest_ejection=1e6))

    def num_usable(self) -> int:
        return sum(map(len, self.router.table.snapshot.usable.values()))


@contextlib.asynccontextmanager
async def fleet(
    folder: Path, *behaviours: Behaviour, timing: ConnectionTiming | None = None, monitor: MonitorTiming = FAST_MONITOR,
    **settings: Any,
) -> AsyncIterator[Fleet]:  # fmt: skip
    """Start one engine per behaviour (all of model `m`) and a router that finds them in its endpoints file."""
    engines = [FaultyEngine(behave) for behave in behaviours]
    for engine in engines:
        await engine.start()
    config = RouterConfig(endpoints_file=folder / "endpoints.json", port=0, **{"policy": "least-load", **settings})
    router = Router(config, timing, monitor, rng=random.Random(0))  # the same ties in every run
    made = Fleet(router, 0, engines, folder)
    made.write_endpoints(*(Endpoint(f"e{i}", engine.url, "m") for i, engine in enumerate(engines)))
    try:
        async with router.running() as made.port:
            await made.until(lambda: made.num_usable() == len(engines))
            yield made
    finally:
        for client in made.clients:
            client.close()
        for engine in engines:
            await engine.kill()
        await asyncio.sleep(0.01)  # transports close in the next turns of the loop


def run(folder: Path, check: Callable[[Fleet], Awaitable[None]], *behaviours: Behaviour, **settings: Any) -> None:
    """Check a fleet, in which nothing of a request is left after; when this returns, its router has ended."""

    async def scenario() -> None:
        async with fleet(folder, *behaviours, **settings) as f:
            await check(f)
            await f.until(lambda: f.router.budget.live_requests == 0)
            assert all(engine.tally.num_requests == 0 for engine in f.router.table.snapshot.engines)

    uvloop.run(scenario())
