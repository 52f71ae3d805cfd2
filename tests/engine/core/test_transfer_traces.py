"""Random traces with a connector that is late, brings a part, fails and keeps blocks: nobody outside can tell.

Every token is that of an undisturbed run, every request ends, no block is lost, nothing waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.config import Policy, SchedulerConfig
from pagefleet_engine.core.request import FinishReason
from pagefleet_engine.core.step import FailureKind
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

from tests.example_counts import examples
from tests.fakes.paged_connector import EVERYTHING, PagedConnector, Script
from tests.fakes.paged_worker import FakeEngine
from tests.fakes.request_traces import MAX_QUEUED, Abort, Arrival, Event, Steps, Trace

SCOPES = (PrefixScope("fake"), PrefixScope("fake", salt="tenant"))
TEXTS = ([1, 2, 3, 4] * 10, [1, 2, 3, 4] * 3 + [5, 6] * 14)


@dataclass(frozen=True)
class Scripted:
    """A request comes, and what becomes of its K/V."""

    arrival: Arrival
    script: Script


@dataclass(frozen=True)
class Reset:
    """All that is cached is forgotten."""


scripts = st.builds(
    Script,
    has=st.sampled_from([EVERYTHING, EVERYTHING, 0, 1, 3]),
    unsure_turns=st.sampled_from([0, 0, 3, 40]),
    turns=st.integers(0, 8),
    brings=st.sampled_from([EVERYTHING, EVERYTHING, 0, 1, 2]),
    failure=st.sampled_from([None, None, None, "the peer is gone"]),
    save_turns=st.integers(0, 6),
)
samplings = st.builds(
    lambda max_tokens, prompt_logprobs: SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs
    ),
    st.integers(1, 20),
    st.sampled_from([None, None, None, None, 0]),
)
arrivals = st.builds(
    lambda text, cut, sampling, priority, scope, script: Scripted(
        Arrival(text[:cut], sampling, priority, scope), script
    ),
    st.sampled_from(TEXTS),
    st.integers(1, 40),
    samplings,
    st.integers(-1, 1),
    st.sampled_from([SCOPES[0], SCOPES[0], SCOPES[0], SCOPES[1]]),
    scripts,
)
events = st.lists(
    st.one_of(
        arrivals, arrivals, st.builds(Steps, st.integers(1, 6)), st.builds(Abort, st.integers(0, 4), st.booleans()),
        st.builds(Reset),
    ),
    min_size=4,
    max_size=24,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    num_blocks: int
    block_size: int
    seats: int
    extra: int
    policy: Policy
    depth: int
    windows: tuple[int | None, ...] = (None,)
    chunked: bool = False


engines = st.builds(
    Setting,
    st.integers(3, 24),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 24),
    st.sampled_from(["fcfs", "priority"]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([(None,), (None,), (None, 5), (9,), (None, 4, 4, 4), (17, 3)]),
    st.booleans(),
)


class TransferTrace(Trace):
    """Has K/V transferred, too, and lets everything end."""

    def __init__(self, setting: Setting) -> None:
        self.connector = PagedConnector()
        config = SchedulerConfig(
            max_num_seqs=setting.seats,
            max_num_batched_tokens=setting.seats + setting.extra,
            policy=setting.policy,
            max_num_queued_reqs=MAX_QUEUED,
        )
        engine = FakeEngine(
            setting.num_blocks,
            setting.block_size,
            config,
            max_model_len=64,
            max_in_flight=setting.depth,
            windows=setting.windows,
            chunked=setting.chunked,
            connector=self.connector,
        )
        super().__init__(engine)
        self.connector.attach(engine)

    def play(self, event: Scripted | Reset | Event) -> None:
        match event:
            case Scripted(arrival, script):
                self.connector.scripts[self.name(-1)] = script
                super().play(arrival)
            case Reset():
                self.engine.scheduler.reset_prefix_cache()
            case _:
                super().play(event)

    def step(self) -> None:
        super().step()
        self.connector.turn()

    def end(self) -> None:
        engine = self.engine
        num_idle = 0
        for _ in range(3_000):
            if not engine.scheduler.has_work and not engine.in_flight and not self.connector.is_busy:
                return
            was_busy, num_computed = self.connector.is_busy or bool(engine.in_flight), engine.worker.num_computed_tokens
            self.step()
            num_idle = 0 if was_busy or engine.worker.num_computed_tokens > num_computed else num_idle + 1
            assert num_idle < 3, f"all stand still: {engine.scheduler.stats()}"
        raise AssertionError(f"not done: {engine.scheduler.stats()}")


@settings(max_examples=examples(300))
@given(engines, events)
def test_every_request_ends_as_if_nothing_was_ever_transferred(
    setting: Setting, trace: list[Scripted | Reset | Event]
) -> None:
    played = TransferTrace(setting)
    for event in trace:
        played.play(event)
    played.end()

    engine, connector = played.engine, played.connector
    for name in played.accepted:
        outcome, expected = engine.outcomes[name], played.expected(name)
        if outcome.finish_reason is FinishReason.ABORT:
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
            assert name not in connector.completed
        elif outcome.finish_reason is FinishReason.ERROR:
            assert (outcome.failure, outcome.token_ids) == (FailureKind.KV_LOAD_FAILED, [])
            assert connector.scripts[name].failure is not None
            assert name not in connector.completed
        else:
            assert outcome.token_ids == expected
            assert name in connector.completed
    assert len(connector.ended_requests) == len(played.accepted)
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks
    assert engine.scheduler.stats().kv_usage == 0.0
    engine.scheduler.check_integrity()


@settings(max_examples=examples(100))
@given(engines, st.lists(arrivals, min_size=2, max_size=8))
def test_loads_alone_never_lock_each_other_out(setting: Setting, trace: list[Scripted]) -> None:
    """All arrive at once, all want more than the pool has together."""
    played = TransferTrace(setting)
    for arrival in trace:
        played.play(arrival)
    played.end()
    assert engine_is_empty(played.engine)
    assert len(played.connector.ended_requests) == len(played.accepted)


def engine_is_empty(engine: FakeEngine) -> bool:
    return engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks and not engine.scheduler.has_work
