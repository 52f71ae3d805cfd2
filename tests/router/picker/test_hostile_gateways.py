"""What gateways send that is cut, too much, or out of order: it is told from a whole answer, bounded, and let go."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import uvloop
from pagefleet_router import app
from pagefleet_router.picker import server
from pagefleet_router.picker.ext_proc import Phase, read_message
from pagefleet_router.picker.protobuf import WireError, embedded

from tests.fakes.ext_proc_schema import (
    FULL_DUPLEX,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from tests.fakes.faulty_engine import CHAT, Fleet, silent, stream, whole
from tests.fakes.faulty_link import FaultyLink
from tests.fakes.gated_fleet import gated, in_flight, picks
from tests.fakes.played_gateway import PROCESS, Gateway, ask, gateway

HEAD = {":method": "POST", ":path": CHAT}
ANSWER = {":status": "200", "content-type": "text/event-stream"}


class Spoken:
    """One stream, word by word."""

    def __init__(self, g: Gateway) -> None:
        self.stream: Any = g.channel.stream_stream(
            PROCESS, ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )()

    async def say(self, **part: Any) -> None:
        await self.stream.write(ProcessingRequest(**part))

    async def hear(self) -> Any:
        return await self.stream.read()

    async def pick(self, body: bytes = b"", answer_mode: int = FULL_DUPLEX) -> None:
        """Have an engine chosen."""
        modes = {"request_body_mode": FULL_DUPLEX, "response_body_mode": answer_mode}
        await self.say(request_headers=head(HEAD), protocol_config=modes)
        await self.say(request_body=HttpBody(body=body or ask(stream=True), end_of_stream=True))
        for kind in ("request_headers", "request_body"):
            assert (await self.hear()).WhichOneof("kind") == kind

    async def answered(self, *parts: bytes, **fields: str) -> None:
        """Show the beginning of an answer."""
        await self.say(response_headers=head({**ANSWER, **{k.replace("_", "-"): v for k, v in fields.items()}}))
        assert (await self.hear()).WhichOneof("kind") == "response_headers"
        for part in parts:
            await self.say(response_body=HttpBody(body=part))
            assert (await self.hear()).WhichOneof("kind") == "response_body"


def head(fields: dict[str, str], ends: bool = False) -> Any:
    given = [HeaderValue(key=name, raw_value=value.encode()) for name, value in fields.items()]
    return HttpHeaders(headers=HeaderMap(headers=given), end_of_stream=ends)


def statuses(f: Fleet) -> dict[int, int]:
    return {status: count for (_, status), count in f.router.metrics.requests.items() if count}


def test_what_a_gateway_whose_machine_is_gone_held_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PING_MS", 300)
    monkeypatch.setattr(server, "_PONG_MS", 300)

    async def scenario() -> None:
        async with gated(tmp_path, silent) as (f, _):
            assert f.router.config.endpoint_picker_port is not None
            link = FaultyLink(f.router.config.endpoint_picker_port)
            await link.start()
            async with gateway(link.port) as g:
                spoken = Spoken(g)
                await spoken.pick()
                assert in_flight(f) == [1]
                await link.set("hole")
                await f.until(lambda: in_flight(f) == [0])
                assert f.router.budget.live_requests == 0
            await link.stop()

    uvloop.run(scenario())


@pytest.mark.parametrize("goes", ["cancel", "half-close"])
def test_an_answer_that_is_cut_is_no_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes: str) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole()) as (f, g):
            assert f.router.gateways is not None
            outliers = f.router.gateways.picker.services.dispatcher.outliers
            succeeded: list[str] = []
            monkeypatch.setattr(outliers, "succeeded", succeeded.append)
            spoken = Spoken(g)
            await spoken.pick()
            await spoken.answered(b"data: 1\n\n")
            if goes == "cancel":
                spoken.stream.cancel()
            else:
                await spoken.stream.done_writing()
            await f.until(lambda: in_flight(f) == [0] and bool(statuses(f)))
            assert statuses(f) == {499: 1}
            assert not succeeded

    uvloop.run(scenario())


def test_a_stream_takes_as_many_tokens_as_it_has_events_however_they_are_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, stream([])) as (f, g):
            spoken = Spoken(g)
            await spoken.pick()
            await spoken.answered(b"data: 1\n\n" * 40 + b"data: 2\n", b"\ndata: 3\n\n")
            assert f.router.gateways is not None
            (one,) = f.router.gateways.picker.inside
            assert one.answer is not None
            assert one.answer.num_tokens == 42
            spoken.stream.cancel()

    uvloop.run(scenario())


@pytest.mark.parametrize(
    "fields", [{f"h{n}": "" for n in range(101)}, {"long": "x" * 65_536}, {f"h{n}": "" for n in range(100_000)}]
)
def test_a_head_over_the_limits_is_431_before_anything_is_kept(tmp_path: Path, fields: dict[str, str]) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole()) as (f, g):
            answer = (await g.send(ask(), fields=list(fields.items()))).answer
            assert (answer.status, answer.error["code"]) == (431, "head_too_large")
            fitting = [(f"h{n}", "") for n in range(100)]
            assert (await g.send(ask(), fields=fitting)).answer.status == 200
            assert picks(f) == {"refused": 1, "picked": 1}

    uvloop.run(scenario())


def test_an_answers_head_over_the_limits_is_garbage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole()) as (f, g):
            spoken = Spoken(g)
            await spoken.pick()
            await spoken.say(response_headers=head({**ANSWER, **{f"h{n}": "" for n in range(101)}}))
            said = (await spoken.hear()).immediate_response
            assert said.status.code == 502
            assert f.router.metrics.failures == {"garbage": 1}
            await f.until(lambda: in_flight(f) == [0])
            assert picks(f) == {"picked": 1}

    uvloop.run(scenario())


def test_messages_of_many_empty_fields_are_put_down_soon() -> None:
    started = time.process_time()
    for empty in (b"\x0a\x00", b"\x10\x00", b"\x22\x00"):
        many = empty * 4_000_000
        found = read_message(embedded(Phase.REQUEST_HEADERS, embedded(1, many)))
        assert (found.fits, list(found.fields)) == (False, [])
        for message in (many, embedded(Phase.REQUEST_BODY, many), embedded(8, many) + embedded(2, b"")):
            with pytest.raises(WireError, match="over"):
                read_message(message)
    assert time.process_time() - started < 2


def test_a_second_head_on_one_stream_is_no_message_and_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole()) as (f, g):
            spoken = Spoken(g)
            await spoken.pick()
            await spoken.say(request_headers=head({**HEAD, ":method": "GET"}, ends=True))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                assert await spoken.hear() is None
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await f.until(lambda: in_flight(f) == [0])
            assert f.router.budget.live_requests == 0

    uvloop.run(scenario())


@pytest.mark.parametrize("status", ["9" * 5000, "", "2000", "-20"])
def test_an_answers_status_that_is_none_counts_as_502(tmp_path: Path, status: str) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole()) as (f, g):
            spoken = Spoken(g)
            await spoken.pick()
            await spoken.say(response_headers=head({":status": status}, ends=True))
            assert (await spoken.hear()).WhichOneof("kind") == "response_headers"
            await f.until(lambda: bool(statuses(f)))
            assert statuses(f) == {502: 1}

    uvloop.run(scenario())


def test_after_the_choice_the_body_is_neither_kept_nor_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole(), policy="auto", kv_events=False) as (f, g):
            assert f.router.gateways is not None
            picker = f.router.gateways.picker
            spoken = Spoken(g)
            await spoken.pick(ask("x" * 40_000))
            await f.until(lambda: picker.memory.num_bytes == 0)
            (one,) = picker.inside
            assert one.choice is not None
            assert (one.request.body, one.request.headers, one.view.pieces) == (b"", [], ())
            spoken.stream.cancel()

    uvloop.run(scenario())


@pytest.mark.parametrize(("body", "failure"), [(b'{"code":"server_shutting_down"}', "stopping"), (b"{}", "ending")])
def test_an_engine_that_ends_is_known_to_and_one_told_to_stop_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, failure: str
) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole()) as (f, g):
            assert f.router.gateways is not None
            ending: list[str] = []
            dispatcher = f.router.gateways.picker.services.dispatcher
            monkeypatch.setattr(type(dispatcher), "ending", lambda _, engine: ending.append(engine.id))
            spoken = Spoken(g)
            await spoken.pick()
            told = {":status": "503", "connection": "close", "x-pagefleet-incarnation": "1" * 32}
            await spoken.say(response_headers=head(told))
            await spoken.hear()
            assert ending == ["e0"]
            await spoken.say(response_body=HttpBody(body=body, end_of_stream=True))
            await f.until(lambda: bool(statuses(f)))
            assert f.router.metrics.failures == {failure: 1}

    uvloop.run(scenario())


def test_a_strangers_answer_is_no_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole(200, b"{}", "x-pagefleet-model: another\r\n")) as (f, g):
            assert f.router.gateways is not None
            succeeded: list[str] = []
            outliers = f.router.gateways.picker.services.dispatcher.outliers
            monkeypatch.setattr(outliers, "succeeded", succeeded.append)
            await g.send(ask())
            await f.until(lambda: bool(statuses(f)))
            assert f.router.metrics.failures == {"stranger": 1}
            assert not succeeded

    uvloop.run(scenario())


def test_while_a_router_leaves_gateways_are_answered_for_a_moment_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def scenario() -> None:
        async with gated(tmp_path, whole(), drain_timeout=20.0) as (f, g):
            drain = asyncio.create_task(f.router.drain())
            await f.until(lambda: f.router.front.leaving)
            assert await g.health("readiness") == 2
            assert (await g.send(ask())).answer.status == 200
            clock.now += 1.0
            await drain

    uvloop.run(scenario())


def test_only_requests_for_which_no_engine_is_ready_count_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gated(tmp_path, whole(), max_concurrent=1) as (f, g):
            f.router.budget.request_began()
            assert (await g.send(ask())).answer.status == 503
            assert picks(f) == {"shed": 1}
            f.router.budget.request_ended(0)
            f.engines[0].ready = 503
            await f.until(lambda: f.num_usable() == 0)
            assert (await g.send(None, path="/readyz")).answer.status == 503
            assert picks(f) == {"shed": 1, "refused": 1}
            assert (await g.send(ask())).answer.status == 503
            assert picks(f) == {"shed": 1, "refused": 1, "no_engine": 1}

    uvloop.run(scenario())
