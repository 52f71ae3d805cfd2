"""Streams that outlive their engines: killed at every event, in every way, the client's bytes are the same."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from pagefleet_protocol.console_state import STATE_PATH, decode_state
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.handoff import StreamState
from pagefleet_router.app import Router
from pagefleet_router.config import RouterConfig
from pagefleet_router.scheduling.outliers import OutlierDetector, OutlierRules
from pagefleet_router.scheduling.retry_budget import RetryBudget, RetryRules

from tests.fakes.faulty_engine import FAST_MONITOR, Answer, Fleet, chat, post
from tests.fakes.noting_engine import NUM_EVENTS, TOKENS, End, Ends, NotingEngine, whole_answer

REQUEST: dict[str, Any] = {"stream": True, "temperature": 0}


@contextlib.asynccontextmanager
async def noting_fleet(folder: Path, *engines: NotingEngine, **settings: Any) -> AsyncIterator[Fleet]:
    for engine in engines:
        await engine.start()
    config = RouterConfig(endpoints_file=folder / "endpoints.json", port=0, **{"policy": "round-robin", **settings})
    router = Router(config, None, FAST_MONITOR)
    router._dispatcher.outliers = OutlierDetector(OutlierRules(failures=10_000))
    made = Fleet(router, 0, list(engines), folder)
    made.write_endpoints(*(Endpoint(f"e{i}", engine.url, "m") for i, engine in enumerate(engines)))
    num_with_facts = sum(bool(engine.internal) for engine in engines)
    try:
        async with router.running() as made.port:
            await made.until(
                lambda: (
                    made.num_usable() == len(engines)
                    and sum(one.facts is not None for one in router.table.snapshot.engines) == num_with_facts
                )
            )
            yield made
            await made.until(lambda: router.budget.live_requests == 0)
            assert all(one.tally.num_requests == 0 for one in router.table.snapshot.engines)
    finally:
        for client in made.clients:
            client.close()
        for engine in engines:
            await engine.kill()


def run(folder: Path, check: Callable[[Fleet, Ends], Awaitable[None]], *scopes: str, **settings: Any) -> None:
    async def scenario() -> None:
        ends = Ends()
        async with noting_fleet(folder, *(NotingEngine(ends, scope) for scope in scopes or "sss"), **settings) as f:
            await check(f, ends)

    uvloop.run(scenario())


def undisturbed(answer: Answer) -> bytes:
    """What the client should have: the answer under the name that it came with."""
    found = re.search(rb'"chatcmpl-([0-9a-f]{32})", "created": (\d+)', answer.body)
    assert found is not None
    state = StreamState(found[1].decode(), int(found[2]))
    return b"".join(noted.event for noted in whole_answer(state))


def error_code(answer: Answer) -> str:
    last = answer.body.rstrip(b"\n").split(b"\n\n")[-1]
    code: str = json.loads(last.removeprefix(b"data: "))["error"]["code"]
    return code


@pytest.mark.parametrize("how", ["reset", "silent", "note", "dead", "stopping", "half"])
def test_killed_at_every_event_nothing_is_lost_or_changed(tmp_path: Path, how: End) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        # The last event of all may only be lost as a whole: nothing wrong can follow it.
        points = range(NUM_EVENTS + 1) if how in ("reset", "silent") else range(NUM_EVENTS)
        for point in points if how != "silent" else (1, 3, NUM_EVENTS):
            ends.plan[:] = [(point, how)]
            answer = await f.ask(post(chat(**REQUEST)))
            assert (answer.status, answer.cut) == (200, False), point
            assert answer.body == undisturbed(answer), point
        assert f.router.metrics.streams_cut == 0
        assert f.router.metrics.continued["m"] > 0

    run(tmp_path, check, gap_timeout=0.3 if how == "silent" else 60.0)  # a machine may be silent, too


@pytest.mark.parametrize("size", [1, 64, 4000])
def test_the_console_counts_tokens_whatever_reads_they_came_in(tmp_path: Path, size: int) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        ends.write_size = size
        ends.plan[:] = [(3, "reset")]
        await f.ask(post(chat(**REQUEST)))
        (request,) = decode_state((await f.get(STATE_PATH)).body).requests
        assert request.generated_tokens == len(TOKENS)

    run(tmp_path, check)


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_in_every_chunking(tmp_path: Path, size: int) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        ends.write_size = size
        for point in (1, 2, NUM_EVENTS - 2):
            ends.plan[:] = [(point, "half")]
            answer = await f.ask(post(chat(**REQUEST)))
            assert answer.body == undisturbed(answer)

    run(tmp_path, check)


def test_two_engines_may_be_lost_and_not_three(tmp_path: Path) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        ends.plan[:] = [(2, "reset"), (2, "reset")]
        answer = await f.ask(post(chat(**REQUEST)))
        assert answer.body == undisturbed(answer)
        states = [state for state in ends.states if state is not None]
        assert [state.num_tokens for state in states] == [0, 2, 5], "marks count"
        assert len({(state.answer_id, state.created) for state in states}) == 1
        assert ends.bodies == [json.dumps(chat(**REQUEST)).encode()] * 3
        ends.plan[:] = [(1, "reset")] * 3
        answer = await f.ask(post(chat(**REQUEST)))
        assert error_code(answer) == "engine_lost"
        assert answer.body.startswith(b"".join(undisturbed(answer).splitlines(keepends=True)[:6]))

    run(tmp_path, check, *"ssss")


def test_a_stream_that_kills_engines_before_they_give_an_event_kills_two(tmp_path: Path) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        ends.plan[:] = [(2, "reset"), (0, "reset")]
        answer = await f.ask(post(chat(**REQUEST)))
        assert error_code(answer) == "engine_lost"
        assert len(ends.states) == 2

    run(tmp_path, check, *"ssss")


@pytest.mark.parametrize(("why", "scopes"), [("alone", "s"), ("another scope", "st"), ("409", "ss")])
def test_what_cannot_go_on_ends_with_an_error(tmp_path: Path, why: str, scopes: str) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        ends.refusals[:] = [(409, b"")] if why == "409" else []
        ends.plan[:] = [(2, "reset")]
        answer = await f.ask(post(chat(**REQUEST)))
        assert error_code(answer) == "engine_lost"
        assert answer.body.count(b"data: ") == 3
        assert not answer.body.startswith(b":")
        assert f.router.metrics.streams_cut == 1
        assert f.router.metrics.continued["m"] == 0

    run(tmp_path, check, *scopes)


@pytest.mark.parametrize(
    "refusal", [(429, b"retry-after: 1\r\n"), (503, b""), (503, b"connection: close\r\n")], ids=str
)
def test_a_third_engine_goes_on_where_the_second_refuses(tmp_path: Path, refusal: tuple[int, bytes]) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        ends.plan[:] = [(2, "reset")]
        ends.refusals[:] = [refusal]
        answer = await f.ask(post(chat(**REQUEST)))
        assert answer.body == undisturbed(answer)
        assert f.router.metrics.streams_cut == 0
        assert f.router.metrics.continued["m"] == 1
        assert f.router.metrics.failures["declined"] == 0, "a full engine has not failed"
        ends.plan[:] = [(2, "reset")]
        ends.refusals[:] = [refusal, refusal]
        await f.until(lambda: f.num_usable() == 3)
        answer = await f.ask(post(chat(**REQUEST)))
        assert (error_code(answer), ends.refusals) == ("engine_lost", []), "no engine is left"

    run(tmp_path, check)


@pytest.mark.parametrize("tokens", [0, 20])
def test_who_refuses_a_stream_is_followed_within_the_budget(tmp_path: Path, tokens: int) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        f.router._dispatcher.budget = f.router.budget = RetryBudget(RetryRules(ratio=0.0, reserve=float(tokens)))
        ends.plan[:] = [(2, "reset")]
        ends.refusals[:] = [(429, b"")]
        answer = await f.ask(post(chat(**REQUEST)))
        assert (answer.body == undisturbed(answer)) == bool(tokens)
        assert f.router.metrics.retries_denied == (not tokens)

    run(tmp_path, check)


FIELDS: list[dict[str, Any]] = [{}, {"temperature": 1}, {"n": 2}, {"echo": True}, {"prompt": ["a", "b"]}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_whatever_a_stream_was_asked_for_with_it_goes_on(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        ends.plan[:] = [(2, "reset")]
        answer = await f.ask(post({"model": "m", "messages": [], "stream": True, **fields}))
        assert answer.body == undisturbed(answer)
        assert f.router.metrics.continued["m"] == 1

    run(tmp_path, check, "s", "s")


@pytest.mark.parametrize("scopes", ["s", "ss"])
def test_a_client_that_leaves_a_stream_that_moved(tmp_path: Path, scopes: str) -> None:
    async def check(f: Fleet, ends: Ends) -> None:
        ends.plan[:] = [(2, "reset"), (3, "silent")]
        client = await f.connect()
        await client.send(post(chat(**REQUEST)))
        await client.head()
        await f.until(lambda: len(ends.states) == len(scopes))
        client.close()
        await f.until(lambda: all(engine.num_open == 0 for engine in f.engines))

    run(tmp_path, check, *scopes)


def test_an_engine_that_is_not_ours_is_asked_for_no_notes(tmp_path: Path) -> None:
    async def scenario() -> None:
        ends = Ends()
        async with noting_fleet(tmp_path, NotingEngine(ends, with_facts=False)) as f:
            answer = await f.ask(post(chat(**REQUEST), headers="x-pagefleet-stream: id=1\r\n"))
            assert answer.status == 200
            assert ends.states == [None]

    uvloop.run(scenario())
