"""Why a prompt was not found in the prefix cache, and how large the steps were."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core import prefix_lookups
from pagefleet_engine.core.outputs import StepSizes
from pagefleet_engine.core.prefix_lookups import MISS_REASONS
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.paged_worker import FakeEngine

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def ask(engine: FakeEngine, name: str, prompt: Iterable[int], **more: object) -> dict[str, int]:
    """Run a request; returns the tokens that it missed, by reason, without zeros. Blocks have 4 tokens."""
    before = list(engine.scheduler.stats().lookups.missed_tokens)
    engine.add(name, prompt, ONE, **more)  # type: ignore[arg-type]
    engine.run()
    lookups = engine.scheduler.stats().lookups
    assert lookups.queried_tokens == lookups.hit_tokens + sum(lookups.missed_tokens)
    after = zip(MISS_REASONS, lookups.missed_tokens, before, strict=True)
    return {reason: now - then for reason, now, then in after if now > then}


def test_text_that_nobody_asked_before_is_new() -> None:
    engine = FakeEngine()
    assert ask(engine, "a", range(10)) == {"new": 8, "short": 2}
    assert ask(engine, "again", range(10)) == {"short": 2}
    assert ask(engine, "longer", range(20)) == {"new": 8, "short": 4}
    assert ask(engine, "branch", [*range(8), *range(50, 60)]) == {"new": 8, "short": 2}


def test_a_prompt_without_a_full_block_is_too_short() -> None:
    engine = FakeEngine()
    assert ask(engine, "a", range(4)) == {"short": 4}
    assert ask(engine, "b", [1]) == {"short": 1}


def test_what_made_room_for_others_was_evicted() -> None:
    engine = FakeEngine(num_blocks=6)
    ask(engine, "a", range(10))
    ask(engine, "b", range(100, 120))
    assert ask(engine, "again", range(10)) == {"evicted": 4, "short": 2}  # of a prompt, the tail goes first


def test_another_tenant_s_prompt_has_another_salt() -> None:
    engine = FakeEngine()
    other = PrefixScope("m", salt="tenant")
    ask(engine, "a", range(10))
    assert ask(engine, "b", range(10), scope=other) == {"salt": 8, "short": 2}
    assert ask(engine, "c", range(10), scope=other) == {"short": 2}
    assert ask(engine, "d", range(30, 40), scope=other) == {"new": 8, "short": 2}


def test_a_reset_forgets_the_reasons_too() -> None:
    engine = FakeEngine()
    ask(engine, "a", range(10))
    engine.scheduler.reset_prefix_cache()
    assert ask(engine, "again", range(10)) == {"new": 8, "short": 2}


def test_prompts_that_may_not_be_looked_up_are_not_counted() -> None:
    engine = FakeEngine()
    engine.add("a", range(10), SamplingParams(max_tokens=1, prompt_logprobs=0))
    engine.run()
    assert engine.scheduler.stats().lookups.queried_tokens == 0


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_lookups, "_REMEMBERED", 2)
    engine = FakeEngine(num_blocks=6)
    for number in range(20):
        ask(engine, f"r{number}", range(100 * number, 100 * number + 10))
    lookups = engine.scheduler.stats().lookups
    assert len(lookups._lost) <= 4
    assert len(lookups._beginnings) <= 4


def test_steps_by_their_tokens() -> None:
    sizes = StepSizes()
    for num_tokens in (1, 2, 3, 4, 5, 8, 9, 2**20):
        sizes.count(num_tokens)
    assert sizes.counts[:5] == [1, 1, 2, 2, 1]
    assert (sizes.counts[-1], len(sizes.counts)) == (1, 21)
    engine = FakeEngine(config=SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=1))
    engine.add("a", range(12), SamplingParams(max_tokens=3, ignore_eos=True))
    engine.run()
    assert engine.scheduler.stats().step_sizes.counts[:5] == [2, 0, 1, 1, 0]
    assert engine.scheduler.stats().step_sizes.num_tokens == 14
