import pytest
from pagefleet_engine.engine_core.progress import EngineHealth, Progress, judge

NOW = 1000.0


@pytest.mark.parametrize(
    ("stamped_at", "busy", "work_since", "stalled_s"),
    [
        (100.0, False, None, 0.0),  # idle for long
        (995.0, True, 900.0, 5.0),  # in a step of five seconds
        (100.0, False, 992.0, 8.0),  # stopped while idle: it counts from when work was sent
        (998.0, False, 100.0, 2.0),  # work all the time, and progress
        (940.0, True, None, 60.0),  # hangs in a step whose requests are gone
        (1000.5, True, 1.0, 0.0),  # stamped while we looked
    ],
)
def test_a_stall_is_time_without_progress_while_work_waits(
    stamped_at: float, busy: bool, work_since: float | None, stalled_s: float
) -> None:
    assert judge(Progress(7, stamped_at, busy), True, work_since, NOW) == EngineHealth(True, stalled_s)


@pytest.mark.parametrize(
    ("alive", "stalled_s", "ready", "live"),
    [
        (True, 0, True, True),
        (True, 9.9, True, True),
        (True, 10, False, True),
        (True, 60, False, False),
        (False, 0, False, False),
    ],
)
def test_thresholds(alive: bool, stalled_s: float, ready: bool, live: bool) -> None:
    health = EngineHealth(alive, stalled_s)
    assert (health.ready, health.live) == (ready, live)
