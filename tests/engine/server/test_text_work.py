"""Work on text: whose turn it is, how much may wait, and that large pieces keep nobody's small ones waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pagefleet_engine.errors import QueueFull
from pagefleet_engine.server.text_work import LARGE, TextWork


class Gate:
    """Work that notes its name and then waits until it is let go."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._open = threading.Semaphore(0)

    def piece(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.began.append(name)
            assert self._open.acquire(timeout=30)
            return name

        return work

    def let_go(self, count: int = 1) -> None:
        for _ in range(count):
            self._open.release()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_tenant_with_much_to_do_delays_another_by_one_piece(pool: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        work, gate = TextWork(pool, 1), Gate()
        flood = [asyncio.create_task(work.run("a", 1_000_000, gate.piece(f"a{i}"))) for i in range(20)]
        await until(lambda: gate.began == ["a0"])
        other = asyncio.create_task(work.run("b", 10, gate.piece("b")))
        await asyncio.sleep(0)
        gate.let_go(2)
        assert await other == "b"
        assert gate.began[:2] == ["a0", "b"]
        gate.let_go(19)
        assert await asyncio.gather(*flood) == [f"a{i}" for i in range(20)]

    run(scenario)


def test_turns_go_by_size_and_not_by_number(pool: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        work, gate = TextWork(pool, 1), Gate()
        gate.let_go(100)
        block = threading.Event()
        go: list[asyncio.Task[object]] = [asyncio.create_task(work.run("c", 1, lambda: block.wait(30)))]
        await asyncio.sleep(0)
        go += [asyncio.create_task(work.run("large", 40_000, gate.piece("L"))) for _ in range(4)]
        go += [asyncio.create_task(work.run("small", 4_000, gate.piece("s"))) for _ in range(12)]
        await asyncio.sleep(0)
        block.set()
        await asyncio.gather(*go)
        assert "".join(gate.began)[:13].count("s") >= 11, gate.began

    run(scenario)


def test_small_pieces_do_not_wait_behind_large_ones_of_the_same_tenant(pool: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        work, gate = TextWork(pool, 2), Gate()
        large = [asyncio.create_task(work.run("a", LARGE, gate.piece("L"))) for _ in range(5)]
        await until(lambda: gate.began == ["L"])
        assert await work.run("a", 10, lambda: "done") == "done"
        gate.let_go(5)
        await asyncio.gather(*large)

    run(scenario)


def test_a_large_piece_leaves_a_thread_to_small_ones(pool: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        work, gate = TextWork(pool, 2), Gate()
        large = [asyncio.create_task(work.run(None, LARGE, gate.piece("L"))) for _ in range(2)]
        await until(lambda: gate.began == ["L"])
        assert await work.run("b", LARGE - 1, lambda: "done") == "done"
        assert gate.began == ["L"]
        gate.let_go(2)
        await asyncio.gather(*large)

    run(scenario)


def test_what_waits_is_bounded_for_one_and_for_all(pool: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        work, gate = TextWork(pool, 1, max_waiting=100), Gate()
        tasks = [asyncio.create_task(work.run("a", 25, gate.piece("a"))) for _ in range(3)]
        await until(lambda: gate.began == ["a"])
        with pytest.raises(QueueFull):
            await work.run("a", 25, gate.piece("a"))
        tasks.append(asyncio.create_task(work.run("b", 40, gate.piece("b"))))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await work.run("b", 11, gate.piece("b"))
        tasks.append(asyncio.create_task(work.run("c", 1000, gate.piece("c"))))
        gate.let_go(5)
        assert await asyncio.gather(*tasks) == ["a", "a", "a", "b", "c"]

    run(scenario)


def test_who_leaves_costs_no_turn_and_errors_come_to_who_asked(pool: ThreadPoolExecutor) -> None:
    async def scenario() -> None:
        work, gate = TextWork(pool, 1), Gate()
        first = asyncio.create_task(work.run("a", 1, gate.piece("a")))
        await until(lambda: gate.began == ["a"])
        gone = asyncio.create_task(work.run("a", 1, gate.piece("gone")))
        last = asyncio.create_task(work.run("a", 1, lambda: 1 // 0))
        await asyncio.sleep(0)
        gone.cancel()
        gate.let_go()
        assert await first == "a"
        with pytest.raises(ZeroDivisionError):
            await last
        assert gate.began == ["a"]
        assert await work.run("a", 1, lambda: 7) == 7

    run(scenario)
