"""How rows and prompts are shared out among the steps of a pipeline: batches of like size, and nobody waits long."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.micro_batches import FEWEST_TOKENS, part_of, prompt_part
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.paged_worker import FakeEngine


@given(st.integers(1, 6), st.integers(0, 60), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_everyone_goes_once_in_as_many_steps_as_there_are_stages(
    num_stages: int, num_rows: int, changes: list[tuple[int, int]]
) -> None:
    """Rows come and go with the steps that land; those that are older are more important, and none is in two steps."""
    rows, last = list(range(num_rows)), num_rows
    waiting = dict.fromkeys(rows, 0)
    in_flight: deque[list[int]] = deque()
    for ended, come in [*changes, *[(0, 0)] * (2 * num_stages)]:
        flying = {row for batch in in_flight for row in batch}
        ready = [row for row in rows if row not in flying]
        most = part_of(len(rows), num_stages)
        batch = ready[:most]
        assert len(batch) <= most
        for row in ready:
            waiting[row] = 0 if row in batch else waiting[row] + 1
        in_flight.append(batch)
        if len(in_flight) == num_stages:
            landed = in_flight.popleft()
            gone = set(landed[:ended])
            rows = [row for row in rows if row not in gone]
            fresh = range(last, last + come)
            last += come
            rows += fresh
            waiting |= dict.fromkeys(fresh, 0)
    # Since the last change each has gone once at least.
    assert all(waiting[row] < num_stages for row in rows)


@given(st.integers(1, 8), st.integers(0, 500))
def test_parts_suffice_and_none_is_larger_than_it_must_be(num_stages: int, number: int) -> None:
    part = part_of(number, num_stages)
    assert part * num_stages >= number > (part - 1) * num_stages or number == part == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_running", "part"),
    [(10_000, 0, 2048), (3_000, 8, 1508), (300, 8, FEWEST_TOKENS + 8), (0, 5, FEWEST_TOKENS + 5)],
)
def test_prompts_are_divided_as_long_as_that_is_worth_it(num_tokens: int, num_running: int, part: int) -> None:
    assert prompt_part(num_tokens, 2, 2048, num_running) == part


@pytest.mark.parametrize("num_stages", [2, 3])
def test_rows_that_decode_make_batches_of_like_size(num_stages: int) -> None:
    """All come at once and are in one step; from their second token on each step has its part of them."""
    engine = FakeEngine(256, 4, SchedulerConfig(max_num_seqs=32), max_in_flight=num_stages, num_stages=num_stages)
    for index in range(10):
        engine.add(f"r{index}", [index + 5] * 3, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    engine.run()
    sizes = [len(plan.rows) for plan in engine.plans[1:-num_stages]]
    assert max(sizes) == part_of(10, num_stages)
    assert all(len(outcome.token_ids) == 12 for outcome in engine.outcomes.values())
    for older, newer in zip(engine.plans[1:], engine.plans[2:], strict=False):
        assert set(older.rows.request_ids).isdisjoint(newer.rows.request_ids)


def test_chunks_of_a_prompt_follow_each_other_at_once() -> None:
    engine = FakeEngine(
        256, 4, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8), max_in_flight=3, num_stages=3
    )
    engine.add("long", list(range(5, 29)))
    assert [engine.launch().num_tokens for _ in range(3)] == [8, 8, 8]
    assert engine.launch().num_tokens == 0  # its first token is on its way
    engine.run()
    assert len(engine.outcomes["long"].token_ids) == 4
