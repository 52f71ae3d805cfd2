"""A request that comes with output of another engine goes on as if it had made that output here."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.request import FinishReason
from pagefleet_engine.errors import ContextTooLong, InvalidRequest
from pagefleet_protocol.sampling_params import SamplingParams

from tests.example_counts import examples
from tests.fakes.paged_worker import EOS, VOCAB_SIZE, FakeEngine, Outcome

PROMPT = [1, 2, 3, 4] * 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

samplings = st.builds(
    lambda max_tokens, min_tokens, ignore_eos, stops, prompt_logprobs: SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens or min_tokens),
        ignore_eos=ignore_eos,
        stop_token_ids=stops,
        prompt_logprobs=prompt_logprobs,
    ),
    st.one_of(st.integers(1, 20), st.none()),
    st.integers(0, 6),
    st.booleans(),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6).map(tuple),
    st.sampled_from([None, None, None, 0]),
)


def run(prompt: list[int], sampling: SamplingParams, resumed: list[int], **engine: int) -> Outcome:
    fake = FakeEngine(max_model_len=64, **engine)  # type: ignore[arg-type]
    fake.add("r", prompt, sampling, resumed=resumed)
    fake.run()
    assert fake.kv_cache.num_free_blocks == fake.kv_cache.num_blocks
    return fake.outcomes["r"]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=48), samplings, st.integers(1, 8), st.integers(1, 3))
def test_resumed_anywhere_the_rest_is_the_same(
    prompt: list[int], sampling: SamplingParams, block_size: int, depth: int
) -> None:
    whole = run(prompt, sampling, [])
    for count in range(len(whole.token_ids) + 1):
        rest = run(prompt, sampling, whole.token_ids[:count], block_size=block_size, max_in_flight=depth)
        assert rest.token_ids == whole.token_ids[count:]
        assert (rest.finish_reason, rest.stop_token_id) == (whole.finish_reason, whole.stop_token_id)
        assert (rest.num_cached_tokens is None) == (count == len(whole.token_ids))


def test_under_memory_pressure_what_was_resumed_is_neither_lost_nor_told() -> None:
    whole = run(PROMPT, GREEDY, [])
    engine = FakeEngine(14, 4, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))
    for index in range(4):
        engine.add(f"r{index}", PROMPT, GREEDY, resumed=whole.token_ids[: 2 * index + 1])
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    for index in range(4):
        assert engine.outcomes[f"r{index}"].token_ids == whole.token_ids[2 * index + 1 :]


def test_blocks_of_resumed_tokens_are_shared_like_others_and_counted_once() -> None:
    engine = FakeEngine(64, 4)
    engine.add("first", PROMPT, GREEDY)
    engine.run()
    told = engine.outcomes["first"].token_ids
    again = engine.add("again", PROMPT, GREEDY, resumed=told[:9])
    engine.run()
    assert engine.outcomes["again"].token_ids == told[9:]
    assert again.num_cached_tokens == len(PROMPT)  # of the prompt: 28 tokens came from the cache
    stats = engine.scheduler.stats()
    assert (stats.lookups.queried_tokens, stats.lookups.hit_tokens) == (20 + 29, 28)


@pytest.mark.parametrize(
    ("sampling", "resumed", "reason", "stop_token"),
    [
        (SamplingParams(max_tokens=3), [9, 8, 9], FinishReason.LENGTH, None),
        (SamplingParams(max_tokens=9, stop_token_ids=(5,)), [9, 8, 5], FinishReason.STOP, 5),
        (SamplingParams(max_tokens=9), [9, EOS], FinishReason.STOP, None),
        (SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(5,)), [5, 5], FinishReason.STOP, 5),
        (SamplingParams(max_tokens=None), [9] * 44, FinishReason.LENGTH, None),
    ],
)
def test_output_that_is_complete_ends_the_request_at_once(
    sampling: SamplingParams, resumed: list[int], reason: FinishReason, stop_token: int | None
) -> None:
    engine = FakeEngine(max_model_len=64)
    engine.add("r", PROMPT, sampling, resumed=resumed)
    outcome = engine.outcomes["r"]
    assert (outcome.token_ids, outcome.finish_reason, outcome.stop_token_id) == ([], reason, stop_token)
    assert not engine.scheduler.has_work
    engine.add("r", PROMPT, sampling)  # its id is free


@pytest.mark.parametrize(
    ("sampling", "resumed"),
    [
        (SamplingParams(max_tokens=3), [9, 8, 9, 8]),
        (SamplingParams(max_tokens=9, stop_token_ids=(5,)), [9, 5, 8]),
        (SamplingParams(max_tokens=9), [EOS, 9]),
        (SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(5,)), [5, 5, 9]),
        (SamplingParams(max_tokens=None), [9] * 45),
    ],
)
def test_output_that_no_engine_has_made_is_refused(sampling: SamplingParams, resumed: list[int]) -> None:
    engine = FakeEngine(max_model_len=64)
    with pytest.raises(InvalidRequest) as refused:
        engine.add("r", PROMPT, sampling, resumed=resumed)
    assert refused.value.param == "resumed_token_ids"
    assert not engine.scheduler.has_work
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks


def test_the_pool_bounds_prompt_and_resumed_output_together() -> None:
    engine = FakeEngine(7, 4)  # 28 tokens
    engine.add("full", PROMPT, SamplingParams(max_tokens=100), resumed=[9] * 8)
    assert engine.outcomes["full"].finish_reason is FinishReason.LENGTH
    engine.add("r", PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), resumed=[9] * 7)
    engine.run()
    assert len(engine.outcomes["r"].token_ids) == 1
    with pytest.raises(ContextTooLong):
        engine.add("long", PROMPT * 2, SamplingParams(), resumed=[9])
