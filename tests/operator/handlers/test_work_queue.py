"""Reconciles run side by side, each key alone, until the work is stopped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from pagefleet_operator.errors import ClusterError, NotLeading, Refused, Throttled, Unavailable
from pagefleet_operator.handlers.backlog import Pace
from pagefleet_operator.handlers.cluster_view import Key
from pagefleet_operator.handlers.work_queue import WorkQueue

QUICK = Pace(least_s=0.001, first_retry_s=0.01, most_retry_s=0.1)
A, B, C = ("ns", "a"), ("ns", "b"), ("ns", "c")


class Record:
    def __init__(self) -> None:
        self.errors: list[str] = []
        self.done = 0

    def reconcile_done(self, seconds: float, error: str) -> None:
        assert seconds >= 0
        self.done += 1
        if error:
            self.errors.append(error)


async def work(
    reconcile: Callable[[Key], Awaitable[float | None]],
    keys: list[Key],
    done: Callable[[Record], bool],
    workers: int = 4,
    finish_s: float = 1.0,
) -> tuple[WorkQueue, Record]:
    record, stopping = Record(), asyncio.Event()
    queue = WorkQueue(reconcile, record, 100.0, QUICK)
    queue.add(keys)
    working = asyncio.create_task(queue.work(workers, stopping, finish_s))
    async with asyncio.timeout(120):
        while not done(record):  # noqa: ASYNC110 - the record has no event
            await asyncio.sleep(0.002)
    stopping.set()
    await working
    return queue, record


def test_keys_are_worked_on_side_by_side_and_each_alone() -> None:
    at_work: Counter[Key] = Counter()
    most, most_of_one = [0], [0]

    async def reconcile(key: Key) -> float:
        at_work[key] += 1
        most[0] = max(most[0], sum(at_work.values()))
        most_of_one[0] = max(most_of_one[0], at_work[key])
        await asyncio.sleep(0.01)
        at_work[key] -= 1
        return 0.0

    asyncio.run(work(reconcile, [A, B, C], lambda record: record.done >= 9))
    assert most[0] == 3
    assert most_of_one[0] == 1


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        (Refused("no"), "Refused"),
        (Throttled("slowly", retry_after_s=0.01), "Throttled"),
        (Unavailable("away"), "Unavailable"),
        (NotLeading("not now"), "NotLeading"),
        (ZeroDivisionError("a bug"), "Bug"),
    ],
)
def test_a_failure_is_counted_and_tried_again_and_harms_no_other_key(failure: Exception, name: str) -> None:
    good: list[Key] = []

    async def reconcile(key: Key) -> float:
        if key == A:
            raise failure
        good.append(key)
        return 100.0

    _, record = asyncio.run(work(reconcile, [A, B, C], lambda record: len(record.errors) >= 2))
    assert set(record.errors) == {name}
    assert good == [B, C]


def test_an_outage_holds_all_keys_back() -> None:
    async def reconcile(key: Key) -> float:
        raise Unavailable("connection refused")

    async def scenario() -> int:
        record, stopping = Record(), asyncio.Event()
        queue = WorkQueue(reconcile, record, 100.0, Pace(least_s=0.001, first_retry_s=0.01, most_retry_s=0.2))
        queue.add(("ns", str(number)) for number in range(500))
        working = asyncio.create_task(queue.work(4, stopping, 1.0))
        await asyncio.sleep(0.5)
        stopping.set()
        await working
        return record.done

    assert asyncio.run(scenario()) < 100


def test_what_is_under_way_is_finished_within_limits() -> None:
    ended: list[str] = []

    async def scenario() -> None:
        stopping, begun = asyncio.Event(), asyncio.Semaphore(0)

        async def reconcile(key: Key) -> float:
            begun.release()
            try:
                await (stopping.wait() if key == A else asyncio.sleep(3600))
                ended.append("finished")
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            return 100.0

        queue = WorkQueue(reconcile, Record(), 100.0, QUICK)
        queue.add([A, B])
        working = asyncio.create_task(queue.work(4, stopping, 0.2))
        await begun.acquire()
        await begun.acquire()
        stopping.set()
        await working

    asyncio.run(scenario())
    assert ended == ["finished", "cancelled"]


def test_a_cancelled_queue_cancels_its_reconciles_at_once() -> None:
    async def scenario() -> None:
        started = asyncio.Event()

        async def reconcile(key: Key) -> float:
            started.set()
            await asyncio.sleep(60)
            return 0.0

        queue = WorkQueue(reconcile, Record(), 100.0, QUICK)
        queue.add([A])
        working = asyncio.create_task(queue.work(2, asyncio.Event(), 300.0))
        await started.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(working, 120)
        assert queue.longest_work_s == 0.0

    asyncio.run(scenario())


def test_starting_over_forgets_what_waited() -> None:
    async def scenario() -> None:
        async def reconcile(key: Key) -> float:
            return 1.0

        queue = WorkQueue(reconcile, Record(), 100.0, QUICK)
        queue.add([A, B])
        assert queue.depth == 2
        queue.start_over()
        assert (queue.depth, queue.longest_wait_s) == (0, 0.0)

    asyncio.run(scenario())


def test_keys_that_wait_while_others_are_finished_are_no_standstill() -> None:
    clock = [0.0]

    async def scenario() -> None:
        async def reconcile(key: Key) -> float:
            clock[0] += 50.0
            return 1000.0

        queue = WorkQueue(reconcile, Record(), 10_000.0, QUICK, lambda: clock[0])
        queue.add([A, B])
        clock[0] = 40.0
        assert queue.stalled_s == 40.0
        stopping = asyncio.Event()
        working = asyncio.create_task(queue.work(1, stopping, 1.0))
        while queue.depth:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        assert queue.stalled_s == 0.0
        stopping.set()
        await working

    asyncio.run(scenario())


def test_a_key_that_is_no_more_is_not_looked_at_again() -> None:
    async def reconcile(key: Key) -> None:
        return None

    queue, _ = asyncio.run(work(reconcile, [A], lambda record: record.done == 1))
    assert queue.depth == 0


def test_the_tree_of_errors_has_one_root() -> None:
    assert all(issubclass(error, ClusterError) for error in (Refused, Throttled, Unavailable, NotLeading))
