"""Streams that wait: comments meanwhile, then events, or an error as an event."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from pagefleet_protocol.errors import ErrorShape
from pagefleet_router.exchange.delivery import COMMENT, engines_error
from pagefleet_router.wire.client_connection import ConnectionTiming, HoldTiming

from tests.fakes.faulty_engine import (
    SSE_HEAD,
    Behaviour,
    Client,
    Fleet,
    Seen,
    chat,
    chunked,
    fleet,
    post,
    raw,
    reset,
    stream,
    whole,
)

HOLD = ConnectionTiming(hold=HoldTiming(first=0.05, period=0.1))
EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(5)] + [b"data: [DONE]\n\n"]
STREAM = post(chat(stream=True))
LATE_HEADERS = re.compile(rb"^: x-pagefleet-.*\n(?:: .*\n)*\n", re.MULTILINE)


def run(folder: Path, check: Callable[[Fleet], Awaitable[None]], *behaviours: Behaviour, **settings: Any) -> None:
    """Run with engines that are not ready at first, so that requests wait."""

    async def scenario() -> None:
        settings.setdefault("cold_start_timeout", 600.0)
        async with fleet(folder, *behaviours, timing=HOLD, **settings) as f:
            for engine in f.engines:
                engine.ready = 503
            await f.until(lambda: f.num_usable() == 0)
            await check(f)
            await f.until(lambda: f.router.budget.live_requests == 0)
            assert f.router.gate.num_waiting == 0

    uvloop.run(scenario())


async def held(f: Fleet, num_comments: int = 2) -> Client:
    """Send a stream's request and read its head and some comments."""
    client = await f.connect()
    await client.send(STREAM)
    async with asyncio.timeout(60):
        head = await client.head()
        assert head.status == 200
        assert head.headers["content-type"].startswith("text/event-stream")
        assert "x-request-id" in head.headers
        assert "x-pagefleet-engine" not in head.headers
        for _ in range(num_comments):
            assert await client.chunk() == COMMENT
    return client


async def rest(client: Client) -> bytes:
    """Return what comes after the comments, up to the end."""
    return without_comments(b"".join([part async for part in pieces(client)]))


def without_comments(body: bytes) -> bytes:
    return LATE_HEADERS.sub(b"", body.replace(COMMENT, b""))


async def pieces(client: Client) -> AsyncIterator[bytes]:
    """Yield what comes, up to the end."""
    async with asyncio.timeout(60):
        while part := await client.chunk():
            yield part


def wake(f: Fleet) -> None:
    for engine in f.engines:
        engine.ready = 200


def test_events_follow_the_comments_without_a_second_head(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        client = await held(f)
        wake(f)
        assert await rest(client) == b"".join(EVENTS)
        await client.send(STREAM)
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"".join(EVENTS)), "the connection is still good"
        assert f.router.metrics.streams_cut == 0
        assert f.router.metrics.first_token["m"].total > 0.05, "it counts from the arrival"

    run(tmp_path, check, stream(EVENTS))


def test_who_answers_and_why_is_told_where_the_head_was_too_early(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        client = await f.connect()
        await client.send(post(chat(stream=True), headers="x-pagefleet-explain: 1\r\n"))
        async with asyncio.timeout(60):
            head = await client.head()
            assert not {"x-pagefleet-engine", "x-pagefleet-explain"} & set(head.headers)
        wake(f)
        text = b"".join([part async for part in pieces(client)]).replace(COMMENT, b"").decode()
        engine, explain, *events = text.split("\n", 3)
        assert engine.startswith(": x-pagefleet-engine: e")
        name, _, rows = explain.partition("[")
        assert name == ": x-pagefleet-explain: "
        assert engine.rpartition(" ")[2] in {row["engine"] for row in json.loads(f"[{rows}")}
        assert events == ["", b"".join(EVENTS).decode()], "one comment, before the first event"

    run(tmp_path, check, stream(EVENTS), explain=True, policy="auto")


def test_an_answer_in_one_piece_that_waited_has_these_headers(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        client = await f.connect()
        await client.send(post(chat(), headers="x-pagefleet-explain: 1\r\n"))
        await f.until(lambda: f.router.gate.num_waiting == 1)
        wake(f)
        answer = await client.answer()
        rows = json.loads(answer.headers["x-pagefleet-explain"])
        assert (answer.headers["x-pagefleet-engine"], [row["engine"] for row in rows]) == ("e0", ["e0"])

    run(tmp_path, check, whole(), explain=True, policy="auto")


@pytest.mark.parametrize(
    ("behave", "code"),
    [
        (whole(400, b'{"error":{"message":"no","code":"bad"}}'), "bad"),
        (whole(500, b'{"error":{"message":"no","code":"broken"}}\n'), "broken"),
        (whole(400, b"plain words"), "engine_failed"),
        (whole(200, b'{"id":\n1}'), "engine_failed"),
        (whole(400, b"x" * 200_000), "engine_failed"),
        (raw(b"HTTP/1.1 400 X\r\ncontent-length: 9\r\n\r\n{"), "engine_lost"),
        (reset, "engine_lost"),
        (raw(SSE_HEAD + chunked(b'data: {"half')), "engine_lost"),
    ],
    ids=["400", "500", "no JSON", "two lines", "large", "cut", "reset", "half an event"],
)
def test_what_goes_wrong_then_is_an_event(tmp_path: Path, behave: Behaviour, code: str) -> None:
    async def check(f: Fleet) -> None:
        client = await held(f, 1)
        wake(f)
        text = await rest(client)
        assert text.count(b"data: ") == 1
        assert text.endswith(b"\n\n")
        assert json.loads(text.removeprefix(b"data: "))["error"]["code"] == code
        assert f.router.metrics.streams_cut == 1
        f.engines[0].behave = whole()
        await client.send(post(chat()))
        assert (await client.answer()).status == 200

    run(tmp_path, check, behave)


def test_a_failed_attempt_is_made_up_for_elsewhere(tmp_path: Path) -> None:
    both = asyncio.Event()

    async def check(f: Fleet) -> None:
        async def half(seen: Seen, writer: asyncio.StreamWriter) -> None:
            await both.wait()
            await raw(SSE_HEAD + chunked(b"data: half"))(seen, writer)

        f.engines[0].behave = half
        client = await held(f, 1)
        f.engines[0].ready = 200
        await f.until(lambda: bool(f.engines[0].seen))
        f.engines[1].ready = 200
        await f.until(lambda: f.num_usable() == 2)
        both.set()
        assert await rest(client) == b"".join(EVENTS)

    run(tmp_path, check, whole(), stream(EVENTS))


def test_who_waits_too_long_hears_so_in_an_event(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        client = await held(f, 1)
        f.router.gate.check(time.monotonic() + 600.0)
        text = await rest(client)
        assert json.loads(text.removeprefix(b"data: "))["error"]["code"]

    run(tmp_path, check, whole(), cold_start_timeout=600.0)


def test_other_requests_just_wait(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        client = await f.connect()
        await client.send(post(chat()))
        await held(f, 3)
        assert len(f.clients[0].reader._buffer) == 0  # type: ignore[attr-defined]
        wake(f)
        assert (await client.answer()).json == {"ok": True}
        f.clients[1].close()

    run(tmp_path, check, whole())


def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        client = await held(f, 1)
        early = await f.connect()
        await early.send(STREAM)
        await f.until(lambda: f.router.gate.num_waiting == 2)
        client.close()
        early.close()
        await f.until(lambda: f.router.gate.num_waiting == 0)
        wake(f)
        await f.until(lambda: f.num_usable() == 1)
        assert f.engines[0].seen == []

    run(tmp_path, check, whole())


def test_a_client_of_http_1_0_is_held_too(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        client = await f.connect()
        body = json.dumps(chat(stream=True)).encode()
        path = b"POST /v1/chat/completions HTTP/1.0\r\n"
        await client.send(path + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(60):
            head = await client.head()
            assert "transfer-encoding" not in head.headers
            assert await client.reader.readexactly(len(COMMENT)) == COMMENT
            wake(f)
            answer = await client.rest(head)
        assert without_comments(answer.body) == b"".join(EVENTS)

    run(tmp_path, check, stream(EVENTS))


@pytest.mark.parametrize("woken", [True, False])
def test_a_drain_serves_those_who_wait_or_tells_them(tmp_path: Path, woken: bool) -> None:
    async def check(f: Fleet) -> None:
        client = await held(f, 1)
        silent = await f.connect()
        await silent.send(post(chat()))
        await f.until(lambda: f.router.gate.num_waiting == 2)
        draining = asyncio.ensure_future(f.router.drain())
        if woken:
            wake(f)
        text = await rest(client)
        answer = await silent.answer()
        await draining
        if woken:
            assert text == b"".join(EVENTS)
            assert answer.status == 200
        else:
            assert json.loads(text.removeprefix(b"data: "))["error"]["code"] == "server_shutting_down"
            assert (answer.status, answer.error["code"]) == (503, "server_shutting_down")

    run(tmp_path, check, stream(EVENTS), drain_timeout=60.0 if woken else 0.3)


def test_error_events_fit_on_a_line() -> None:
    assert engines_error(b' {"a": 1}\n', ErrorShape.CHAT, 0) == b'data: {"a": 1}\n\n'
    for body in (b"", b"text", b'{"a":\n1}', b'{"a":\r1}', b"[1]"):
        assert engines_error(body, ErrorShape.CHAT, 0) is None
