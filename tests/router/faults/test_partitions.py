"""A network that fails between router and engine (F13, F14): a router's process, a faulty link before one engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from tests.fakes.faulty_engine import Answer, Seen, chat, fleet, post, stream, whole
from tests.fakes.faulty_link import FaultyLink, LinkMode, faulty_link
from tests.fakes.route_process import ProgrammedFleet, programmed_fleet, until

EVENT = b'data: {"n": 1}\n\n'
# As long as it takes a busy machine to turn to the other side.
LIMITS = ("--connect-timeout", "2", "--first-byte-timeout", "5", "--gap-timeout", "5", "--policy", "round-robin")


async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Begin a stream that goes silent; answer other requests."""
    await (stream([EVENT], then="silence") if b'"stream": true' in seen.body else whole())(seen, writer)


@contextlib.asynccontextmanager
async def linked(folder: Path) -> AsyncIterator[tuple[ProgrammedFleet, FaultyLink]]:
    """Put a link before the first of two engines."""
    async with programmed_fleet(folder, [answer, answer], *LIMITS) as made, faulty_link(made.engines[0].port) as link:
        made.list_engines(link.url, made.engines[1].url)
        await until(lambda: any("1 new, 1 gone" in line for line in made.router.log))
        await made.router.until_ready(2)
        yield made, link


def engines_of(answers: list[Answer]) -> set[str]:
    assert [(one.status, one.cut) for one in answers] == [(200, False)] * len(answers)
    return {one.headers["x-pagefleet-engine"] for one in answers}


@pytest.mark.fleet
def test_what_an_engine_cannot_be_sent_or_does_not_answer_is_answered_by_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with linked(tmp_path) as (made, link):
            modes: list[LinkMode] = ["reset", "hole", "full"]
            for mode in modes:
                assert engines_of(await made.router.ask_many(8)) == {"e0", "e1"}
                await link.set(mode)
                assert engines_of(await made.router.ask_many(6)) == {"e1"}, mode
                await link.set("good")
                await made.router.until_ready(2)
            assert await made.router.metric("retries_total") > 0
            await link.set("lossy")
            assert engines_of(await made.router.ask_many(40)) == {"e0", "e1"}
            assert link.num_late > 0, "late is not lost"

    asyncio.run(scenario())


@pytest.mark.fleet
def test_a_stream_that_a_partition_cuts_ends_with_one_error_event(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with linked(tmp_path) as (made, link):
            made.list_engines(link.url)
            await made.router.until_ready(1)
            modes: list[tuple[LinkMode, str]] = [("reset", "engine_lost"), ("hole", "engine_timeout")]
            for mode, code in modes:
                client = await made.router.connect()
                await client.send(post(chat(stream=True)))
                head = await client.head()
                assert (await client.chunk()).startswith(EVENT)
                await link.set(mode)
                async with asyncio.timeout(60):
                    body = (await client.rest(head)).body
                assert b"[DONE]" not in body
                last = body.strip().split(b"\n\n")[-1]
                assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
                assert body.count(b'"error"') == 1
                await link.set("good")
                await made.router.until_ready(1)
                assert (await made.router.ask()).status == 200
            await until(lambda: made.engines[0].num_open == 0)

    asyncio.run(scenario())


def test_kernels_look_for_hosts_that_vanished(tmp_path: Path) -> None:
    """F14: with nothing to read for hours a lost host is found by the connection's own probes, in under 30 seconds."""
    wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
    known = {name: value for name, value in wanted.items() if hasattr(socket, name)}

    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as made:
            assert (await made.ask(post(chat()))).status == 200
            (connection,) = made.router.pools.pool(made.engines[0].url).idle
            assert connection._transport is not None
            raw = connection._transport.get_extra_info("socket")
            assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert {name: raw.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in known} == known

    uvloop.run(scenario())
