"""Probes: what is made of an answer, and how many connections they take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from pagefleet_router.signals.http_get import ProbeError, Prober

from tests.fakes.faulty_engine import FaultyEngine, fleet, raw, whole

CLOSED = 1
"""Of `_Site.plan`: nothing is answered, and the connection ends."""


class _Site:
    """Answers each request as the test plans it, and counts connections."""

    def __init__(self, *plan: bytes | int) -> None:
        self.plan = list(plan)
        self.num_connections = 0
        self.num_open = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Prober]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        prober = Prober(self.url, 30.0, max_bytes=5)
        try:
            yield prober
        finally:
            prober.close()
            server.close()
            while self.num_open:  # noqa: ASYNC110 - what the prober closed is seen a few turns later
                await asyncio.sleep(0.005)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                answer = self.plan.pop(0)
                if isinstance(answer, int):
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


def run(check: Callable[[], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60):
            await check()

    uvloop.run(scenario())


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LEAVING = b"HTTP/1.1 503 X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def test_an_engine_is_asked_on_one_connection() -> None:
    async def check() -> None:
        site = _Site(OK, b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", OK)
        async with site.running() as prober:
            assert [(await prober.get("/")).body for _ in range(3)] == [b"ok", b"abc", b"ok"]
            assert site.num_connections == 1

    run(check)


def test_a_connection_that_the_engine_closed_is_replaced_once() -> None:
    async def check() -> None:
        site = _Site(OK, CLOSED, OK, LEAVING, OK, CLOSED, CLOSED)
        async with site.running() as prober:
            assert [(await prober.get("/")).status for _ in range(4)] == [200, 200, 503, 200]
            assert site.num_connections == 3, "one was stale, one was said to close"
            with pytest.raises(ProbeError, match="ended early"):
                await prober.get("/")
            assert not site.plan

    run(check)


def test_what_cannot_be_used_costs_its_connection_only() -> None:
    async def check() -> None:
        too_large = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n123456"
        site = _Site(too_large, b"SSH-2.0-x\r\n\r\n", OK)
        async with site.running() as prober:
            with pytest.raises(ProbeError, match="too large"):
                await prober.get("/")
            with pytest.raises(ProbeError, match="not HTTP"):
                await prober.get("/")
            assert (await prober.get("/")).status == 200
        with pytest.raises(ProbeError, match="nothing listens"):
            await prober.get("/")

    run(check)


@pytest.mark.parametrize("host", ["..x", "x" * 64])
def test_what_is_no_host_is_told_at_once(host: str) -> None:
    async def check() -> None:
        with pytest.raises(ProbeError, match="there is no such host"):
            await Prober(f"http://{host}:80", 30.0).get("/")

    run(check)


def test_a_question_that_nobody_waits_for_any_more_takes_its_connection_along() -> None:
    async def check() -> None:
        site = _Site(b"", b"", OK)
        async with site.running() as prober:
            asking = asyncio.ensure_future(prober.get("/"))
            while len(site.plan) == 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            asking.cancel()
            with pytest.raises(ProbeError, match=r"no answer in 0\.05 s"):
                await Prober(site.url, 0.05).get("/")
            assert (await prober.get("/")).body == b"ok", "an answer to the first question would have come first"

    run(check)


def test_an_answer_s_headers_and_its_end() -> None:
    async def check() -> None:
        engine = FaultyEngine(raw(b"HTTP/1.1 201 X\r\nA: b: c\r\na: d\r\nx-Y:z\r\n\r\n12345"))
        await engine.start()
        prober = Prober(engine.url, 30.0)
        answer = await prober.get("/")
        assert (answer.status, answer.body) == (201, b"12345")
        assert (answer.headers["a"], answer.headers["x-y"]) == ("d", "z")
        prober.close()
        await engine.kill()

    run(check)


def test_a_fleet_s_probes_keep_one_connection_per_engine(tmp_path: Path) -> None:
    async def check() -> None:
        async with fleet(tmp_path, whole(), whole()) as f:
            first, second = f.engines
            asked = [engine.num_probes for engine in f.engines]
            await f.until(lambda: all(e.num_probes > n + 6 for e, n in zip(f.engines, asked, strict=True)))
            assert [engine.num_connections for engine in f.engines] == [1, 1]
            f.write_endpoints(f.router.table.snapshot.engines[0].endpoint)
            await f.until(lambda: second.num_connected == 0)
            assert first.num_connected == 1

    run(check)
