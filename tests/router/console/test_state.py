"""`/console/state` of a router before engines that are programmed to fail, load and answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from pagefleet_protocol.console_state import STATE_PATH, ConsoleState, EngineState, decode_state
from pagefleet_protocol.endpoints import Endpoint, OnTrial
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, encode_facts
from pagefleet_protocol.load_progress import LoadProgress, encode_loading
from pagefleet_router.console import board

from tests.fakes.faulty_engine import GAUGES, Fleet, chat, fleet, post, reset, stream, whole

BUSY = (
    'pagefleet_engine_requests_running{model_name="m"} 3\n'
    'pagefleet_engine_requests_waiting{model_name="m"} 2\n'
    'pagefleet_engine_kv_usage_ratio{model_name="m"} 0.25\n'
)
FACTS = EngineFacts(
    incarnation="1" * 32, model="m", scope="m", block_size=16, num_blocks=64, max_model_len=512, max_num_seqs=8,
    max_num_batched_tokens=512, vocab_size=300, revision="own",
)  # fmt: skip


@pytest.fixture(autouse=True)
def always_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each question answered by a document of its own."""
    monkeypatch.setattr(board, "KEPT_S", 0.0)


async def state_of(f: Fleet, headers: str = "") -> ConsoleState:
    answer = await f.get(STATE_PATH, headers)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/json"
    return decode_state(answer.body)


async def engines_until(f: Fleet, holds: Callable[[dict[str, EngineState]], bool]) -> dict[str, EngineState]:
    """Ask until the engines are as wanted."""
    async with asyncio.timeout(30):
        while True:
            engines = {engine.name: engine for engine in (await state_of(f)).engines}
            if holds(engines):
                return engines
            await asyncio.sleep(0.01)


def run(folder: Path, scenario: Callable[[Fleet], Any], *behaviours: Any, **settings: Any) -> None:
    async def whole_scenario() -> None:
        async with fleet(folder, *behaviours, **settings) as f, asyncio.timeout(60):
            await scenario(f)

    uvloop.run(whole_scenario())


def test_engines_are_shown_with_their_phases_and_figures(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        busy, stalled, gone, loading = f.engines
        busy.metrics = BUSY
        stalled.ready, stalled.readiness = 503, b'{"error":{"code":"engine_stalled"}}'
        loading.ready, loading.readiness = 503, encode_loading(LoadProgress("weights", 25, 100, 1.0))
        await gone.kill()
        coming = Endpoint("e4", loading.url, "m", coming=True, revision="abc")
        f.write_endpoints(*(Endpoint(f"e{i}", engine.url, "m") for i, engine in enumerate(f.engines[:3])), coming)
        found = await engines_until(
            f,
            lambda engines: (
                [engines[name].phase if name in engines else "" for name in ("e0", "e1", "e2", "e4")]
                == ["ready", "unreachable", "unreachable", "loading"]
            ),
        )
        first = found["e0"]
        assert (first.running, first.waiting, first.kv_usage, first.reason) == (3, 2, 0.25, None)
        assert found["e2"].reason == "nothing listens there"
        assert found["e2"].running is None, "what it said last says nothing of now"
        assert (found["e4"].load, found["e4"].revision) == (0.25, "abc")
        assert found["e4"].reason == "reads weights: 25%, 25 of 100 bytes"
        assert f.num_usable() == 1

    run(tmp_path, scenario, *(whole(),) * 4)


def test_an_engine_tells_its_revision_where_whoever_lists_it_does_not(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        for engine in f.engines:
            engine.incarnation = FACTS.incarnation
            engine.internal[FACTS_PATH] = encode_facts(FACTS)
        urls = [engine.url for engine in f.engines]
        f.write_endpoints(
            Endpoint("e0", urls[0], "m"),
            Endpoint("e1", urls[1], "m", revision="listed"),
            Endpoint("e2", urls[2], "m", on_trial=OnTrial("tried", 5)),
        )
        wanted = {"e0": "own", "e1": "listed", "e2": "tried"}
        await engines_until(f, lambda engines: {name: one.revision for name, one in engines.items()} == wanted)

    run(tmp_path, scenario, *(whole(),) * 3)


def test_an_engine_that_is_still_coming_gets_no_request_though_it_says_that_it_is_ready(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        f.write_endpoints(Endpoint("e0", f.engines[0].url, "m", coming=True))
        found = await engines_until(f, lambda engines: engines["e0"].phase == "starting")
        assert found["e0"].reason == "whoever lists it has yet to find it ready"
        assert (await f.ask(post(chat()))).status == 503
        assert b'endpoints{state="unready"} 0.0' in (await f.get("/metrics")).body, "it is no part of the fleet yet"
        f.write_endpoints(Endpoint("e0", f.engines[0].url, "m"))
        await f.until(lambda: f.num_usable() == 1)
        assert (await f.ask(post(chat()))).status == 200

    run(tmp_path, scenario, whole())


def test_a_request_is_shown_with_the_way_that_it_took(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        answer = await f.ask(post(chat(stream=True), headers="x-request-id: mine\r\n"))
        state = await state_of(f)
        (request,) = state.requests
        ids = {engine.name for engine in state.engines}
        assert (request.id, request.route, request.model) == ("mine", "/v1/chat/completions", "m")
        assert (request.status, request.error, request.tenant) == (200, None, "")
        assert (request.engine, request.attempts) == (answer.headers["x-pagefleet-engine"], 2)
        assert set(request.tried) == ids - {request.engine}
        assert request.ttft_seconds is not None
        assert 0 <= request.ttft_seconds <= request.seconds
        (fault,) = state.faults
        assert fault.what == f"Engine {request.tried[0]} was lost while it had a request."
        assert fault.remedy.startswith("Its log")
        assert (fault.engine, fault.count) == (request.tried[0], 1)
        counts = {engine.name: engine.faults for engine in state.engines}
        assert counts == {request.tried[0]: 1, request.engine: 0}

    # Round robin begins at the first.
    run(tmp_path, scenario, reset, stream([b"data: 1\n\n", b"data: [DONE]\n\n"]), policy="round-robin")


def test_what_a_client_did_wrong_is_a_request_and_no_fault(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        assert (await f.ask(post(chat() | {"model": "other"}))).status == 404
        state = await state_of(f)
        assert state.faults == ()
        (request,) = state.requests
        assert (request.status, request.error, request.engine, request.attempts) == (404, "model_not_found", None, 0)

    run(tmp_path, scenario, whole())


def test_a_tenant_sees_its_own_line_and_requests_and_nobody_sees_anything_without_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=red\ntwo tenant=blue\n")

    async def scenario(f: Fleet) -> None:
        assert (await f.get(STATE_PATH)).status == 401
        assert (await f.get(STATE_PATH, "authorization: Bearer three\r\n")).status == 401
        red, blue = "authorization: Bearer one\r\n", "x-api-key: two\r\n"
        client = await f.connect()
        await client.send(post(chat(stream=True), headers=red))
        await client.head()
        assert (await f.ask(post(chat("b"), headers=blue))).status == 200
        seen_by_red, seen_by_blue = await state_of(f, red), await state_of(f, blue)
        assert (seen_by_red.tenant, seen_by_blue.tenant) == ("red", "blue")
        assert [(line.tenant, line.running) for line in seen_by_red.admission] == [("red", 1)]
        assert seen_by_red.requests == ()
        assert [request.tenant for request in seen_by_blue.requests] == ["blue"]
        assert seen_by_blue.admission == ()
        assert [one.name for one in seen_by_red.engines] == [one.name for one in seen_by_blue.engines]

    held = stream([b"data: 1\n\n"], then="silence")

    async def behave(seen: Any, writer: Any) -> None:
        await (held if b'"stream":true' in seen.body.replace(b" ", b"") else whole())(seen, writer)

    run(tmp_path, scenario, behave, api_key_file=keys)


def test_refusals_are_counted_for_their_tenant_and_told_with_a_remedy(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=red rpm=1\n")

    async def scenario(f: Fleet) -> None:
        red = "x-api-key: one\r\n"
        assert [(await f.ask(post(chat(), headers=red))).status for _ in range(3)] == [200, 429, 429]
        state = await state_of(f, red)
        assert [(line.tenant, line.refused) for line in state.admission] == [("red", 2)]
        (fault,) = state.faults
        assert (fault.count, fault.engine) == (2, None)
        assert "rpm=" in fault.remedy
        assert [request.error for request in state.requests] == ["rate_limit_exceeded"] * 2 + [None]

    run(tmp_path, scenario, whole(), api_key_file=keys)


def test_nothing_new_is_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(f: Fleet) -> None:
        await engines_until(f, lambda engines: engines["e0"].running == 0)
        first = await f.get(STATE_PATH)
        again = await f.get(STATE_PATH, f"if-none-match: {first.headers['etag']}\r\n")
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert (await f.ask(post(chat()))).status == 200
        third = await f.get(STATE_PATH, f"if-none-match: {first.headers['etag']}\r\n")
        assert third.status == 200
        assert third.headers["etag"] != first.headers["etag"]

    run(tmp_path, scenario, whole())


def test_however_many_ask_it_is_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "KEPT_S", 600.0)

    async def scenario(f: Fleet) -> None:
        answers = await asyncio.gather(*(f.get(STATE_PATH) for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert len({json.loads(answer.body)["at"] for answer in answers}) == 1

    run(tmp_path, scenario, whole())


def test_an_engine_that_computed_no_numbers_is_told_as_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagefleet_protocol.engine_history.MARK_S", 0.0)

    async def scenario(f: Fleet) -> None:
        await engines_until(f, lambda engines: engines["e0"].running == 0)
        f.engines[0].metrics = GAUGES + 'pagefleet_engine_nan_requests_total{model_name="m"} 2\n'
        await engines_until(f, lambda engines: engines["e0"].faults == 1)
        (fault,) = (await state_of(f)).faults
        assert (fault.count, fault.engine) == (2, "e0")
        assert "--dtype" in fault.remedy

    run(tmp_path, scenario, whole())
