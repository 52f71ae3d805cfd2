"""Requests are spread out."""

from __future__ import annotations

import asyncio

from pagefleet_operator.apply.token_bucket import TokenBucket


class Time:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_a_burst_passes_and_what_follows_waits_its_turn() -> None:
    time = Time()
    bucket = TokenBucket(10.0, 3, time.clock, time.sleep)

    async def scenario() -> None:
        for _ in range(6):
            await bucket.take()

    asyncio.run(scenario())
    assert [round(seconds, 6) for seconds in time.slept] == [0.1, 0.2, 0.3]


def test_it_fills_again_up_to_the_burst() -> None:
    time = Time()
    bucket = TokenBucket(10.0, 2, time.clock, time.sleep)

    async def scenario() -> None:
        for _ in range(2):
            await bucket.take()
        time.now = 100.0
        for _ in range(3):
            await bucket.take()

    asyncio.run(scenario())
    assert [round(seconds, 6) for seconds in time.slept] == [0.1]
