"""Engines that are slow, that fail, or that refuse everything for a while (F11, F12, F17): a router's process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.fakes.faulty_engine import Behaviour, Seen, chat, post, stream, whole
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


class Worker:
    """An engine's behaviour that takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def __call__(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.seconds)
        await stream([EVENT])(seen, writer)


@pytest.mark.parametrize(("policy", "prompt"), [("auto", SHARED), ("auto", "hi"), ("least-load", "hi")])
def test_load_shifts_away_from_a_slow_engine(tmp_path: Path, policy: str, prompt: str) -> None:
    """F11: a slow engine gets fewer requests than its share, and what it does not get crowds no other engine."""
    workers = [Worker(0.5), Worker(0.02), Worker(0.02)]
    num_clients = 12

    async def check(fleet: ProgrammedFleet) -> None:
        async def client(number: int, num_requests: int) -> None:
            for turn in range(num_requests):
                answer = await fleet.router.ask(post(chat(f"{prompt} {number} {turn}", stream=True)))
                assert (answer.status, answer.cut) == (200, False)

        async def ask(num_each: int) -> list[int]:
            before = fleet.shares
            await asyncio.gather(*(client(number, num_each) for number in range(num_clients)))
            return [after - was for after, was in zip(fleet.shares, before, strict=True)]

        await ask(5)  # enough to learn from
        slow, *others = shares = await ask(12)
        assert sum(shares) == num_clients * 12
        assert slow < sum(shares) / 6, "half of what it would get were all alike"
        assert prompt == SHARED or min(others) > sum(shares) / 6, "a shared prompt may stay where it is"

    run(tmp_path, check, *workers, policy=policy)


def test_engines_that_fail_are_ejected_up_to_half_and_come_back_by_their_probes(tmp_path: Path) -> None:
    """F12: three of four answer 500 to all."""

    async def check(fleet: ProgrammedFleet) -> None:
        statuses = [(await fleet.router.ask()).status for _ in range(60)]
        assert await fleet.router.metric("ejections_total") == 2
        assert [await fleet.router.num_in_state(state) for state in ("ejected", "ready")] == [2, 2]
        assert statuses.count(500) >= 10, "five each"
        assert statuses.count(200) > 15
        reached = fleet.shares
        assert sorted(reached)[:2] == [5, 5], "an ejected engine gets nothing"
        for engine in fleet.engines:
            engine.behave = whole()
        await fleet.router.until_ready(4)

        async def gets_requests() -> bool:
            assert {answer.status for answer in await fleet.router.ask_many(8)} == {200}
            return all(after > before for after, before in zip(fleet.shares, reached, strict=True))

        await until(gets_requests)

    run(tmp_path, check, whole(500), whole(500), whole(500), whole(), policy="round-robin")


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
