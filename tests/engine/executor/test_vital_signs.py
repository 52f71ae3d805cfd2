"""What the signs of ranks mean, and which cores each gets."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
from pagefleet_engine.executor.vital_signs import Awaited, OwnSigns, VitalSigns, least_progress, make_signs


def test_signs_cross_memory() -> None:
    memory = make_signs(2)
    first, second, ours = OwnSigns(memory, 2, 0), OwnSigns(memory, 2, 1), VitalSigns(memory, 2)
    os.close(memory)
    second.stamp()
    second.launch()
    second.launch()
    second.finish()
    first.finish()
    told = ours.read()[1]
    assert (told.launched, told.finished, ours.num_finished) == (2, 1, 1)
    assert abs(told.stamped_at - time.monotonic()) < 60
    assert ours.read()[0].stamped_at == 0
    first.loading("weights", 3, 10)
    second.loading("weights", 4, 12)
    assert least_progress(ours.progress()) == ("weights", 7, 22)
    second.loading("warm_up", 0, 0)
    assert least_progress(ours.progress()) == ("weights", 3, 10)
    first.loading("other", 0, 0)
    assert least_progress(ours.progress()) == ("warm_up", 0, 0)


def test_a_rank_tells_whom_it_waits_for_and_since_when() -> None:
    memory = make_signs(1)
    own, ours = OwnSigns(memory, 1, 0), VitalSigns(memory, 1)
    os.close(memory)
    awaiting = own.awaiting(Awaited.TENSOR)
    for _ in range(2):
        before = time.monotonic()
        with awaiting:
            (told,) = ours.read()
            assert told.awaits is Awaited.TENSOR
            assert before - 1e-6 <= told.awaits_since <= time.monotonic()
        (told,) = ours.read()
        assert told.awaits is Awaited.NOBODY
    with pytest.raises(RuntimeError), awaiting:
        raise RuntimeError
    assert ours.read()[0].awaits is Awaited.NOBODY


def test_a_rank_of_two_threads_waits_where_both_do() -> None:
    """As with halves of a step: one waits for another copy's rows while the other computes, or waits itself."""
    memory = make_signs(1)
    own, ours = OwnSigns(memory, 1, 0), VitalSigns(memory, 1)
    os.close(memory)
    does, done = queue.SimpleQueue[Callable[[], object]](), threading.Semaphore(0)

    def serve() -> None:
        while True:
            does.get()()
            done.release()

    threading.Thread(target=serve, daemon=True).start()

    def second(do: Callable[[], object]) -> None:
        does.put(do)
        assert done.acquire(timeout=60)

    def told() -> Awaited:
        return ours.read()[0].awaits

    stage, tensor, executor = (own.awaiting(whom) for whom in (Awaited.STAGE, Awaited.TENSOR, Awaited.EXECUTOR))
    with executor:
        second(stage.__enter__)
        assert told() is Awaited.EXECUTOR, "whoever has nothing to do"
    assert told() is Awaited.NOBODY
    with stage:
        assert told() is Awaited.STAGE
        second(lambda: stage.__exit__(None, None, None))
        assert told() is Awaited.NOBODY, "the second computes"
        second(tensor.__enter__)
        assert told() is Awaited.TENSOR, "that its stage's other ranks are late holds the rank up"
        second(lambda: tensor.__exit__(None, None, None))
        assert told() is Awaited.NOBODY
        second(stage.__enter__)
        assert told() is Awaited.STAGE
    assert told() is Awaited.NOBODY


def test_a_stamp_tells_whether_other_threads_computed() -> None:
    memory = make_signs(1)
    own, ours = OwnSigns(memory, 1, 0), VitalSigns(memory, 1)
    os.close(memory)
    turns, stamped = threading.Semaphore(0), threading.Semaphore(0)

    def stamp() -> None:
        for _ in range(3):
            turns.acquire()
            own.stamp()
            stamped.release()

    threading.Thread(target=stamp, daemon=True).start()
    found = []
    for work_s in (0.0, 0.0, 0.01):
        until = time.thread_time() + work_s
        while time.thread_time() < until:
            pass
        turns.release()
        stamped.acquire()
        found.append(ours.read()[0])
    assert found[0].worked_at == found[0].stamped_at, "as it has started"
    assert found[2].worked_at == found[2].stamped_at > found[1].stamped_at


def test_a_child_process_works_for_its_parent() -> None:
    memory = make_signs(1)
    own, ours = OwnSigns(memory, 1, 0), VitalSigns(memory, 1)
    os.close(memory)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE):
        for _ in range(3):
            own.stamp()
            (told,) = ours.read()
            assert told.worked_at == told.stamped_at
