"""Which key is next, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_operator.handlers.backlog import Backlog, Pace

PACE = Pace(least_s=0.25, first_retry_s=1.0, most_retry_s=60.0)


@pytest.fixture
def backlog() -> Backlog[str]:
    return Backlog(PACE, lambda: 0.5)  # no jitter: the factor is 1


def test_a_key_asked_for_often_is_given_once(backlog: Backlog[str]) -> None:
    for _ in range(100):
        backlog.add("a", 0.0)
    assert backlog.depth(0.0) == 1
    assert backlog.take(0.0) == "a"
    assert backlog.take(10.0) is None


def test_first_come_first_served(backlog: Backlog[str]) -> None:
    for number, key in enumerate("cab"):
        backlog.add(key, float(number))
    backlog.add("c", 5.0)  # does not lose its place
    assert [backlog.take(9.0) for _ in range(3)] == ["c", "a", "b"]


def test_a_key_is_not_given_while_it_is_worked_on(backlog: Backlog[str]) -> None:
    backlog.add("a", 0.0)
    assert backlog.take(0.0) == "a"
    backlog.add("a", 0.1)
    assert backlog.take(5.0) is None
    backlog.settled("a", 5.0, 100.0)
    assert backlog.take(5.0) == "a"  # as it was asked for meanwhile


def test_a_key_has_its_pace(backlog: Backlog[str]) -> None:
    looks, now = 0, 0.0
    for _ in range(1000):  # an edit each millisecond
        backlog.add("a", now)
        if backlog.take(now) is not None:
            looks += 1
            backlog.settled("a", now, 1000.0)
        now += 0.001
    assert looks == 4


def test_a_settled_key_comes_again_after_its_time(backlog: Backlog[str]) -> None:
    backlog.add("a", 0.0)
    backlog.take(0.0)
    backlog.settled("a", 1.0, 30.0)
    assert backlog.next_due() == 31.0
    assert backlog.take(30.9) is None
    backlog.add("a", 5.0)
    assert backlog.next_due() == 5.0
    assert backlog.take(5.0) == "a"


def test_failures_pause_longer_each_time_up_to_a_limit(backlog: Backlog[str]) -> None:
    pauses, now = [], 0.0
    backlog.add("a", now)
    for _ in range(9):
        due = backlog.next_due()
        assert due is not None
        now = due
        assert backlog.take(now) == "a"
        pauses.append(backlog.failed("a", now))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    backlog.take(now + 60)
    backlog.settled("a", now + 60, 0.0)
    assert backlog.take(now + 61) == "a"
    assert backlog.failed("a", now + 61) == 1


def test_an_event_shortens_a_failures_pause_but_not_below_the_first(backlog: Backlog[str]) -> None:
    now = 0.0
    backlog.add("a", now)
    for _ in range(5):
        due = backlog.next_due()
        assert due is not None
        now = due
        backlog.take(now)
        backlog.failed("a", now)
    backlog.add("a", now + 0.1)
    assert backlog.next_due() == now + PACE.first_retry_s


def test_what_the_server_asked_for_is_waited_for_whatever_happens(backlog: Backlog[str]) -> None:
    backlog.add("a", 0.0)
    backlog.take(0.0)
    backlog.add("a", 0.0)
    assert backlog.failed("a", 0.0, at_least_s=20.0) == 20.0
    backlog.add("a", 1.0)
    assert backlog.take(19.9) is None
    assert backlog.take(20.0) == "a"


def test_jitter_spreads_by_a_fifth() -> None:
    for jitter, pause in ((0.0, 0.8), (0.999999, 1.2)):
        backlog: Backlog[str] = Backlog(PACE, lambda jitter=jitter: jitter)  # type: ignore[misc]
        backlog.add("a", 0.0)
        backlog.take(0.0)
        assert backlog.failed("a", 0.0) == pytest.approx(pause, abs=1e-5)


def test_a_forgotten_key_comes_only_if_it_is_asked_for(backlog: Backlog[str]) -> None:
    backlog.add("a", 0.0)
    backlog.take(0.0)
    backlog.forget("a")
    assert backlog.next_due() is None
    backlog.add("a", 0.0)
    backlog.take(0.0)
    backlog.add("a", 0.0)
    backlog.forget("a")
    assert backlog.take(1.0) == "a"


def test_waits_and_works_are_measured(backlog: Backlog[str]) -> None:
    assert backlog.longest_wait_s(9.0) == backlog.longest_work_s(9.0) == 0.0
    backlog.add("a", 1.0)
    backlog.add("b", 2.0)
    assert backlog.longest_wait_s(9.0) == 8.0
    assert backlog.take(9.0) == "a"
    assert backlog.longest_wait_s(9.0) == 7.0
    assert backlog.longest_work_s(12.0) == 3.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "take", "settle", "fail"])), max_size=200))
def test_no_key_is_lost_and_none_is_given_twice(steps: list[tuple[str, str]]) -> None:
    backlog: Backlog[str] = Backlog(PACE, lambda: 0.5)
    known: set[str] = set()
    active: set[str] = set()
    now = 0.0
    for key, step in steps:
        now += 0.3
        if step == "add":
            backlog.add(key, now)
            known.add(key)
        elif step == "take" and (taken := backlog.take(now)) is not None:
            assert taken not in active
            active.add(taken)
        elif key in active:
            active.discard(key)
            if step == "settle":
                backlog.settled(key, now, 5.0)
            else:
                backlog.failed(key, now)
    seen = set(active)
    for key in active:
        backlog.settled(key, now, 0.0)
    while (taken := backlog.take(now + 1000.0)) is not None:
        seen.add(taken)
    assert seen == known
