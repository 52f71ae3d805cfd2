"""Steps that overlap: the next is planned before the last is known, and nobody outside can tell."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.core.request import FinishReason, RequestStatus
from pagefleet_engine.core.step import FailureKind
from pagefleet_engine.errors import ContextTooLong
from pagefleet_protocol.sampling_params import SamplingParams

from tests.example_counts import examples
from tests.fakes.paged_worker import SCOPE, FakeEngine, Outcome, complete

ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def length(max_tokens: int, **fields: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]


def stop_after(prompt: list[int], num_tokens: int) -> SamplingParams:
    """Parameters under which the answer to `prompt` stops at its `num_tokens`-th token."""
    answer = complete(prompt, length(num_tokens), SCOPE, 1_000)
    assert answer[-1] not in answer[:-1]
    return SamplingParams(max_tokens=50, ignore_eos=True, stop_token_ids=(answer[-1],))


def test_a_token_is_computed_before_anyone_here_knows_it() -> None:
    engine = FakeEngine(max_in_flight=2)
    request = engine.add("a", [1, 2, 3])
    engine.launch()
    (row,) = engine.launch().rows
    assert (row.num_computed_tokens, row.num_new_tokens, row.samples) == (3, 1, True)
    assert (request.token_ids, request.num_pending, request.num_computed_tokens) == ([1, 2, 3], 2, 4)
    engine.land()
    assert (len(request.token_ids), request.num_pending, request.num_computed_tokens) == (4, 1, 4)
    engine.run()
    assert engine.outcomes["a"].token_ids == complete([1, 2, 3], length(4), SCOPE, 1_000)


def test_the_last_token_allowed_is_not_followed_by_another_row() -> None:
    engine = FakeEngine(max_in_flight=3)
    engine.add("a", [1, 2, 3], length(2))
    assert [engine.launch().num_tokens for _ in range(3)] == [3, 1, 0]
    engine.land()
    assert engine.launch().num_tokens == 0
    engine.land()
    assert engine.outcomes["a"].finish_reason is FinishReason.LENGTH
    assert engine.worker.num_computed_tokens == 4


def test_nothing_is_computed_past_the_context() -> None:
    engine = FakeEngine(max_in_flight=3, max_model_len=6)
    engine.add("a", [1, 2, 3], ENDLESS)
    engine.run()
    assert len(engine.outcomes["a"].token_ids) == 3
    assert engine.worker.num_computed_tokens == 5


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_what_is_computed_after_a_stop_leaves_no_trace(depth: int, num_tokens: int) -> None:
    engine = FakeEngine(max_in_flight=depth)
    prompt = [1, 2, 3]
    engine.add("a", prompt, stop_after(prompt, num_tokens))
    engine.add("b", [9, 9], length(20))
    engine.run()
    outcome = engine.outcomes["a"]
    assert outcome.token_ids == complete(prompt, length(num_tokens), SCOPE, 1_000)
    assert (outcome.finish_reason, outcome.stop_token_id) == (FinishReason.STOP, outcome.token_ids[-1])
    rows = [row for plan in engine.plans for row in plan.rows if row.request_id == "a"]
    assert len(rows) == num_tokens + depth - 1  # the surplus was there
    assert engine.outcomes["b"].token_ids == complete([9, 9], length(20), SCOPE, 1_000)
    assert engine.kv_cache.num_free_blocks == 64


def test_blocks_of_an_ended_request_are_free_while_its_surplus_still_runs() -> None:
    engine = FakeEngine(num_blocks=4, max_in_flight=2)
    prompt = [1] * 6
    engine.add("a", prompt, stop_after(prompt, 1))
    engine.launch()
    engine.launch()
    engine.land()
    assert engine.outcomes["a"].finish_reason is FinishReason.STOP
    assert engine.kv_cache.num_free_blocks == 4
    engine.add("b", [2] * 14, length(2))  # needs all four, so it writes where the surplus did
    engine.run()
    assert engine.outcomes["b"].token_ids == complete([2] * 14, length(2), SCOPE, 1_000)


def test_a_block_that_the_surplus_filled_is_never_found() -> None:
    engine = FakeEngine(max_in_flight=2)
    prompt = [1] * 6
    sampling = stop_after(prompt, 2)
    engine.add("a", prompt, sampling)  # six and two: the K/V of the stop token would complete the second block
    engine.run()
    engine.add("b", [*prompt, *engine.outcomes["a"].token_ids, 5], length(1))
    engine.run()
    assert engine.outcomes["b"].num_cached_tokens == 4


def test_preemption_drops_what_is_pending_and_samples_it_again() -> None:
    engine = FakeEngine(num_blocks=5, max_in_flight=2, enable_prefix_caching=False)
    engine.add("old", [1, 2, 3], length(13))
    new = engine.add("new", [4, 5, 6], length(10))
    for _ in range(12):
        engine.step()
        if new.num_preemptions == 1:
            break
    told = len(engine.outcomes["new"].token_ids)
    assert (new.status, new.num_pending, new.num_computed_tokens) == (RequestStatus.PREEMPTED, 0, 0)
    while engine.in_flight:
        engine.land()
    assert len(engine.outcomes["new"].token_ids) == told
    engine.run()
    for name, prompt, max_tokens in (("old", [1, 2, 3], 13), ("new", [4, 5, 6], 10)):
        assert engine.outcomes[name].token_ids == complete(prompt, length(max_tokens), SCOPE, 1_000)


def test_the_result_of_before_a_preemption_does_not_reach_the_request_after_it() -> None:
    engine = FakeEngine(max_in_flight=3)
    request = engine.add("a", [1, 2, 3], length(6))
    engine.launch()
    engine.launch()
    engine.scheduler._running.remove(request)
    engine.scheduler._preempt(request, engine.scheduler._begin_step())
    assert [new.request_id for new in engine.launch().new] == ["a"]  # runs again, with two old rows in flight
    engine.land()
    engine.land()
    assert (engine.outcomes["a"].token_ids, request.num_pending) == ([], 1)
    engine.run()
    assert engine.outcomes["a"].token_ids == complete([1, 2, 3], length(6), SCOPE, 1_000)


def test_an_abort_with_two_rows_in_flight_frees_the_id_at_once() -> None:
    engine = FakeEngine(max_in_flight=2)
    engine.add("a", [1, 2, 3], ENDLESS)
    engine.launch()
    engine.launch()
    assert engine.abort("a") == ["a"]
    assert engine.kv_cache.num_free_blocks == 64
    engine.add("a", [7, 7], length(3))
    engine.run()
    assert engine.outcomes["a"].token_ids == complete([7, 7], length(3), SCOPE, 1_000)


def test_a_failure_with_the_next_row_in_flight_ends_the_request_once() -> None:
    engine = FakeEngine(max_in_flight=2)
    engine.add("bad", range(8), ENDLESS)
    engine.add("good", range(20, 30), length(6))
    engine.worker.failing["bad"] = FailureKind.NOT_NUMBERS
    engine.run()
    outcome = engine.outcomes["bad"]
    assert (outcome.token_ids, outcome.failure) == ([], FailureKind.NOT_NUMBERS)
    assert sum(row.request_id == "bad" for plan in engine.plans for row in plan.rows) == 2
    assert engine.outcomes["good"].token_ids == complete(range(20, 30), length(6), SCOPE, 1_000)
    engine.add("again", range(8), length(1))
    engine.run()
    assert engine.outcomes["again"].num_cached_tokens == 0
    assert engine.scheduler.stats().nan_requests == 1


def test_prompt_logprobs_come_once_per_position_with_steps_dropped_between() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_token_threshold=2)
    engine = FakeEngine(num_blocks=8, config=config, max_in_flight=2)
    engine.add("old", [9] * 14, length(10))
    engine.step()
    scored = engine.add("scored", range(11), length(4, prompt_logprobs=0))
    for _ in range(6):
        engine.step()
    assert scored.num_preemptions == 1
    assert 0 < len(engine.outcomes["scored"].prompt_logprobs) < 10
    engine.run()
    assert [entry.token_ids[0] for entry in engine.outcomes["scored"].prompt_logprobs] == list(range(1, 11))


def test_integrity_finds_a_token_that_no_step_will_bring() -> None:
    engine = FakeEngine(max_in_flight=2)
    request = engine.add("a", [1])
    engine.launch()
    request.num_pending += 1
    with pytest.raises(IntegrityError, match="awaits 2 tokens of 1 steps"):
        engine.scheduler.check_integrity()


# Prompts from few texts over few tokens, so that prefixes are shared and blocks are evicted.
arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps since the arrival before
        st.sampled_from([[1, 2, 3, 4] * 8, [1, 2, 3, 4] * 2 + [5, 6] * 12]),
        st.integers(1, 32),
        st.integers(1, 20),
        st.lists(st.integers(0, 60), max_size=4),
        st.integers(-1, 1),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(4, 24), st.integers(1, 6), st.integers(0, 20), st.sampled_from(["fcfs", "priority"]), arrivals)
def test_a_trace_gives_the_same_outcomes_at_every_depth(
    num_blocks: int,
    seats: int,
    extra: int,
    policy: str,
    trace: list[tuple[int, list[int], int, int, list[int], int]],
) -> None:
    config = SchedulerConfig(
        max_num_seqs=seats, max_num_batched_tokens=seats + extra, policy="fcfs" if policy == "fcfs" else "priority"
    )

    def play(depth: int) -> dict[str, Outcome]:
        engine = FakeEngine(num_blocks, 4, config, max_model_len=40, max_in_flight=depth)
        names = map(str, itertools.count())
        for pause, text, cut, max_tokens, stops, priority in trace:
            for _ in range(pause):
                engine.step()
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=tuple(stops))
            try:
                engine.add(next(names), text[:cut], sampling, priority=priority)
            except ContextTooLong:
                assert cut >= engine.scheduler.max_model_len
        engine.run()
        assert engine.kv_cache.num_free_blocks == num_blocks
        for outcome in engine.outcomes.values():
            outcome.num_cached_tokens = None  # depends on who was done when it arrived
        return engine.outcomes

    alone = play(1)
    assert play(2) == alone
    assert play(3) == alone
