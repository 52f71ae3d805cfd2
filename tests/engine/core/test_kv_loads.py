"""Requests that wait for K/V from elsewhere: who gets blocks, in what order they go on, what becomes of failures."""

from __future__ import annotations

import pytest
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.core.kv_loads import ASKS_PER_TURN
from pagefleet_engine.core.request import FinishReason, RequestStatus
from pagefleet_engine.core.step import FailureKind
from pagefleet_engine.errors import QueueFull
from pagefleet_kv.port import LoadDone
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.paged_connector import PagedConnector, Script
from tests.fakes.paged_worker import SCOPE, FakeEngine, complete

NOTHING, ALL = Script(has=0), Script(turns=3)


def length(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class Scene:
    def __init__(self, num_blocks: int = 64, default: Script = ALL, seats: int = 4, **config: int) -> None:
        self.connector = PagedConnector(default)
        settings = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=32, **config)  # type: ignore[arg-type]
        self.engine = FakeEngine(num_blocks, 4, settings, connector=self.connector)
        self.connector.attach(self.engine)

    def add(
        self, name: str, num_tokens: int, script: Script | None = None, max_tokens: int = 4, first: int = 0
    ) -> None:
        if script is not None:
            self.connector.scripts[name] = script
        self.engine.add(name, range(first, first + num_tokens), length(max_tokens))

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.connector.turn()

    def run(self) -> None:
        for _ in range(500):
            if not (self.engine.scheduler.has_work or self.connector.is_busy):
                return
            self.turns(1)
        raise AssertionError("not done")

    def answer(self, name: str) -> list[int]:
        return self.engine.outcomes[name].token_ids

    def num_cached(self, name: str) -> int | None:
        return self.engine.outcomes[name].num_cached_tokens


def test_a_load_is_a_prefix_hit() -> None:
    scene = Scene()
    scene.add("a", 22)
    assert scene.engine.scheduler.only_parked
    scene.turns(1)
    stats = scene.engine.scheduler.stats()
    assert (stats.requests_waiting, stats.requests_running) == (1, 0)
    assert scene.connector.loads.keys() == {"a"}
    scene.run()
    assert (scene.num_cached("a"), scene.answer("a")) == (20, complete(range(22), length(4), SCOPE, 1_000))
    assert scene.engine.worker.num_computed_tokens == 2 + 3


def test_the_first_token_tells_how_long_its_kv_was_awaited() -> None:
    scene = Scene(num_blocks=5)
    scene.add("a", 18, Script(has=4, turns=3, unsure_turns=2), max_tokens=1)
    scene.add("b", 4, NOTHING, max_tokens=2)
    for _ in range(12):
        scene.turns(1)
        scene.engine.now += 1.0
    assert scene.engine.outcomes["a"].finish_reason is not None
    waited = scene.engine.outcomes["a"].kv_wait_s
    assert waited is not None
    assert 5.0 <= waited < 12.0, "while it was not known whether there is any, too"
    assert scene.engine.outcomes["b"].kv_wait_s is None
    assert scene.engine.outcomes["b"].num_cached_tokens == 0


def test_of_a_whole_number_of_blocks_the_last_is_computed() -> None:
    scene = Scene()
    scene.add("a", 20)
    scene.run()
    assert scene.num_cached("a") == 16


def test_what_did_not_come_is_computed() -> None:
    scene = Scene()
    scene.add("a", 22, Script(turns=2, brings=2))
    scene.run()
    assert (scene.num_cached("a"), scene.answer("a")) == (8, complete(range(22), length(4), SCOPE, 1_000))
    assert scene.connector.num_loads == 1


def test_three_outputs_of_one_prompt_share_one_load() -> None:
    scene = Scene()
    scene.add("a", 22)
    for name in ("b", "c"):  # not known until the first has it
        scene.add(name, 22, Script(has=5, unsure_turns=4))
    scene.run()
    assert scene.connector.num_loads == 1
    assert [scene.num_cached(name) for name in "abc"] == [20, 20, 20]


def test_a_failure_ends_the_request_before_its_first_token() -> None:
    scene = Scene()
    scene.add("a", 22, Script(turns=1, failure="gone"))
    scene.run()
    outcome = scene.engine.outcomes["a"]
    assert (outcome.failure, outcome.finish_reason) == (FailureKind.KV_LOAD_FAILED, FinishReason.ERROR)
    assert scene.engine.kv_cache.num_free_blocks == 64


def test_nobody_waits_for_prompt_logprobs_or_for_nothing() -> None:
    scene = Scene()
    scoring = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    scored = scene.engine.add("scored", range(22), scoring)
    short = scene.engine.add("short", range(4), length(2))
    assert (scored.status, short.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    scene.run()
    assert scene.connector.num_loads == 0


def test_parked_requests_count_in_the_queue() -> None:
    scene = Scene(max_num_queued_reqs=2)
    scene.add("a", 22)
    scene.add("b", 22, first=30)
    with pytest.raises(QueueFull):
        scene.add("c", 3)
    scene.run()


def test_a_request_comes_back_ahead_of_those_that_arrived_later() -> None:
    scene = Scene(seats=1)
    scene.add("runs", 5, NOTHING, max_tokens=10)
    scene.turns(1)
    scene.add("older", 22)
    scene.add("younger", 9, NOTHING, first=30)
    scene.run()
    order = [new.request_id for plan in scene.engine.plans for new in plan.new]
    assert order == ["runs", "older", "younger"]


def test_others_run_while_it_loads() -> None:
    scene = Scene(seats=1)
    scene.add("older", 22, Script(turns=10))
    scene.add("younger", 9, NOTHING, first=30)
    scene.run()
    order = [new.request_id for plan in scene.engine.plans for new in plan.new]
    assert order == ["younger", "older"]


def test_loads_take_half_of_the_pool_and_one_alone_what_it_needs() -> None:
    scene = Scene(num_blocks=16)
    scene.add("a", 30)  # seven blocks
    scene.add("b", 30, first=30)
    scene.turns(1)
    assert scene.connector.loads.keys() == {"a"}
    scene.run()
    scene.add("long", 54)
    scene.turns(1)
    assert scene.connector.loads.keys() == {"long"}
    scene.run()


def test_a_younger_request_does_not_take_what_a_load_waits_for() -> None:
    scene = Scene(num_blocks=16)
    scene.add("runs", 28, NOTHING, max_tokens=3, first=30)  # seven blocks, then eight
    scene.turns(1)
    scene.add("loads", 38)  # nine blocks and one for who runs: one too many
    scene.turns(1)
    assert scene.connector.loads == {}
    scene.add("younger", 12, NOTHING, first=12)
    scene.turns(1)
    assert [new.request_id for plan in scene.engine.plans for new in plan.new] == ["runs"]
    scene.run()
    assert scene.num_cached("loads") == 36


def test_an_id_can_be_used_again_while_its_old_load_still_ends() -> None:
    scene = Scene()
    scene.add("a", 22, Script(turns=5))
    scene.turns(1)
    assert scene.engine.abort("a") == ["a"]
    assert scene.engine.kv_cache.num_free_blocks == 59
    scene.add("a", 14, Script(turns=1), first=30)
    scene.turns(2)
    assert scene.connector.num_loads == 1
    scene.run()
    assert (scene.connector.num_loads, scene.num_cached("a")) == (2, 12)
    assert scene.engine.kv_cache.num_free_blocks == 64


@pytest.mark.parametrize("turns", range(8))
def test_an_abort_at_any_moment_gives_everything_back(turns: int) -> None:
    scene = Scene()
    scene.add("a", 22, Script(unsure_turns=2, turns=2, save_turns=3))
    scene.turns(turns)
    assert scene.engine.abort("a") == ["a"]
    scene.run()
    assert scene.engine.kv_cache.num_free_blocks == 64
    assert scene.connector.completed == []
    assert len(scene.connector.ended_requests) == 1


def test_who_is_let_in_before_takes_nobodys_prefix_for_good() -> None:
    scene = Scene(num_blocks=12, default=Script(turns=1))
    names = "abcd"
    for number, name in enumerate(names):
        scene.add(name, 13, NOTHING, max_tokens=1, first=15 * number)
        scene.run()
    for number, name in enumerate(names):  # their prefixes are in the pool, as long as none of the others is let in
        scene.add(f"{name} again", 13, max_tokens=8, first=15 * number)
    scene.run()
    assert [scene.num_cached(f"{name} again") for name in names] == [12] * len(names)
    assert scene.connector.num_loads > 0


def test_a_preempted_request_loads_what_was_lost() -> None:
    scene = Scene(num_blocks=12, default=Script(turns=2))
    scene.add("old", 17, NOTHING, max_tokens=16)
    scene.add("new", 17, max_tokens=16, first=30)
    scene.run()
    assert scene.engine.scheduler.stats().preemptions > 0
    assert scene.connector.num_loads > 1
    assert scene.answer("new") == complete(range(30, 47), length(16), SCOPE, 1_000)


def test_a_request_that_has_run_survives_a_failed_load() -> None:
    scene = Scene(num_blocks=12)
    scene.add("old", 17, NOTHING, max_tokens=16)
    scene.add("new", 17, NOTHING, max_tokens=16, first=30)
    scene.turns(3)
    scene.connector.scripts["new"] = Script(turns=1, failure="gone")
    scene.run()
    assert scene.engine.scheduler.stats().preemptions > 0
    assert scene.connector.num_loads > 0
    assert scene.answer("new") == complete(range(30, 47), length(16), SCOPE, 1_000)


def test_a_long_queue_is_asked_about_bit_by_bit() -> None:
    scene = Scene(default=Script(unsure_turns=100), seats=1)
    for number in range(3 * ASKS_PER_TURN):
        scene.add(f"{number}", 9)
    asked = scene.connector.asked
    asked.clear()
    scene.turns(3)
    assert sorted(asked) == sorted(f"{number}" for number in range(3 * ASKS_PER_TURN))


def test_what_was_found_is_offered_and_after_preemption_again() -> None:
    scene = Scene(default=NOTHING)
    scene.add("a", 22, Script(has=0, save_turns=2))
    scene.run()
    scene.add("b", 22, Script(has=0, save_turns=2))
    scene.turns(1)
    assert [len(save.blocks) for save in scene.connector.saves.values()] == [5]
    assert scene.connector.offered["b"] == [0]
    scene.run()
    assert set(scene.connector.completed) == {"a", "b"}


def test_what_a_failed_step_touched_is_stored_for_nobody() -> None:
    scene = Scene(default=NOTHING)
    scene.add("fails", 22, max_tokens=8)
    scene.add("answers", 9, first=30)
    scene.add("leaves", 9, first=40, max_tokens=8)
    scene.turns(2)
    scene.engine.worker.failing["fails"] = FailureKind.NOT_NUMBERS
    scene.turns(1)
    scene.engine.abort("leaves")
    scene.run()
    assert scene.engine.outcomes["fails"].failure is FailureKind.NOT_NUMBERS
    assert scene.connector.discarded == ["fails"]
    assert len(scene.connector.ended_requests) == 3


def test_a_load_that_nobody_began_is_our_mistake() -> None:
    scene = Scene()
    scene.engine.scheduler._loads.ended([LoadDone("nobody", 0)])
    with pytest.raises(IntegrityError, match="did not begin"):
        scene.engine.scheduler.settle()
