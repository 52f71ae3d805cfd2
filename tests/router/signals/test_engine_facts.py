"""What a router learns of engines by asking them: facts, incarnations, and who answers for another model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import (
    FACTS_PATH,
    MAX_DATA_RANKS,
    EngineFacts,
    EngineFactsError,
    KvTransferFacts,
    decode_facts,
    encode_facts,
)
from pagefleet_router.engines.endpoints import EndpointTable, EngineView
from pagefleet_router.signals.http_get import ProbeAnswer, Prober
from pagefleet_router.signals.monitor import ASK_AGAIN_S, FactsAsker

from tests.fakes.faulty_engine import FaultyEngine, Fleet, fleet, raw
from tests.fakes.pair_fleet import with_ranks

FIRST, SECOND = "1" * 32, "2" * 32


def facts(incarnation: str = FIRST, model: str = "m", **fields: Any) -> EngineFacts:
    given: dict[str, Any] = {
        "scope": "s", "block_size": 16, "num_blocks": 100, "max_model_len": 256, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "vocab_size": 300, **fields,
    }  # fmt: skip
    return EngineFacts(incarnation=incarnation, model=model, **given)


def show(engine: FaultyEngine, told: EngineFacts) -> None:
    engine.incarnation = told.incarnation
    engine.internal[FACTS_PATH] = encode_facts(told)


def run(folder: Path, check: Callable[[Fleet], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with fleet(folder, raw(b"")) as one:
            await check(one)

    uvloop.run(scenario())


def facts_of(routers: Fleet, index: int = 0) -> EngineFacts | None:
    return routers.router.table.snapshot.engines[index].facts


def test_asked_once_and_again_after_a_restart(tmp_path: Path) -> None:
    async def check(one: Fleet) -> None:
        engine, table = one.engines[0], one.router.table
        changes: list[tuple[EngineFacts | None, EngineFacts | None]] = []
        table.subscribe_to_facts(lambda now, before: changes.append((before, now.facts)))
        show(engine, facts())
        await one.until(lambda: facts_of(one) == facts())
        asked = engine.num_asked[FACTS_PATH]
        old_tally = table.snapshot.engines[0].tally
        show(engine, facts(SECOND, num_blocks=7))
        await one.until(lambda: facts_of(one) == facts(SECOND, num_blocks=7))
        assert engine.num_asked[FACTS_PATH] == asked + 1, "facts of a known incarnation are not asked for"
        assert table.snapshot.engines[0].tally is not old_tally, "its requests went with the old one"
        assert changes == [(None, facts()), (facts(), None), (None, facts(SECOND, num_blocks=7))]

    run(tmp_path, check)


PASSES_KV = KvTransferFacts(role="decode", port=1, compatibility="c" * 64, bytes_per_token=1)


@pytest.mark.parametrize(
    "told",
    [None, b"garbage", b'{"incarnation": 3}', encode_facts(facts(num_blocks=0)),
     encode_facts(facts("1\r\nx-forged: 1", kv_transfer=PASSES_KV))],
    ids=["none", "garbage", "no text", "no blocks", "forging"],
)  # fmt: skip
def test_an_engine_without_facts_serves(tmp_path: Path, told: bytes | None) -> None:
    async def check(one: Fleet) -> None:
        engine = one.engines[0]
        if told is not None:
            engine.internal[FACTS_PATH] = told
        engine.incarnation = FIRST
        await one.until(lambda: engine.num_asked[FACTS_PATH] == 2)  # at its start, and as the first incarnation
        await one.until(lambda: one.num_usable() == 1)
        assert facts_of(one) is None

    run(tmp_path, check)


def test_what_is_said_of_data_ranks_is_bounded_and_whole() -> None:
    told = with_ranks(facts(kv_transfer=PASSES_KV), 2)
    assert decode_facts(encode_facts(told)) == told
    first, second = told.data_ranks
    change = msgspec.structs.replace
    for wrong in (
        (first, change(second, num_blocks=0)),
        (first, change(second, kv_events_port=65535)),
        (first, change(second, kv_transfer_port=0)),
        (first, change(second, kv_transfer_port=None)),
        (first, change(second, incarnation="A" * 32)),
        (first, change(second, incarnation=first.incarnation)),
        tuple(change(first, incarnation=f"{number:032x}") for number in range(MAX_DATA_RANKS + 1)),
    ):
        with pytest.raises(EngineFactsError):
            decode_facts(encode_facts(change(told, data_ranks=wrong)))


@pytest.mark.parametrize("incarnation", ["1" * 31, "1\r\nx-forged: 1", "", "A" * 32, "1" * 32 + "\n"])
def test_what_a_peer_is_told_of_an_engine_is_no_header_of_its_own(incarnation: str) -> None:
    assert decode_facts(encode_facts(facts(kv_transfer=PASSES_KV))).kv_transfer == PASSES_KV
    with pytest.raises(EngineFactsError, match="hexadecimal"):
        decode_facts(encode_facts(facts(incarnation, kv_transfer=PASSES_KV)))


def test_an_engine_of_another_model_gets_no_traffic(tmp_path: Path) -> None:
    async def check(one: Fleet) -> None:
        show(one.engines[0], facts(model="other"))
        await one.until(lambda: one.num_usable() == 0)
        assert facts_of(one) is None
        show(one.engines[0], facts(SECOND))
        await one.until(lambda: one.num_usable() == 1)
        assert facts_of(one) == facts(SECOND)

    run(tmp_path, check)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rarely_asked_again() -> None:
    uvloop.run(_ask_rarely())


async def _ask_rarely() -> None:
    engine, table, clock = FaultyEngine(), EndpointTable({"alias": "m"}), Clock()
    await engine.start()
    table.replace([Endpoint("e", engine.url, "m")])
    prober = Prober(engine.url, 30.0)
    asker = FactsAsker(table, prober, clock)

    async def probe(headers: dict[str, str] | None = None) -> str | None:
        view = table.engine("e")
        assert isinstance(view, EngineView)
        return await asker.after_probe(view, ProbeAnswer(200, b"", headers or {}))

    assert await probe() is None
    assert await probe() is None
    assert engine.num_asked[FACTS_PATH] == 1
    show(engine, facts(model="alias"))
    clock.now += ASK_AGAIN_S
    assert await probe() is None
    assert table.snapshot.engines[0].facts == facts(model="alias"), "an alias is the model too"
    assert await probe({"x-pagefleet-model": "a%C3%A4"}) == "answers for another model, 'aä'"
    assert await probe({"x-pagefleet-incarnation": SECOND}) is None
    view = table.engine("e")
    assert view is not None
    assert view.facts is None, "what answered was somebody else"
    prober.close()
    await engine.kill()
