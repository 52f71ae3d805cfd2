"""Where the time of a start goes: phases, phases within phases, and the rest."""

from __future__ import annotations

import pytest
from pagefleet_engine.startup import StartupTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_to_the_total() -> None:
    clock = Clock()
    times = StartupTimes(clock)
    with times.phase("imports"):
        clock.now += 2.0
    clock.now += 0.5
    with times.phase("weights"):
        clock.now += 4.0
        with times.phase("compile"):
            clock.now += 1.0
        with times.phase("warm_up"):
            clock.now += 0.25
    with times.phase("imports"):
        clock.now += 1.0
    seconds = times.seconds()
    assert seconds == {"imports": 3.0, "weights": 4.0, "compile": 1.0, "warm_up": 0.25, "other": 0.5, "total": 8.75}
    assert list(seconds)[:2] == ["imports", "weights"]


def test_a_phase_that_fails_is_counted() -> None:
    clock = Clock()
    times = StartupTimes(clock)

    def read() -> None:
        with times.phase("weights"):
            clock.now += 3.0
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        read()
    assert times.seconds() == {"weights": 3.0, "other": 0.0, "total": 3.0}


def test_one_line_without_what_took_no_time() -> None:
    clock = Clock()
    times = StartupTimes(clock)
    with times.phase("config"):
        clock.now += 0.001
    with times.phase("weights"):
        clock.now += 1.25
    assert times.describe() == "started in 1.25 s: weights 1.25"


def test_an_empty_start() -> None:
    assert StartupTimes(Clock()).describe() == "started in 0.00 s: nothing that took time"


def test_every_change_is_told_and_an_outer_phase_goes_on() -> None:
    told: list[tuple[str, int, int]] = []
    times = StartupTimes(Clock(), lambda *what: told.append(what))
    with times.phase("weights"):
        times.count(3, 10)
        with times.phase("compile"):
            pass
        times.count(10, 10)
    assert told == [
        ("weights", 0, 0),
        ("weights", 3, 10),
        ("compile", 0, 0),
        ("weights", 0, 0),
        ("weights", 10, 10),
        ("other", 0, 0),
    ]
