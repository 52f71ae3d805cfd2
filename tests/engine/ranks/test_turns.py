"""Two halves that take turns: who computes when, and what becomes of one whose other half fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from pagefleet_engine.ranks.turns import Turns

PARTS = 5


def test_one_computes_while_the_other_is_away() -> None:
    turns, told = Turns(), list[str]()
    come = [[threading.Event() for _ in range(PARTS)] for _ in range(2)]

    def half(number: int) -> Callable[[], str]:
        def compute() -> str:
            for part in range(PARTS):
                assert turns.half == number
                told.append(f"{number}.{part}")
                with turns.away():
                    # What was sent comes once the other half has computed the same part, or the next one.
                    come[number][part].set()
                    other = part + number
                    assert other == PARTS or come[1 - number][other].wait(30)
            return f"result {number}"

        return compute

    for _ in range(3):
        assert turns.take(half(0), half(1)) == ("result 0", "result 1")
        assert told == [f"{number}.{part}" for part in range(PARTS) for number in range(2)]
        told.clear()
        for events in come:
            for event in events:
                event.clear()


def test_halves_never_compute_at_the_same_time() -> None:
    turns, computing, seen = Turns(), threading.Lock(), list[bool]()

    def half() -> int:
        for _ in range(500):
            seen.append(computing.acquire(blocking=False))
            computing.release()
            with turns.away():
                pass
        return turns.half

    assert turns.take(half, half) == (0, 1)
    assert all(seen)
    assert len(seen) == 1000


def test_without_halves_nobody_is_waited_for() -> None:
    turns = Turns()
    with turns.away():
        assert turns.half == 0


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("is_away", [False, True])
def test_a_half_that_fails_ends_the_other(failing: int, is_away: bool) -> None:
    turns = Turns()

    def half(number: int) -> Callable[[], None]:
        def compute() -> None:
            for part in range(PARTS):
                if number == failing and part == 2 and not is_away:
                    raise MemoryError("no room")
                with turns.away():
                    if number == failing and part == 2:
                        raise MemoryError("no room")

        return compute

    with pytest.raises(MemoryError, match="no room"):
        turns.take(half(0), half(1))
    assert turns.take(lambda: 1, lambda: 2) == (1, 2), "the next is another step"


def test_a_half_that_waits_for_others_does_not_hold_up_the_end() -> None:
    turns, ended = Turns(), threading.Event()

    def stuck() -> None:
        with turns.away():
            assert ended.wait(30)

    def fails() -> None:
        with turns.away():
            pass
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        turns.take(fails, stuck)
    ended.set()
