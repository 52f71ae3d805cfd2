"""Engines that refuse, reset, lie, go silent or die: retries, ejections, error events, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from pagefleet_protocol.endpoints import Endpoint, OnTrial
from pagefleet_router.scheduling.outliers import OutlierDetector, OutlierRules
from pagefleet_router.signals.monitor import MonitorTiming
from pagefleet_router.wire import engine_call
from pagefleet_router.wire.client_connection import ConnectionTiming

from tests.fakes.faulty_engine import (
    SSE_HEAD,
    Behaviour,
    Fleet,
    Seen,
    chat,
    chunked,
    post,
    raw,
    reset,
    run,
    silent,
    stream,
    whole,
)

EVENT = b'data: {"n": 1}\n\n'
SLOW_MONITOR = MonitorTiming(period=30.0, unready_period=30.0)
"""Probes find nothing before the test is over."""


def sse_error(body: bytes) -> str:
    """Check the end of a stream that broke off, and return the error's code."""
    events = body.split(b"\n\n")
    assert events[-1] == b""
    assert b"[DONE]" not in body
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    code: str = error["code"]
    return code


@pytest.mark.parametrize(
    "fault",
    [
        reset,
        raw(b""),
        raw(b"SSH-2.0-x\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000),
        raw(b"HTTP/1.1 200 OK\r\ncont"),
        whole(502),
        whole(503),
        whole(504),
        raw(SSE_HEAD),
    ],
    ids=["reset", "closed", "garbage", "huge head", "half a head", "502", "503", "504", "head of a stream only"],
)
def test_what_has_not_begun_is_tried_elsewhere(tmp_path: Path, fault: Behaviour) -> None:
    async def check(f: Fleet) -> None:
        for _ in range(12):
            answer = await f.ask(post(chat(stream=True)))
            assert (answer.status, answer.headers["x-pagefleet-engine"]) == (200, "e1")
        assert f.engines[0].seen
        assert sum(f.router.metrics.retries.values()) == len(f.engines[0].seen)

    run(tmp_path, check, fault, whole(), monitor=SLOW_MONITOR, policy="round-robin")


def test_a_refused_connection_is_tried_elsewhere_and_marks_the_engine(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        await f.engines[0].kill()
        answers = await asyncio.gather(*(f.ask(post(chat())) for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert [engine.state for engine in f.router.table.snapshot.engines] == ["unready", "ready"]

    run(tmp_path, check, whole(), whole(), monitor=SLOW_MONITOR)


def test_an_engine_killed_under_load_loses_no_request(tmp_path: Path) -> None:
    killed: list[bool] = []

    async def slow(seen: Seen, writer: asyncio.StreamWriter) -> None:
        while not killed:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await whole()(seen, writer)

    async def check(f: Fleet) -> None:
        f.router._dispatcher.outliers = OutlierDetector(OutlierRules(first_ejection=0.2))
        asked = [asyncio.ensure_future(f.ask(post(chat()))) for _ in range(40)]
        await f.until(lambda: sum(engine.num_open for engine in f.engines) == 40)
        await f.engines[0].kill()
        killed.append(True)
        assert [(await one).status for one in asked] == [200] * 40
        await f.engines[0].start()
        await f.until(lambda: f.num_usable() == 2)

    run(tmp_path, check, slow, slow)


@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_other_errors_are_the_engines_word(tmp_path: Path, status: int) -> None:
    async def check(f: Fleet) -> None:
        answer = await f.ask(post(chat()))
        assert (answer.status, answer.body) == (status, b"no")
        assert sum(len(engine.seen) for engine in f.engines) == 1

    run(tmp_path, check, whole(status, b"no"), whole(status, b"no"))


@pytest.mark.parametrize("status", [500, 501])
def test_what_a_revision_on_trial_fails_is_asked_of_the_old_one(tmp_path: Path, status: int) -> None:
    async def check(f: Fleet) -> None:
        new, old = (engine.url for engine in f.engines)
        f.write_endpoints(Endpoint("new", new, "m", on_trial=OnTrial("r2", 99)), Endpoint("old", old, "m"))
        await f.until(lambda: {"new", "old"} == {one.id for one in f.router.table.snapshot.engines if one.ready})
        answers = [await f.ask(post(chat())) for _ in range(8)]
        assert [answer.status for answer in answers] == [200] * 8
        assert len(f.engines[0].seen) >= 3
        page = (await f.get("/metrics")).body.decode()
        assert 'revision_requests_total{outcome="failed",revision="r2"}' in page

    run(tmp_path, check, whole(status, b"no"), whole())


def test_a_request_that_every_revision_fails_gets_the_engines_word(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        trial = OnTrial("r2", 99)
        f.write_endpoints(
            *(Endpoint(f"e{i}", one.url, "m", on_trial=None if i else trial) for i, one in enumerate(f.engines))
        )
        await f.until(lambda: {"e0", "e1", "e2"} == {one.id for one in f.router.table.snapshot.engines if one.ready})
        answer = await f.ask(post(chat()))
        assert (answer.status, answer.body) == (500, b"no")
        assert sum(len(engine.seen) for engine in f.engines) <= 2

    run(tmp_path, check, *[whole(500, b"no")] * 3)


def test_at_most_two_more_engines_are_asked(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        answer = await f.ask(post(chat()))
        assert (answer.status, answer.body) == (503, b"last word")
        assert sum(len(engine.seen) for engine in f.engines) == 3

    run(tmp_path, check, *[whole(503, b"last word")] * 5)


@pytest.mark.parametrize(
    ("end", "status"), [(reset, 502), (whole(503, extra="Connection: Close\r\n"), 503)], ids=["server", "engine core"]
)
def test_a_request_that_may_kill_engines_meets_only_two(tmp_path: Path, end: Behaviour, status: int) -> None:
    async def check(f: Fleet) -> None:
        answer = await f.ask(post(chat()))
        assert answer.status == status
        assert sum(len(engine.seen) for engine in f.engines) == 2

    run(tmp_path, check, *[end] * 5)


def test_all_that_an_ending_engine_had_is_tried_elsewhere_whatever_the_budget(tmp_path: Path) -> None:
    dead = asyncio.Event()

    def after_death(answer: Behaviour) -> Behaviour:
        async def wait(seen: Seen, writer: asyncio.StreamWriter) -> None:
            await dead.wait()
            await answer(seen, writer)

        return wait

    async def check(f: Fleet) -> None:
        asked = [asyncio.create_task(f.ask(post(chat()))) for _ in range(40)]
        await f.until(lambda: sum(len(engine.seen) for engine in f.engines) == 40)
        num_lost = len(f.engines[0].seen)
        assert num_lost > 8, "more than the budget would allow"
        dead.set()
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        assert f.router.metrics.retries["ending"] == num_lost

    ending = whole(503, extra="connection: close\r\n")
    run(tmp_path, check, after_death(ending), after_death(whole()), monitor=SLOW_MONITOR)


def test_retries_of_failing_engines_stay_within_the_budget(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        num_asked = 200
        for _ in range(num_asked // 20):
            answers = await asyncio.gather(*(f.ask(post(chat())) for _ in range(20)))
            assert {answer.status for answer in answers} <= {502, 503}
        reached = sum(len(engine.seen) for engine in f.engines)
        assert num_asked <= reached <= 1.2 * num_asked + 20, "20 % and the reserve"
        assert f.router.metrics.retries_denied > 0

    run(tmp_path, check, *[whole(503)] * 4)


@pytest.mark.parametrize("end", ["reset", "half an event"])
def test_a_stream_that_breaks_off_ends_with_one_error_event(tmp_path: Path, end: str) -> None:
    broken = stream([EVENT], then="reset") if end == "reset" else raw(SSE_HEAD + chunked(EVENT) + chunked(b'data: {"n'))

    async def check(f: Fleet) -> None:
        client = await f.connect()
        await client.send(post(chat(stream=True)))
        answer = await client.answer()
        assert answer.status == 200
        assert not answer.cut
        assert answer.body.startswith(EVENT)
        assert answer.body.count(b"data: ") == 2
        assert sse_error(answer.body) == "engine_lost"
        assert f.router.metrics.streams_cut == 1
        f.engines[0].behave = whole()
        await client.send(post(chat()))  # the connection is still good
        assert (await client.answer()).status == 200

    run(tmp_path, check, broken)


def test_a_whole_answer_that_breaks_off_closes_the_connection(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        answer = await f.ask(post(chat()))
        assert (answer.status, answer.cut) == (200, True)

    run(tmp_path, check, raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this"))


def test_no_engine(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        f.engines[0].ready = 503
        await f.until(lambda: f.num_usable() == 0)
        for path in ("/readyz", "/health"):
            assert (await f.get(path)).status == 503
        answer = await f.ask(post(chat()))
        assert (answer.status, answer.error["code"]) == (503, "no_engine_ready")
        assert int(answer.headers["retry-after"]) > 0
        assert (await f.get("/livez")).status == 200
        assert [one["id"] for one in (await f.get("/v1/models")).json["data"]] == ["m"]
        f.engines[0].ready = 200
        await f.until(lambda: f.num_usable() == 1)
        assert (await f.ask(post(chat()))).status == 200

    run(tmp_path, check, whole())


def test_an_engine_that_fails_every_request_is_ejected(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        f.keep_ejected()
        statuses = [(await f.ask(post(chat()))).status for _ in range(60)]
        assert statuses.count(500) == 5
        assert set(statuses[-20:]) == {200}
        assert f.router.table.snapshot.engines[0].state == "ejected"
        assert 'endpoints{state="ejected"} 1.0' in (await f.get("/metrics")).body.decode()

    run(tmp_path, check, whole(500), whole())


OWN = whole(500, b"no", "x-pagefleet-fault: request\r\n")
"""How an engine answers that calls a failure the request's own."""


def test_a_client_s_failing_requests_eject_no_engine(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        for number in range(1, 31):
            answer = await f.ask(post(chat()))
            assert (answer.status, answer.body) == (500, b"no")
            assert sum(len(engine.seen) for engine in f.engines) <= 2 * number
        assert [engine.state for engine in f.router.table.snapshot.engines] == ["ready"] * 4
        assert f.router.metrics.ejections == 0

    run(tmp_path, check, *[OWN] * 4)


def test_an_engine_that_alone_blames_the_requests_is_ejected(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        f.keep_ejected()
        assert {(await f.ask(post(chat()))).status for _ in range(20)} == {200}
        assert [engine.state for engine in f.router.table.snapshot.engines] == ["ejected", "ready"]
        assert len(f.engines[0].seen) == 5

    run(tmp_path, check, OWN, whole(), policy="round-robin")


def test_not_more_than_half_is_ejected(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        f.keep_ejected()
        for _ in range(60):
            await f.ask(post(chat()))
        states = [engine.state for engine in f.router.table.snapshot.engines]
        assert states.count("ejected") == 1

    run(tmp_path, check, whole(500), whole(500), whole(500))


def test_silence_before_the_first_byte_has_a_limit(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        answer = await f.ask(post(chat()))
        assert (answer.status, answer.error["code"]) == (504, "engine_timeout")
        await f.until(lambda: f.engines[0].num_open == 0)

    run(tmp_path, check, silent, first_byte_timeout=0.1)


def test_silence_in_a_stream_has_a_limit(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        answer = await f.ask(post(chat(stream=True)))
        assert sse_error(answer.body) == "engine_timeout"
        await f.until(lambda: f.engines[0].num_open == 0)

    run(tmp_path, check, stream([EVENT], then="silence"), gap_timeout=0.1)


def test_an_address_that_swallows_connections(tmp_path: Path) -> None:
    """A listener whose backlog is full answers no SYN, as a lost node does."""

    async def check(f: Fleet) -> None:
        import socket

        hole = socket.create_server(("127.0.0.1", 0), backlog=0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
            fillers.append(filler)
        try:
            pool = f.router.pools.pool(f"http://127.0.0.1:{hole.getsockname()[1]}")
            done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            pool.dial(done.set_result)
            async with asyncio.timeout(30):  # the system itself tries for minutes
                assert str(await done) == "Failure.UNREACHABLE"
        finally:
            for one in (hole, *fillers):
                one.close()

    run(tmp_path, check, whole(), connect_timeout=0.2)


@pytest.mark.parametrize("moment", ["before the answer", "in the stream"])
def test_a_client_that_leaves_ends_the_work_at_once(tmp_path: Path, moment: str) -> None:
    behave = silent if moment == "before the answer" else stream([EVENT] * 10_000, gap=0.02)

    async def check(f: Fleet) -> None:
        clients = [await f.connect() for _ in range(8)]
        for client in clients:
            await client.send(post(chat(stream=True)))
        await f.until(lambda: f.engines[0].num_open == 8)
        if moment == "in the stream":
            for client in clients:
                await client.head()
        for client in clients:
            client.close()
        await f.until(lambda: f.engines[0].num_open == 0)
        await f.until(lambda: f.router.metrics.requests["/v1/chat/completions", 499] == 8)
        assert len(f.engines[0].seen) == 8, "nothing is sent again for a client that left"

    run(tmp_path, check, behave)


def test_a_client_that_leaves_while_an_engine_is_dialled(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        for _ in range(50):
            client = await f.connect()
            await client.send(post(chat()))
            client.close()
        await f.until(lambda: f.router.budget.live_requests == 0 and not f.router.connections)

    run(tmp_path, check, silent)


def test_a_slow_reader_holds_little_and_holds_the_engine_back(tmp_path: Path) -> None:
    sent = 0
    size = 64 * 1024

    async def flood(seen: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(SSE_HEAD)
        for _ in range(1000):
            writer.write(chunked(b"data: " + b"x" * (size - 8) + b"\n\n"))
            await writer.drain()
            sent += size
        writer.write(b"0\r\n\r\n")

    async def check(f: Fleet) -> None:
        client = await f.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post(chat(stream=True)))
        await f.until(lambda: sent > 0)
        last = -1
        while last != sent:
            last = sent
            await asyncio.sleep(0.3)
        assert sent < 24 * 2**20, "kernel buffers and ours, not the whole answer"
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.answer()
        assert len(answer.body) == 1000 * size
        assert not answer.cut

    run(tmp_path, check, flood)


def test_a_reader_that_never_reads_is_cut(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        client = await f.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post(chat(stream=True)))
        await f.until(lambda: f.engines[0].num_open == 1)
        await f.until(lambda: f.engines[0].num_open == 0)
        assert not f.router.connections

    events = [b"data: " + b"x" * 100_000 + b"\n\n"] * 400
    run(tmp_path, check, stream(events), timing=ConnectionTiming(write=0.3))


def test_a_stale_connection_is_replaced_without_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_call, "_STALE_S", 60.0)  # until its end is seen, a busy machine may take a while

    async def once(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await whole()(seen, writer)

    async def check(f: Fleet) -> None:
        first = True

        async def close_on_reuse(seen: Seen, writer: asyncio.StreamWriter) -> None:
            nonlocal first
            if len(f.engines[0].seen) == 2 and first:
                first = False
                writer.transport.abort()
                return
            await whole()(seen, writer)

        f.engines[0].behave = close_on_reuse
        assert (await f.ask(post(chat()))).status == 200
        assert (await f.ask(post(chat()))).status == 200
        assert len(f.engines[0].seen) == 3
        assert f.router.metrics.failures.total() == 0

    run(tmp_path, check, once)


def test_too_many_at_once(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        clients = [await f.connect() for _ in range(2)]
        for client in clients:
            await client.send(post(chat()))
        await f.until(lambda: f.router.budget.live_requests == 2)
        answer = await f.ask(post(chat()))
        assert (answer.status, answer.error["code"]) == (503, "server_is_overloaded")
        assert "retry-after" in answer.headers
        assert (await f.get("/livez")).status == 200
        over = [await f.connect() for _ in range(4)]
        await f.until(lambda: sum(one.reader.at_eof() for one in over) >= 2)
        for client in (*clients, *over):
            client.close()

    run(tmp_path, check, silent, max_concurrent=2, max_connections=4)
