"""What the signs of ranks mean, and which cores each gets."""

from __future__ import annotations

import os
import time

from pagefleet_engine.executor.rank_cores import CoreShare, allowed_cores, share_cores
from pagefleet_engine.executor.vital_signs import HANG_S, HangWatch, Signs, VitalSigns, least_progress, make_signs


def look_each_second(watch: HangWatch, start: int, seconds: int, launched: list[int], stamps: bool = True) -> object:
    for now in range(start, start + seconds):
        found = watch.look([Signs(now if stamps or rank == 0 else start, n) for rank, n in enumerate(launched)], now)
        if found is not None:
            return now - start, *found
    return None


def test_ranks_that_stamp_and_are_level_are_well() -> None:
    assert look_each_second(HangWatch(2), 100, 60, [7, 7]) is None


def test_a_rank_without_stamps_hangs() -> None:
    assert look_each_second(HangWatch(2), 100, 60, [7, 7], stamps=False) == (9, 1, "gave no sign of life for 9 s")


def test_a_rank_that_others_leave_behind_hangs() -> None:
    assert look_each_second(HangWatch(3), 100, 60, [8, 7, 8]) == (9, 1, "did not come out of a step for 9 s")


def test_a_rank_that_is_behind_and_moves_is_well() -> None:
    watch = HangWatch(2)
    for now in range(100, 200):
        assert watch.look([Signs(now, now), Signs(now, now - 1)], now) is None


def test_stages_are_steps_apart() -> None:
    """A stage may take long where the one before it is done with more; its own tensor ranks are level."""
    assert look_each_second(HangWatch(1), 100, 60, [9, 7]) is None
    assert look_each_second(HangWatch(1), 100, 90, [9, 7]) == (61, 1, "did not come out of a step for 61 s")
    assert look_each_second(HangWatch(2), 100, 60, [9, 9, 7, 7]) is None
    assert look_each_second(HangWatch(2), 100, 60, [9, 9, 7, 6]) == (9, 3, "did not come out of a step for 9 s")


def test_the_first_stage_hangs_where_all_others_wait_for_it() -> None:
    watch = HangWatch(2)
    watch.num_given = 7
    assert look_each_second(watch, 100, 90, [7, 7, 7, 7]) is None
    watch.num_given = 9
    assert look_each_second(watch, 190, 60, [7, 7, 7, 7]) is None
    assert look_each_second(watch, 250, 5, [7, 7, 7, 7]) == (1, 0, "did not come out of a step for 61 s")


def test_who_was_stopped_itself_blames_nobody() -> None:
    watch = HangWatch(2)
    watch.look([Signs(100.0, 1), Signs(100.0, 1)], 100.0)
    assert watch.look([Signs(100.0, 1), Signs(100.0, 1)], 500.0) is None
    assert watch.look([Signs(501.0, 1), Signs(100.0, 1)], 501.0) is None
    assert watch.is_due(502.0)
    assert HANG_S < 10


def test_signs_cross_memory() -> None:
    memory = make_signs(2)
    theirs, ours = VitalSigns(memory, 2), VitalSigns(memory, 2)
    os.close(memory)
    theirs.stamp(1)
    theirs.of(1).launch()
    assert ours.read()[1].launched == 1
    assert abs(ours.read()[1].stamped_at - time.monotonic()) < 60
    theirs.loading(0, "weights", 3, 10)
    theirs.loading(1, "weights", 4, 12)
    assert least_progress(ours.progress()) == ("weights", 7, 22)
    theirs.loading(1, "warm_up", 0, 0)
    assert least_progress(ours.progress()) == ("weights", 3, 10)
    theirs.loading(0, "other", 0, 0)
    assert least_progress(ours.progress()) == ("warm_up", 0, 0)


def test_cores_are_shared_evenly() -> None:
    assert share_cores(2, [0, 4, 1, 5], None) == [CoreShare([0, 4], 2), CoreShare([1, 5], 2)]
    assert share_cores(2, [0, 1, 2], None) == [CoreShare([0], 1), CoreShare([1], 1)]
    assert share_cores(2, [0, 1, 2, 3], 3) == [CoreShare([0, 1], 1), CoreShare([2, 3], 1)]
    assert share_cores(2, [0], None) == [CoreShare([], 1), CoreShare([], 1)]
    assert sorted(allowed_cores()) == sorted(os.sched_getaffinity(0))
