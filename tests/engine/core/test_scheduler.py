"""The scheduler's decisions, one at a time."""

from __future__ import annotations

import pytest
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.core.request import FinishReason, RequestStatus
from pagefleet_engine.core.step import FailureKind, StepPlan, StepResult
from pagefleet_engine.errors import ContextTooLong, InvalidRequest, QueueFull
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.paged_worker import SCOPE, FakeEngine, complete

ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def shares(plan: StepPlan) -> dict[str, int]:
    """Return the tokens per request of a plan."""
    return {row.request_id: row.num_new_tokens for row in plan.rows}


def test_a_request_runs_from_prompt_to_length() -> None:
    engine = FakeEngine()
    engine.add("a", [1, 2, 3])
    first = engine.step()
    assert shares(first) == {"a": 3}
    assert (first.new[0].token_ids, first.new[0].num_prompt_tokens, first.new[0].eos_token_ids) == ((1, 2, 3), 3, (7,))
    assert shares(engine.step()) == {"a": 1}
    engine.run()
    outcome = engine.outcomes["a"]
    assert outcome.token_ids == complete([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), SCOPE, 1_000)
    assert outcome.finish_reason is FinishReason.LENGTH
    assert outcome.num_cached_tokens == 0
    assert engine.scheduler.stats().steps == 4


def test_with_nothing_to_do_the_plan_is_empty_and_the_engine_idle() -> None:
    engine = FakeEngine()
    plan = engine.scheduler.schedule()
    assert (plan.num_tokens, len(plan.rows), plan.new, plan.removed) == (0, 0, [], ())
    assert not engine.scheduler.has_work
    assert engine.scheduler.stats().steps == 0


def test_the_worker_is_told_of_an_ended_request_with_the_next_executed_plan() -> None:
    engine = FakeEngine()
    engine.add("a", [1])
    engine.run()
    assert engine.scheduler.schedule().removed == ()  # not executed, so nothing may be lost with it
    assert engine.worker.request_ids == {"a"}
    engine.add("b", [1])
    assert engine.step().removed == ["a"]
    assert engine.worker.request_ids == {"b"}


def test_a_long_prompt_is_cut_while_others_are_there_and_not_when_alone() -> None:
    engine = FakeEngine(
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, long_prefill_token_threshold=10)
    )
    engine.add("long", range(30))
    assert shares(engine.step()) == {"long": 30}
    engine.add("second", range(30, 60))
    assert shares(engine.step()) == {"long": 1, "second": 10}
    assert shares(engine.step()) == {"long": 1, "second": 10}


def test_the_default_cap_of_long_prompts_is_a_quarter_of_the_budget_but_at_least_512() -> None:
    for budget, expected in ((4_096, 1_024), (1_024, 512), (300, 300)):
        engine = FakeEngine(
            num_blocks=4_000,
            max_model_len=10_000,
            config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget),
        )
        engine.add("a", [1] * 2_000)
        engine.add("b", [2])
        assert shares(engine.scheduler.schedule())["a"] == expected


def test_every_running_request_gets_a_token_beside_long_prompts() -> None:
    engine = FakeEngine(
        num_blocks=128, config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, policy="priority")
    )
    for name in "abc":
        engine.add(name, [1, 2], ENDLESS, priority=1)
    engine.step()
    engine.add("urgent", range(40), ENDLESS, priority=0)
    engine.step()
    assert shares(engine.step()) == {"urgent": 13, "a": 1, "b": 1, "c": 1}


def test_the_budget_is_shared_in_order_of_arrival() -> None:
    engine = FakeEngine(config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16))
    for token, name in enumerate("abc"):
        engine.add(name, [token] * 10)
    assert shares(engine.step()) == {"a": 10, "b": 6}
    assert shares(engine.step()) == {"a": 1, "b": 4, "c": 10}


def test_seats_are_limited() -> None:
    engine = FakeEngine(config=SchedulerConfig(max_num_seqs=2))
    for name in "abc":
        engine.add(name, [1])
    assert list(shares(engine.step())) == ["a", "b"]
    assert (engine.scheduler.stats().requests_running, engine.scheduler.stats().requests_waiting) == (2, 1)
    engine.run()
    assert engine.outcomes["c"].finish_reason is FinishReason.LENGTH


def test_priority_decides_who_is_admitted() -> None:
    engine = FakeEngine(config=SchedulerConfig(max_num_seqs=1, policy="priority"))
    engine.add("late", [1], priority=5)
    engine.add("soon", [1], priority=-5)
    assert list(shares(engine.step())) == ["soon"]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    engine = FakeEngine(num_blocks=8)
    engine.add("a", [1] * 16, ENDLESS)
    engine.step()
    engine.add("large", [2] * 20)
    engine.add("small", [3])
    assert list(shares(engine.step())) == ["a"]


def test_a_newcomer_leaves_each_running_request_a_block_to_grow() -> None:
    engine = FakeEngine(num_blocks=6)
    engine.add("a", [1] * 8, ENDLESS)
    engine.add("b", [2] * 8, ENDLESS)
    engine.add("c", [3] * 4, ENDLESS)
    assert list(shares(engine.step())) == ["a", "b"]  # two blocks are free, and two requests may need them
    for _ in range(4):
        engine.step()
    assert engine.scheduler.stats().preemptions == 0
    assert engine.scheduler.stats().requests_running == 2


def test_when_blocks_run_out_the_newest_is_preempted_and_recomputed() -> None:
    engine = FakeEngine(num_blocks=5, enable_prefix_caching=False)
    old = engine.add("old", [1, 2, 3], SamplingParams(max_tokens=13, ignore_eos=True))
    new = engine.add("new", [4, 5, 6], SamplingParams(max_tokens=10, ignore_eos=True))
    while new.num_preemptions == 0:
        plan = engine.step()
    assert plan.removed == ["new"]
    assert list(shares(plan)) == ["old"]
    assert new.status is RequestStatus.PREEMPTED
    assert new.num_computed_tokens == 0
    assert engine.scheduler.stats().preemptions == 1
    engine.run()
    assert old.num_preemptions == 0
    again = [plan for plan in engine.plans if plan.new and plan.new[0].request_id == "new"][-1]
    assert again.new[0].num_prompt_tokens == 3
    assert len(again.new[0].token_ids) > 3
    for name, prompt, max_tokens in (("old", [1, 2, 3], 13), ("new", [4, 5, 6], 10)):
        expected = complete(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), SCOPE, 1_000)
        assert engine.outcomes[name].token_ids == expected


def test_under_priority_the_least_important_is_preempted_though_it_came_first() -> None:
    engine = FakeEngine(num_blocks=5, config=SchedulerConfig(policy="priority"))
    low = engine.add("low", [1, 2, 3], ENDLESS, priority=9)
    high = engine.add("high", [4, 5, 6], SamplingParams(max_tokens=14, ignore_eos=True), priority=0)
    while engine.scheduler.has_work and low.num_preemptions == 0:
        engine.step()
    assert high.num_preemptions == 0
    assert low.num_preemptions == 1


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine = FakeEngine(num_blocks=9)
    engine.add("a", [1] * 14, SamplingParams(max_tokens=6, ignore_eos=True))
    b = engine.add("b", [2] * 15, SamplingParams(max_tokens=6, ignore_eos=True))
    engine.run()
    assert b.num_preemptions == 1
    readmitted = next(row for plan in engine.plans[1:] if plan.new for row in plan.rows if row.request_id == "b")
    assert readmitted.num_computed_tokens >= 8
    assert engine.outcomes["b"].num_cached_tokens == 0  # that of the first admission


def test_a_second_request_reuses_a_prefix_and_says_so() -> None:
    engine = FakeEngine()
    engine.add("a", range(10))
    engine.run()
    engine.add("b", range(10))
    assert shares(engine.step()) == {"b": 2}
    engine.run()
    assert engine.outcomes["b"].num_cached_tokens == 8
    assert engine.outcomes["b"].token_ids == engine.outcomes["a"].token_ids
    stats = engine.scheduler.stats()
    assert (stats.lookups.queried_tokens, stats.lookups.hit_tokens) == (20, 8)


def test_a_prompt_still_being_computed_is_shared_only_as_far_as_it_is() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, long_prefill_token_threshold=8)
    engine = FakeEngine(config=config)
    engine.add("a", range(32))
    engine.add("other", [50])
    engine.step()
    engine.add("b", range(32))
    engine.step()
    engine.run()
    assert engine.outcomes["b"].num_cached_tokens == 8


def test_equal_prompts_in_one_step_do_not_share() -> None:
    engine = FakeEngine()
    engine.add("a", range(10))
    engine.add("b", range(10))
    plan = engine.step()
    assert shares(plan) == {"a": 10, "b": 10}
    assert not set(plan.rows[0].new_blocks[0]) & set(plan.rows[1].new_blocks[0])


def test_blocks_that_all_rows_share_are_counted_only_when_asked_for() -> None:
    for cascade in (True, False):
        engine = FakeEngine(cascade=cascade)
        engine.add("warm", range(10))
        engine.run()
        for tail in (50, 51, 52):
            engine.add(f"b{tail}", [*range(10), tail], ENDLESS)
        assert engine.step().num_common_blocks == (2 if cascade else 0)
        assert engine.step().num_common_blocks == (2 if cascade else 0)
        engine.add("other", [60])
        assert engine.step().num_common_blocks == 0


def test_tenants_do_not_share() -> None:
    engine = FakeEngine()
    for salt in ("x", "y"):
        engine.add(salt, range(10), scope=PrefixScope("fake", salt=salt))
        engine.run()
    assert engine.outcomes["y"].num_cached_tokens == 0


def test_after_a_reset_nothing_is_reused() -> None:
    engine = FakeEngine()
    engine.add("a", range(10))
    engine.run()
    assert engine.scheduler.reset_prefix_cache() == 3
    engine.add("b", range(10))
    engine.run()
    assert engine.outcomes["b"].num_cached_tokens == 0


def test_prompt_logprobs_come_once_per_position_despite_chunks_cache_and_preemption() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_token_threshold=2)
    engine = FakeEngine(num_blocks=6, config=config)
    engine.add("warm", range(11))
    engine.run()
    engine.add("old", [9] * 7, SamplingParams(max_tokens=10, ignore_eos=True))
    engine.step()
    scored = engine.add("scored", range(12), SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=0))
    while scored.num_preemptions == 0:
        engine.step()
    assert 0 < len(engine.outcomes["scored"].prompt_logprobs) < 11
    engine.run()
    assert engine.outcomes["scored"].num_cached_tokens == 0
    assert [entry.token_ids[0] for entry in engine.outcomes["scored"].prompt_logprobs] == list(range(1, 12))


def test_a_prompt_that_cannot_fit_is_refused_and_the_largest_that_can_runs_alone() -> None:
    engine = FakeEngine(num_blocks=4, block_size=4)
    assert engine.scheduler.max_model_len == 16
    with pytest.raises(ContextTooLong, match="kv_cache_memory"):
        engine.add("large", [1] * 16)
    engine.add("fits", [1] * 15, ENDLESS)
    engine.add("other", [2] * 3)
    engine.run()
    assert len(engine.outcomes["fits"].token_ids) == 1
    assert engine.outcomes["fits"].finish_reason is FinishReason.LENGTH


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = FakeEngine()
    engine.add("a", [1])
    with pytest.raises(InvalidRequest, match="'a' is not finished yet") as refusal:
        engine.add("a", [2])
    assert refusal.value.param == "request_id"
    engine.run()
    engine.add("a", [2])
    engine.run()
    assert engine.outcomes["a"].finish_reason is FinishReason.LENGTH


def test_a_full_queue_refuses_and_takes_again_once_there_is_room() -> None:
    engine = FakeEngine(config=SchedulerConfig(max_num_queued_reqs=2))
    engine.add("a", [1])
    engine.add("b", [1])
    with pytest.raises(QueueFull):
        engine.add("c", [1])
    engine.step()
    engine.add("c", [1])
    engine.run()
    assert all(outcome.finish_reason for outcome in engine.outcomes.values())


def test_the_measured_wait_is_what_a_refused_client_is_told() -> None:
    engine = FakeEngine(config=SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=8))
    for index in range(60):
        engine.add(f"warm{index}", [1] * 10, SamplingParams(max_tokens=1))
        engine.now += 2.0  # ten tokens wait two seconds
        engine.step()
    for index in range(8):
        engine.add(f"r{index}", [1] * 10)
    with pytest.raises(QueueFull) as refusal:
        engine.add("late", [1])
    assert refusal.value.retry_after_s == pytest.approx(16.0, rel=0.05)


def test_abort_frees_a_running_and_a_waiting_request_at_once() -> None:
    engine = FakeEngine(config=SchedulerConfig(max_num_seqs=1))
    engine.add("running", [1] * 9, ENDLESS)
    engine.add("waiting", [2])
    engine.step()
    assert engine.abort("waiting", "running", "unknown") == ["waiting", "running"]
    assert not engine.scheduler.has_work
    assert engine.kv_cache.num_free_blocks == 64


def test_abort_of_a_preempted_request_leaves_nothing() -> None:
    engine = FakeEngine(num_blocks=5)
    engine.add("old", [1, 2, 3], SamplingParams(max_tokens=13, ignore_eos=True))
    new = engine.add("new", [4, 5, 6], SamplingParams(max_tokens=12, ignore_eos=True))
    while new.num_preemptions == 0:
        engine.step()
    assert engine.abort("new") == ["new"]
    engine.run()
    assert engine.kv_cache.num_free_blocks == 5


def test_a_result_does_not_reach_a_new_request_with_the_id_of_an_aborted_one() -> None:
    engine = FakeEngine()
    engine.add("a", [1, 2, 3])
    plan = engine.scheduler.schedule()
    result = engine.worker.execute(plan)
    engine.abort("a")
    engine.add("a", [9, 9])
    assert engine.scheduler.update(plan, result) == []
    engine.run()
    expected = complete([9, 9], SamplingParams(max_tokens=4, ignore_eos=True), SCOPE, 1_000)
    assert engine.outcomes["a"].token_ids == expected


def test_a_failed_request_ends_with_an_error_and_its_blocks_are_not_reused() -> None:
    engine = FakeEngine()
    engine.add("bad", range(10), ENDLESS)
    engine.add("good", range(20, 30))
    engine.step()
    engine.worker.failing["bad"] = FailureKind.NOT_NUMBERS
    engine.run()
    outcome = engine.outcomes["bad"]
    assert (outcome.finish_reason, outcome.failure) == (FinishReason.ERROR, FailureKind.NOT_NUMBERS)
    assert engine.outcomes["good"].finish_reason is FinishReason.LENGTH
    engine.add("again", range(10))
    engine.run()
    assert engine.outcomes["again"].num_cached_tokens == 0
    assert engine.kv_cache.num_free_blocks == 64


def test_a_failure_of_an_unknown_request_is_ignored() -> None:
    engine = FakeEngine()
    engine.add("a", [1])
    plan = engine.scheduler.schedule()
    result = engine.worker.execute(plan)
    updates = engine.scheduler.update(plan, StepResult(result.sampled, failed={"gone": FailureKind.NOT_NUMBERS}))
    assert [(update.request_id, update.finish_reason) for update in updates] == [("a", None)]


def test_a_row_that_should_sample_and_did_not_ends_with_an_error() -> None:
    engine = FakeEngine()
    engine.add("a", [1])
    plan = engine.scheduler.schedule()
    updates = engine.scheduler.update(plan, StepResult([[]]))
    assert updates[0].finish_reason is FinishReason.ERROR
    assert updates[0].failure is FailureKind.STEP_FAILED
    assert not engine.scheduler.has_work


def test_tokens_and_logprobs_after_a_stop_are_dropped() -> None:
    engine = FakeEngine()
    engine.add("a", [1], SamplingParams(max_tokens=9, stop_token_ids=(40,), logprobs=0))
    plan = engine.scheduler.schedule()
    engine.worker.execute(plan)
    entries = [object(), object(), object()]
    result = StepResult([[39, 40, 41]], logprobs={"a": entries})  # type: ignore[dict-item]
    (update,) = engine.scheduler.update(plan, result)
    assert list(update.new_token_ids) == [39, 40]
    assert update.logprobs == entries[:2]
    assert (update.finish_reason, update.stop_token_id) == (FinishReason.STOP, 40)


def test_the_canary_gives_the_same_tokens_after_every_kind_of_end() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
    engine = FakeEngine(num_blocks=12, config=config)

    def canary(name: str) -> list[int]:
        engine.add(name, [3, 1, 4, 1, 5], SamplingParams(max_tokens=12, ignore_eos=True))
        engine.run()
        return engine.outcomes[name].token_ids

    before = canary("before")
    for round_number in range(20):
        for index in range(6):
            engine.add(f"{round_number}-{index}", [3, 1, 4, 1, index, *range(round_number)])
        engine.step()
        engine.abort(f"{round_number}-1", f"{round_number}-5")
        engine.worker.failing[f"{round_number}-0"] = FailureKind.NOT_NUMBERS
        engine.run()
        assert engine.kv_cache.num_free_blocks == 12
        assert canary(f"after-{round_number}") == before
    assert engine.scheduler.stats().preemptions > 0


def test_integrity_finds_a_lost_request() -> None:
    engine = FakeEngine()
    engine.add("a", [1])
    engine.step()
    engine.scheduler.check_integrity()
    engine.scheduler._running.clear()
    with pytest.raises(IntegrityError, match="1 requests, 0 run, 0 wait"):
        engine.scheduler.check_integrity()
