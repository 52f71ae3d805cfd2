"""Engines that are slow, that fail, or that refuse everything for a while (F11, F12, F17): a router's process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from tests.fakes.faulty_engine import Behaviour, Seen, chat, fleet, post, stream, whole
from tests.fakes.route_process import ProgrammedFleet, programmed_fleet, until

pytestmark = pytest.mark.fleet

EVENT = b'data: {"n": 1}\n\n'


def run(
    folder: Path, check: Callable[[ProgrammedFleet], Awaitable[None]], *behaviours: Behaviour, policy: str = "auto"
) -> None:  # fmt: skip
    async def scenario() -> None:
        async with programmed_fleet(folder, behaviours, "--policy", policy) as fleet:
            await check(fleet)

    asyncio.run(scenario())


SHARED = "The same long beginning of every prompt. " * 100


class Pace:
    """How long two kinds of engines take; the slow ones as many times longer on a machine that is slow itself."""

    def __init__(self) -> None:
        self.quick_s = 0.0
        """Until a client has the answer of a quick one."""

    async def quick(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        await stream([EVENT])(seen, writer)

    async def slow(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(min(max(0.5, 12 * self.quick_s), 20.0))
        await stream([EVENT])(seen, writer)

    def answered(self, engine: str, seconds: float) -> None:
        if engine != "e0":
            self.quick_s += (seconds - self.quick_s) / 8


@pytest.mark.parametrize(("policy", "prompt"), [("auto", SHARED), ("auto", "hi"), ("least-load", "hi")])
def test_load_shifts_away_from_a_slow_engine(tmp_path: Path, policy: str, prompt: str) -> None:
    """F11: a slow engine gets fewer requests than its share, and what it does not get crowds no other engine."""
    pace, num_clients = Pace(), 12

    async def check(fleet: ProgrammedFleet) -> None:
        async def client(number: int, num_requests: int) -> None:
            for turn in range(num_requests):
                began = time.monotonic()
                answer = await fleet.router.ask(post(chat(f"{prompt} {number} {turn}", stream=True)))
                assert (answer.status, answer.cut) == (200, False)
                pace.answered(answer.headers["x-pagefleet-engine"], time.monotonic() - began)

        async def ask(num_each: int) -> list[int]:
            before = fleet.shares
            await asyncio.gather(*(client(number, num_each) for number in range(num_clients)))
            return [after - was for after, was in zip(fleet.shares, before, strict=True)]

        await ask(5)  # enough to learn from
        slow, *others = shares = await ask(12)
        assert sum(shares) == num_clients * 12
        assert slow < sum(shares) / 6, "half of what it would get were all alike"
        assert prompt == SHARED or min(others) > sum(shares) / 6, "a shared prompt may stay where it is"

    run(tmp_path, check, pace.slow, pace.quick, pace.quick, policy=policy)


def test_engines_that_fail_are_ejected_up_to_half_and_come_back_by_their_probes(tmp_path: Path) -> None:
    """F12: three of four answer 500 to all."""
    late_s = 0.0

    async def scenario() -> None:
        nonlocal late_s
        behaviours = whole(500), whole(500), whole(500), whole()
        async with fleet(tmp_path, *behaviours, policy="round-robin") as f:
            f.router._dispatcher.clock = lambda: late_s  # an ejection ends when the test says so
            statuses = [(await f.ask(post(chat()))).status for _ in range(60)]
            assert f.router.metrics.ejections == 2
            assert Counter(engine.state for engine in f.router.table.snapshot.engines) == {"ejected": 2, "ready": 2}
            assert statuses.count(500) >= 10, "five each"
            assert statuses.count(200) > 15
            reached = [len(engine.seen) for engine in f.engines]
            assert sorted(reached)[:2] == [5, 5], "an ejected engine gets nothing"
            for engine in f.engines:
                engine.behave = whole()
            late_s = 10.0
            await f.until(lambda: f.num_usable() == 4)
            assert {(await f.ask(post(chat()))).status for _ in range(8)} == {200}
            assert all(len(engine.seen) > before for engine, before in zip(f.engines, reached, strict=True))

    uvloop.run(scenario())


def test_a_fleet_that_refuses_everything_is_not_asked_more_often(tmp_path: Path) -> None:
    """F17: retries add at most a fifth (and the reserve of a quiet time), and all is well as soon as engines are."""
    num_offered = 400

    async def check(fleet: ProgrammedFleet) -> None:
        for _ in range(num_offered // 50):
            answers = await fleet.router.ask_many(50)
            assert {answer.status for answer in answers} <= {502, 503}
            assert all(set(answer.error) == {"message", "type", "param", "code"} for answer in answers)
        assert sum(fleet.shares) <= 1.2 * num_offered + 20
        assert await fleet.router.metric("retries_denied_total") > 0
        for engine in fleet.engines:
            engine.behave = whole()

        async def recovered() -> bool:
            return {answer.status for answer in await fleet.router.ask_many(20)} == {200}

        await until(recovered)
        await fleet.router.until_ready(4)

    refusal = b'{"error":{"message":"no","type":"server_error","param":null,"code":null}}'
    run(tmp_path, check, *[whole(503, refusal)] * 4)
