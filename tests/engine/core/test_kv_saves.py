"""Blocks that only transfers keep, when the pool has too few for requests."""

from __future__ import annotations

from pagefleet_engine.config import SchedulerConfig
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.paged_connector import PagedConnector, Script
from tests.fakes.paged_worker import FakeEngine


class Kept(PagedConnector):
    """Keeps what it is offered until it is asked to do without."""

    def relieve(self, num_blocks: int) -> None:
        self.relieved.append(num_blocks)
        for save in self.saves.values():
            save.turns = 0

    relieved: list[int]


def make_engine(num_blocks: int) -> tuple[FakeEngine, Kept]:
    connector = Kept(Script(has=0, save_turns=1_000))
    connector.relieved = []
    engine = FakeEngine(num_blocks, 4, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), connector=connector)
    connector.attach(engine)
    return engine, connector


def answer(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def run(engine: FakeEngine, connector: PagedConnector | None = None) -> None:
    for _ in range(200):
        if not engine.scheduler.has_work:
            return
        engine.step()
        if connector is not None:
            connector.turn()
    raise AssertionError("not done")


def test_a_request_that_lacks_blocks_gets_those_that_saves_keep() -> None:
    engine, connector = make_engine(16)
    engine.add("a", range(40), answer(1))
    run(engine)
    assert connector.relieved == []
    engine.add("b", range(20, 60), answer(1))
    run(engine)
    assert connector.relieved == [10 - 6]  # of 16 blocks 10 are kept, and it needs as many
    assert len(engine.outcomes["b"].token_ids) == 1


def test_growth_asks_too() -> None:
    engine, connector = make_engine(16)
    engine.add("a", range(40), answer(1))
    run(engine)
    engine.add("b", range(20, 40), answer(12))
    run(engine)
    assert connector.relieved
    assert len(engine.outcomes["b"].token_ids) == 12


def test_a_load_asks_for_what_it_lacks() -> None:
    engine, connector = make_engine(16)
    engine.add("a", range(40), answer(1))
    run(engine)
    connector.scripts["b"] = Script()
    engine.add("b", range(20, 58), answer(1))
    run(engine, connector)
    assert connector.relieved == [9 - 6]
    assert engine.outcomes["b"].num_cached_tokens == 36


def test_a_load_that_waits_for_other_loads_asks_for_nothing() -> None:
    engine, connector = make_engine(32)
    engine.add("a", range(16), answer(1))
    run(engine)
    for number, name in enumerate("bc", 1):
        connector.scripts[name] = Script(turns=3)
        engine.add(name, range(10 * number, 10 * number + 38), answer(1))
    engine.step()
    assert connector.loads.keys() == {"b"}, "both would have more than half of the pool"
    run(engine, connector)
    assert connector.relieved == []
    assert [engine.outcomes[name].num_cached_tokens for name in "bc"] == [36, 36]


def test_nothing_is_asked_for_where_nothing_is_kept() -> None:
    engine, connector = make_engine(16)
    connector.default = Script(has=0)
    for name in "abc":
        engine.add(name, range(40), answer(4))
    run(engine)
    assert connector.relieved == []
