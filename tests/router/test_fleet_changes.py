"""The endpoints file edited under load, draining, signals, and memory over many requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from pagefleet_protocol.endpoints import Endpoint, encode_endpoints
from pagefleet_router.exchange.exchange import Exchange
from pagefleet_router.wire.client_connection import ClientConnection
from pagefleet_router.wire.client_request import ClientRequest

from tests.fakes.faulty_engine import (
    SSE_HEAD,
    Behaviour,
    FaultyEngine,
    Fleet,
    Seen,
    chat,
    chunked,
    fleet,
    post,
    silent,
    stream,
    whole,
)
from tests.fakes.route_process import RouteProcess, route_process, until

EVENT = b'data: {"n": 1}\n\n'


def test_engines_come_and_go_with_the_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), whole(), whole()) as f:
            urls = [engine.url for engine in f.engines]
            f.write_endpoints(Endpoint("e1", urls[1], "m"))
            await f.until(lambda: f.num_usable() == 1)
            assert {(await f.ask(post(chat()))).headers["x-pagefleet-engine"] for _ in range(8)} == {"e1"}
            f.write_endpoints(Endpoint("e1", urls[1], "m", draining=True), Endpoint("e2", urls[2], "m"))
            await f.until(lambda: [e.state for e in f.router.table.snapshot.engines] == ["draining", "ready"])
            assert {(await f.ask(post(chat()))).headers["x-pagefleet-engine"] for _ in range(8)} == {"e2"}
            (tmp_path / "endpoints.json").write_text('{"endpoints": [')
            await asyncio.sleep(0.6)
            assert (await f.ask(post(chat()))).status == 200, "what cannot be read changes nothing"
            f.write_endpoints()
            await f.until(lambda: not f.router.table.snapshot.engines)
            answer = await f.ask(post(chat()))
            assert (answer.status, answer.error["code"]) == (503, "no_engine_ready")

    uvloop.run(scenario())


def test_a_planned_drain_is_no_trouble_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            [engine] = f.engines
            f.write_endpoints(Endpoint("e0", engine.url, "m"))
            await f.until(lambda: f.num_usable() == 1)
            f.write_endpoints(Endpoint("e0", engine.url, "m", draining=True))
            await f.until(lambda: "engine e0 is draining" in caplog.messages)
            engine.ready = 503
            await f.until(lambda: not f.router.table.snapshot.engines[0].ready)
            f.router._monitor.mark_refused("e0")
            f.write_endpoints()
            await f.until(lambda: not f.router.table.snapshot.engines)

    logging.getLogger("pagefleet_router").propagate = True
    with caplog.at_level(logging.INFO, "pagefleet_router"):
        uvloop.run(scenario())
    assert not [line for line in caplog.messages if "not ready" in line]


def test_an_engine_that_leaves_the_list_finishes_its_streams(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, stream([EVENT] * 30, gap=0.03), whole()) as f:
            f.write_endpoints(Endpoint("e0", f.engines[0].url, "m"))
            await f.until(lambda: len(f.router.table.snapshot.engines) == 1)
            client = await f.connect()
            await client.send(post(chat(stream=True)))
            await client.head()
            f.write_endpoints(Endpoint("e1", f.engines[1].url, "m"))
            await f.until(lambda: [e.id for e in f.router.table.snapshot.engines] == ["e1"])
            body = b""
            while part := await client.chunk():
                body += part
            assert body == EVENT * 30

    uvloop.run(scenario())


async def begin_drain(f: Fleet) -> asyncio.Task[None]:
    drain = asyncio.ensure_future(f.router.drain())
    await f.until(lambda: f.router.front.leaving)
    return drain


def in_two_parts(go_on: asyncio.Event) -> Behaviour:
    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE_HEAD + chunked(EVENT))
        await go_on.wait()
        writer.write(chunked(EVENT) + b"0\r\n\r\n")

    return answer


def test_draining_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def scenario() -> None:
        async with fleet(tmp_path, in_two_parts(go_on)) as f:
            idle, busy = await f.connect(), await f.connect()
            await idle.send(b"GET /livez HTTP/1.1\r\nhost: r\r\n\r\n")
            await idle.answer()
            await busy.send(post(chat(stream=True)))
            await busy.head()
            drain = await begin_drain(f)
            assert await idle.ended(), "idle connections are closed"
            assert (await f.get("/readyz")).status == 503
            assert (await f.get("/livez")).status == 200
            answer = await f.ask(post(chat()))
            assert (answer.status, answer.error["code"]) == (503, "server_shutting_down")
            assert answer.headers["connection"] == "close"
            go_on.set()
            body = b""
            while part := await busy.chunk():
                body += part
            assert body == EVENT * 2
            await asyncio.wait_for(drain, 30)
            assert await busy.ended()

    uvloop.run(scenario())


def test_what_is_left_at_the_end_of_a_drain_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, stream([EVENT], then="silence"), drain_timeout=0.1) as f:
            begun, waiting = await f.connect(), await f.connect()
            await begun.send(post(chat(stream=True)))
            head = await begun.head()
            f.engines[0].behave = silent
            await waiting.send(post(chat()))
            await f.until(lambda: f.engines[0].num_open == 2)
            drain = await begin_drain(f)
            answer = await begun.rest(head)
            assert answer.body.startswith(EVENT)
            assert b"server_shutting_down" in answer.body
            assert b"[DONE]" not in answer.body
            other = await waiting.answer()
            assert (other.status, other.error["code"]) == (503, "server_shutting_down")
            await drain
            await f.until(lambda: f.engines[0].num_open == 0)

    uvloop.run(scenario())


@contextlib.asynccontextmanager
async def process_fleet(
    folder: Path, behave: Behaviour, *flags: str, stdout: int = asyncio.subprocess.DEVNULL
) -> AsyncIterator[RouteProcess]:
    """Start one engine here and a router as a process of its own."""
    engine, file = FaultyEngine(behave), folder / "endpoints.json"
    await engine.start()
    file.write_bytes(encode_endpoints((Endpoint("e0", engine.url, "m"),)))
    try:
        async with route_process("--endpoints-file", str(file), *flags, stdout=stdout) as router:
            await router.until_ready(1)
            yield router
    finally:
        await engine.kill()
        await asyncio.sleep(0.02)


@pytest.mark.fleet
@pytest.mark.parametrize(("num_signals", "status"), [(1, 0), (2, 1)])
def test_signals_of_a_real_process(tmp_path: Path, num_signals: int, status: int) -> None:
    async def scenario() -> None:
        access_log, pipe, go_on = "--access-log", asyncio.subprocess.PIPE, asyncio.Event()
        async with process_fleet(tmp_path, in_two_parts(go_on), access_log, stdout=pipe) as router:
            client, process = await router.connect(), router.process
            await client.send(post(chat("a secret prompt", stream=True)))
            head = await client.head()
            for _ in range(num_signals):
                process.send_signal(signal.SIGTERM)
                await until(lambda: any("draining 1 requests" in line for line in router.log))
            if num_signals == 1:
                go_on.set()
            answer = await client.rest(head)
            assert (answer.body == EVENT * 2) == (num_signals == 1)
            assert process.stdout is not None
            out = await process.stdout.read()
            assert await router.ended() == status
            assert b"secret" not in out
            records = [json.loads(line) for line in out.splitlines()]
            assert [r["status"] for r in records if r["route"] == "/v1/chat/completions"] == (
                [200] if status == 0 else [499]
            )

    uvloop.run(scenario())


def private_kb(pid: int) -> int:
    """Memory of a process that no file backs, in KiB: RssAnon and what of it was swapped out."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "VmSwap"))


@pytest.mark.fleet
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_flat_over_ten_thousand_requests(tmp_path: Path) -> None:
    async def ask_many(router: RouteProcess, number: int) -> None:
        client = await router.connect()
        for n in range(number):
            await client.send(post(chat(f"{n % 7} " * 700, stream=n % 5 == 0)))
            assert (await client.answer()).status == 200

    async def answer(seen, writer) -> None:  # type: ignore[no-untyped-def]
        await (stream([EVENT] * 4) if b'"stream": true' in seen.body else whole(200, b"x" * 2000))(seen, writer)

    async def scenario() -> None:
        async with process_fleet(tmp_path, answer) as router:
            pid = router.process.pid
            await asyncio.gather(*(ask_many(router, 250) for _ in range(8)))
            warm = private_kb(pid)
            await asyncio.gather(*(ask_many(router, 1250) for _ in range(8)))
            assert private_kb(pid) - warm < 1536
            for client in router.clients:
                client.close()
            await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) < 40)

    uvloop.run(scenario())


def test_nothing_is_left_after_many_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), stream([EVENT] * 3), policy="prefix") as f:
            await f.ask(post(chat("w" * 2000)))
            num_tasks = len(asyncio.all_tasks())
            for _ in range(10):
                await asyncio.gather(*(f.ask(post(chat("w" * 2000, stream=True))) for _ in range(30)))
            await f.until(lambda: not f.router.connections)
            await f.until(lambda: len(asyncio.all_tasks()) <= num_tasks + 2 * 30)
            gc.collect()
            left = [one for one in gc.get_objects() if type(one) in (Exchange, ClientConnection, ClientRequest)]
            assert len(left) <= 2

    uvloop.run(scenario())


def test_help_needs_no_event_loop_and_starting_no_http_client() -> None:
    code = (
        "import sys; from pagefleet_router.cli import ROUTE; ROUTE.parser(); print('uvloop' in sys.modules); "
        "import pagefleet_router.app; print('aiohttp' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"], "an HTTP client is only for discovery in Kubernetes"
