"""Random traces: whatever arrives, leaves, fails or is preempted, every request ends as if it had been alone."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.config import Policy, SchedulerConfig
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.core.request import FinishReason
from pagefleet_engine.core.step import FailureKind
from pagefleet_engine.errors import ContextTooLong
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

from tests.example_counts import examples
from tests.fakes.paged_worker import FakeEngine, complete
from tests.fakes.request_traces import MAX_QUEUED, Abort, Arrival, Event, Steps, Trace
from tests.fakes.trie_forms import choice

SCOPES = (PrefixScope("fake"), PrefixScope("fake", adapter="a"), PrefixScope("fake", salt="a"))


@dataclass(frozen=True)
class Failure:
    """The model's output for a request is no number."""

    age: int


# One window per layer. Three of them give one group; the others two to four.
WINDOWS = ((None,), (6,), (None, None), (None, 5), (None, 1), (None, 4, 4, 4), (17, 3), (None, 12, 2))

# Prompts are cut from few long texts over few tokens, so that they share prefixes of every length.
TEXTS = ([1, 2, 3, 4] * 12, [1, 2, 3, 4] * 3 + [5, 6] * 18, [2] * 48)
prompts = st.builds(
    lambda text, length, tail: TEXTS[text][:length] + tail,
    st.integers(0, len(TEXTS) - 1),
    st.integers(1, 48),
    st.lists(st.integers(0, 60), max_size=3),
)
# Few tokens, so that forms have parts that only one token continues, of all lengths.
forms = st.lists(st.lists(st.sampled_from((1, 2, 30)), min_size=1, max_size=9), min_size=1, max_size=3)
samplings = st.builds(
    lambda max_tokens, min_tokens, ignore_eos, stops, prompt_logprobs, form: SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens or min_tokens),
        ignore_eos=ignore_eos,
        stop_token_ids=stops,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=None if form is None else choice(*form),
    ),
    st.one_of(st.integers(1, 24), st.none()),
    st.integers(0, 6),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=4).map(tuple),
    st.sampled_from([None, None, None, 0]),
    st.none() | forms,
)
events = st.lists(
    st.one_of(
        st.builds(Arrival, prompts, samplings, st.integers(-1, 1), st.sampled_from(SCOPES)),
        st.builds(Arrival, prompts, samplings, st.integers(-1, 1), st.just(SCOPES[0])),
        st.builds(Steps, st.integers(1, 6)),
        st.builds(Abort, st.integers(0, 3), st.booleans()),
        st.builds(Failure, st.integers(0, 3)),
    ),
    min_size=8,
    max_size=30,
)
engines = st.builds(
    lambda num_blocks, block_size, seqs, extra, threshold, policy, caching, depth, windows, chunked, cascade, piped: (
        FakeEngine(
            num_blocks * len(group_layers(windows)),
            block_size,
            SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=seqs + extra,
                long_prefill_token_threshold=threshold,
                policy=policy,
                max_num_queued_reqs=MAX_QUEUED,
            ),
            max_model_len=64,
            enable_prefix_caching=caching,
            max_in_flight=depth,
            windows=windows,
            chunked=chunked,
            cascade=cascade,
            num_stages=depth if piped else 1,
        )
    ),
    st.integers(2, 24),
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(0, 40),
    st.one_of(st.none(), st.integers(1, 12)),
    st.sampled_from(["fcfs", "priority"]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([2, 1, 3]),
    st.sampled_from(WINDOWS),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


class FailingTrace(Trace):
    """Has the model fail, too."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.failed: set[str] = set()

    def play(self, event: Event | Failure) -> None:
        if not isinstance(event, Failure):
            super().play(event)
        elif (name := self.name(event.age)) in self.accepted:
            self.engine.worker.failing[name] = FailureKind.NOT_NUMBERS
            self.failed.add(name)


@settings(max_examples=examples(300), deadline=None)
@given(engines, events)
def test_every_request_ends_as_if_undisturbed(engine: FakeEngine, trace: list[Event | Failure]) -> None:
    played = FailingTrace(engine)
    for event in trace:
        played.play(event)
    engine.run()

    for request_id, (arrival, request) in played.accepted.items():
        outcome = engine.outcomes[request_id]
        expected = played.expected(request_id)
        if outcome.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
            assert outcome.finish_reason is FinishReason.ABORT or request_id in played.failed
        else:
            assert outcome.token_ids == expected
            assert outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            positions = range(1, len(arrival.prompt)) if arrival.sampling.prompt_logprobs is not None else ()
            assert [-entry.logprobs[0] for entry in outcome.prompt_logprobs] == list(positions)
        if outcome.token_ids:
            assert outcome.num_cached_tokens == request.num_cached_tokens < len(arrival.prompt)
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks
    assert engine.scheduler.stats().kv_usage == 0.0


@settings(max_examples=examples(100), deadline=None)
@given(engines, events)
def test_limits_of_a_step_hold(engine: FakeEngine, trace: list[Event | Failure]) -> None:
    played = FailingTrace(engine)
    for event in trace:
        played.play(event)
    engine.run()

    config = engine.scheduler.config
    for plan in engine.plans:
        assert len(plan.rows) <= config.max_num_seqs
        assert plan.num_tokens <= config.max_num_batched_tokens
        if len(plan.rows) > 1 and config.long_prefill_token_threshold is not None:
            assert max(row.num_new_tokens for row in plan.rows) <= config.long_prefill_token_threshold


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(3, 10), st.lists(prompts, min_size=3, max_size=8), st.sampled_from(["fcfs", "priority"]))
def test_under_memory_pressure_all_outputs_hold_and_the_first_is_never_preempted(
    num_blocks: int, texts: list[list[int]], policy: Policy
) -> None:
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=16, policy="fcfs" if policy == "fcfs" else "priority"
    )
    engine = FakeEngine(num_blocks, 4, config)
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    accepted = []
    for index, prompt in enumerate(texts):
        try:
            accepted.append(engine.add(f"r{index}", prompt, sampling))
        except ContextTooLong:
            assert len(prompt) >= num_blocks * 4
    engine.run()
    if accepted:
        assert accepted[0].num_preemptions == 0
    for request in accepted:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert engine.outcomes[request.request_id].token_ids == complete(
            prompt, sampling, SCOPES[0], engine.scheduler.max_model_len
        )
