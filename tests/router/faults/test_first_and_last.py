"""A crowd before the first engine (F18), and the end of a router that has work (F28): a router's process."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, encode_facts

from tests.fakes.faulty_engine import Answer, Client, Seen, chat, post, stream, whole
from tests.fakes.route_process import (
    ProgrammedFleet,
    RouteProcess,
    programmed_engines,
    programmed_fleet,
    route_process,
    until,
    write_endpoints,
)

pytestmark = pytest.mark.fleet
EVENT = b'data: {"n": 1}\n\n'
ROOM = 9
"""Of an engine that runs one request at once: eight more stand ready there."""
FACTS = EngineFacts(
    incarnation="1" * 32, model="m", scope="s", block_size=16, num_blocks=1000, max_model_len=256, max_num_seqs=1,
    max_num_batched_tokens=512, vocab_size=300,
)  # fmt: skip


class Gated:
    """Answers with a stream or a whole, both once the test opens."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await self.opened.wait()
        await (stream([EVENT] * 3) if b'"stream": true' in seen.body else whole())(seen, writer)


async def is_waiting(router: RouteProcess, held: int = 0, queued: int = 0) -> bool:
    counts = await router.metric("requests_held"), await router.metric("requests_queued")
    return counts == (held, queued)


def test_a_crowd_before_the_first_engine_is_held_up_to_a_bound_and_then_served(tmp_path: Path) -> None:
    num_held, num_more = 40, 10
    file = tmp_path / "endpoints.json"
    write_endpoints(file)
    flags = ["--endpoints-file", str(file), "--model-name", "m", "--cold-start-timeout", "600"]

    async def scenario() -> None:
        async with (
            programmed_engines(whole()) as (engine,),
            route_process(*flags, "--queue-size", str(num_held)) as router,
        ):
            asked = [asyncio.create_task(router.ask()) for _ in range(num_held)]
            await until(lambda: is_waiting(router, held=num_held))
            for answer in await router.ask_many(num_more):
                assert (answer.status, answer.error["code"]) == (503, "no_engine_ready")
                assert int(answer.headers["retry-after"]) >= 1
            assert not any(task.done() for task in asked)
            write_endpoints(file, Endpoint("e0", engine.url, "m"))
            async with asyncio.timeout(120):
                assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
            assert len(engine.seen) == num_held
            await until(lambda: is_waiting(router))
            assert {answer.status for answer in await router.ask_many(num_more)} == {200}

    asyncio.run(scenario())


async def begin(router: RouteProcess, num: int, streamed: bool, model: str = "m") -> list[Client]:
    clients = [await router.connect() for _ in range(num)]
    for client in clients:
        await client.send(post({**chat(stream=streamed), "model": model}))
    return clients


async def answers_of(clients: list[Client]) -> list[Answer]:
    async with asyncio.timeout(60):
        return [await client.answer() for client in clients]


async def leave_without_engine(fleet: ProgrammedFleet) -> None:
    """Have the router know a second model, `n`, of which no engine is listed any more."""
    ours, log = Endpoint("e0", fleet.engines[0].url, "m"), fleet.router.log
    write_endpoints(fleet.file, ours, Endpoint("gone", "http://127.0.0.1:9", "n"))
    await until(lambda: any("engines: 2" in line for line in log))
    write_endpoints(fleet.file, ours)
    await until(lambda: any("engines: 1 (0 new, 1 gone)" in line for line in log))


def test_the_end_of_a_router_with_streams_queued_and_held_requests(tmp_path: Path) -> None:
    """F28: not ready, nothing new, what runs or waits in line is answered, and who left is not waited for: exit 0."""
    gated = Gated()
    flags = ("--cold-start-timeout", "600", "--drain-timeout", "600")

    async def scenario() -> None:
        async with programmed_fleet(tmp_path, [gated], *flags) as fleet:
            router, (engine,) = fleet.router, fleet.engines
            num_asked = engine.num_asked[FACTS_PATH]
            engine.internal[FACTS_PATH] = encode_facts(FACTS)
            engine.incarnation = FACTS.incarnation
            await until(lambda: engine.num_asked[FACTS_PATH] > num_asked)
            await leave_without_engine(fleet)
            streams = await begin(router, ROOM, streamed=True)
            await until(lambda: engine.num_open == ROOM)
            queued = await begin(router, 3, streamed=False)
            held = [*await begin(router, 2, streamed=False, model="n"), *await begin(router, 1, True, "n")]
            await until(lambda: is_waiting(router, held=3, queued=3))
            router.process.send_signal(signal.SIGTERM)
            await until(lambda: any("draining 15 requests" in line for line in router.log))
            assert (await router.get("/readyz")).status == 503
            await until(lambda: any("taking nothing new" in line for line in router.log))
            refused = await router.ask()
            assert (refused.status, refused.error["code"]) == (503, "server_shutting_down")
            assert refused.headers["connection"] == "close"
            assert engine.num_open == ROOM, "nothing is cut while there is time"
            gated.opened.set()
            for answer in await answers_of(streams):
                assert (answer.status, answer.body, answer.cut) == (200, EVENT * 3, False)
            assert [answer.status for answer in await answers_of(queued)] == [200] * 3
            assert router.process.returncode is None, "others are held"
            for client in held:
                client.close()
            assert await router.ended() == 0
            assert len(engine.seen) == ROOM + 3

    asyncio.run(scenario())


def test_what_is_held_is_told_when_the_time_for_the_end_is_over(tmp_path: Path) -> None:
    """F28."""
    flags = ("--cold-start-timeout", "600", "--drain-timeout", "0.5")

    async def scenario() -> None:
        async with programmed_fleet(tmp_path, [whole()], *flags) as fleet:
            router = fleet.router
            await leave_without_engine(fleet)
            held = [*await begin(router, 2, streamed=False, model="n"), *await begin(router, 1, True, "n")]
            await until(lambda: is_waiting(router, held=3))
            router.process.send_signal(signal.SIGTERM)
            *told, in_stream = await answers_of(held)
            assert [(answer.status, answer.error["code"]) for answer in told] == [(503, "server_shutting_down")] * 2
            if in_stream.status == 200:  # it has had comments to keep it alive
                last = in_stream.body.strip().split(b"\n\n")[-1]
                assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "server_shutting_down"
                assert b"[DONE]" not in in_stream.body
            else:
                assert in_stream.error["code"] == "server_shutting_down"
            assert await router.ended() == 0

    asyncio.run(scenario())
