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
from pagefleet_engine.errors import ContextTooLong, QueueFull
from pagefleet_engine.sampling_params import SamplingParams
from pagefleet_protocol.block_hash import PrefixScope

from tests.fakes.paged_connector import EVERYTHING, PagedConnector, Script
from tests.fakes.paged_worker import FakeEngine, complete

SCOPES = (PrefixScope("fake"), PrefixScope("fake", salt="tenant"))
TEXTS = ([1, 2, 3, 4] * 10, [1, 2, 3, 4] * 3 + [5, 6] * 14)


@dataclass(frozen=True)
class Arrival:
    prompt: list[int]
    sampling: SamplingParams
    script: Script
    priority: int
    scope: PrefixScope


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class Abort:
    newest: int
    amid_step: bool


@dataclass(frozen=True)
class Reset:
    pass


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
    lambda text, cut, sampling, script, priority, scope: Arrival(text[:cut], sampling, script, priority, scope),
    st.sampled_from(TEXTS),
    st.integers(1, 40),
    samplings,
    scripts,
    st.integers(-1, 1),
    st.sampled_from([SCOPES[0], SCOPES[0], SCOPES[0], SCOPES[1]]),
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


engines = st.builds(
    Setting,
    st.integers(3, 24),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 24),
    st.sampled_from(["fcfs", "priority"]),
    st.sampled_from([1, 2, 3]),
)


class Trace:
    """Plays events, and then lets everything end."""

    def __init__(self, setting: Setting) -> None:
        self.connector = PagedConnector()
        config = SchedulerConfig(
            max_num_seqs=setting.seats,
            max_num_batched_tokens=setting.seats + setting.extra,
            policy=setting.policy,
            max_num_queued_reqs=8,
        )
        self.engine = FakeEngine(
            setting.num_blocks,
            setting.block_size,
            config,
            max_model_len=64,
            max_in_flight=setting.depth,
            connector=self.connector,
        )
        self.connector.attach(self.engine)
        self.accepted: dict[str, Arrival] = {}

    def play(self, event: Arrival | Steps | Abort | Reset) -> None:
        match event:
            case Arrival():
                self._arrive(event)
            case Steps(count):
                for _ in range(count):
                    self.step()
            case Abort(newest, amid_step):
                self._abort(f"r{len(self.accepted) - 1 - newest}", amid_step)
            case Reset():
                self.engine.scheduler.reset_prefix_cache()

    def step(self) -> int:
        """Let the engine and the connector go on by a turn; returns the tokens computed."""
        before = self.engine.worker.num_computed_tokens
        self.engine.step()
        self.connector.turn()
        return self.engine.worker.num_computed_tokens - before

    def end(self) -> None:
        engine = self.engine
        num_idle = 0
        for _ in range(3_000):
            if not engine.scheduler.has_work and not engine.in_flight and not self.connector.is_busy:
                return
            was_busy = self.connector.is_busy or bool(engine.in_flight)
            num_idle = 0 if self.step() or was_busy else num_idle + 1
            assert num_idle < 3, f"all stand still: {engine.scheduler.stats()}"
        raise AssertionError(f"not done: {engine.scheduler.stats()}")

    def _arrive(self, arrival: Arrival) -> None:
        name = f"r{len(self.accepted)}"
        self.connector.scripts[name] = arrival.script
        try:
            self.engine.add(name, arrival.prompt, arrival.sampling, priority=arrival.priority, scope=arrival.scope)
        except ContextTooLong:
            assert len(arrival.prompt) >= self.engine.scheduler.max_model_len
        except QueueFull:
            assert self.engine.scheduler.stats().requests_waiting >= 8
        else:
            self.accepted[name] = arrival

    def _abort(self, name: str, amid_step: bool) -> None:
        if not amid_step:
            self.engine.abort(name)
            return
        self.engine.launch()
        self.engine.abort(name)
        if self.engine.in_flight:
            self.engine.land()


@settings(max_examples=300)
@given(engines, events)
def test_every_request_ends_as_if_nothing_was_ever_transferred(
    setting: Setting, trace: list[Arrival | Steps | Abort | Reset]
) -> None:
    played = Trace(setting)
    for event in trace:
        played.play(event)
    played.end()

    engine, connector = played.engine, played.connector
    for name, arrival in played.accepted.items():
        outcome = engine.outcomes[name]
        expected = complete(arrival.prompt, arrival.sampling, arrival.scope, engine.scheduler.max_model_len)
        if outcome.finish_reason is FinishReason.ABORT:
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
            assert name not in connector.completed
        elif outcome.finish_reason is FinishReason.ERROR:
            assert (outcome.failure, outcome.token_ids) == (FailureKind.KV_LOAD_FAILED, [])
            assert arrival.script.failure is not None
            assert name not in connector.completed
        else:
            assert outcome.token_ids == expected
            assert name in connector.completed
    assert len(connector.ended_requests) == len(played.accepted)
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks
    assert engine.scheduler.stats().kv_usage == 0.0
    engine.scheduler.check_integrity()


@settings(max_examples=100)
@given(engines, st.lists(arrivals, min_size=2, max_size=8))
def test_loads_alone_never_lock_each_other_out(setting: Setting, trace: list[Arrival]) -> None:
    """All arrive at once, all want more than the pool has together."""
    played = Trace(setting)
    for arrival in trace:
        played.play(arrival)
    played.end()
    assert engine_is_empty(played.engine)
    assert len(played.connector.ended_requests) == len(played.accepted)


def engine_is_empty(engine: FakeEngine) -> bool:
    return engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks and not engine.scheduler.has_work
