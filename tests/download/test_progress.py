"""How far and how fast a download is, as a bar reads it."""

from __future__ import annotations

from pagefleet_download.progress import DownloadProgress, ProgressMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_speed_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    meter = ProgressMeter(clock)
    bar: DownloadProgress = meter
    assert bar.bytes_per_second() == 0
    for _ in range(40):  # 1000 bytes each quarter of a second, for 10 s
        meter.add_bytes(1000)
        clock.now += 0.25
    assert 3500 <= bar.bytes_per_second() <= 4500
    for _ in range(40):
        meter.add_bytes(10)
        clock.now += 0.25
    assert 35 <= bar.bytes_per_second() <= 45
    clock.now += 10
    assert bar.bytes_per_second() == 0


def test_what_was_here_and_what_was_wrong_is_no_speed() -> None:
    clock = Clock()
    meter = ProgressMeter(clock)
    meter.expect(10_000, 2)
    meter.add_found(6000)
    clock.now += 1
    assert meter.bytes_per_second() == 0
    meter.add_bytes(4000)
    clock.now += 1
    assert meter.bytes_per_second() == 4000
    meter.add_bytes(-4000)
    assert meter.snapshot().bytes_done == 6000
    assert meter.bytes_per_second() == 4000


def test_many_small_pieces_cost_no_memory() -> None:
    clock = Clock()
    meter = ProgressMeter(clock)
    for _ in range(100_000):
        meter.add_bytes(1)
        clock.now += 0.001
    assert len(meter._marks) < 30
    assert 950 <= meter.bytes_per_second() <= 1050
