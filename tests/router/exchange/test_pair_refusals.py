"""Requests that no prefill engine takes, or that none survives: they must not cost the fleet more than others do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from pagefleet_protocol.engine_facts import FACTS_PATH, encode_facts
from pagefleet_protocol.kv_handoff import KV_TRANSFER

from tests.fakes.faulty_engine import Behaviour, Seen, post, reset, silent, whole
from tests.fakes.pair_fleet import (
    KV_LOST,
    NOT_BELIEVED,
    NOT_MINE,
    PairFleet,
    Role,
    code_of,
    decode,
    kv_lost,
    long_chat,
    not_from_p0,
    pair_facts,
    pair_fleet,
    prefill,
)

PATIENCE_S = 60.0
TOO_HOT = whole(400, b'{"error":{"message":"too hot","type":"x","param":"temperature","code":"invalid_value"}}')


def run(folder: Path, check: Callable[[PairFleet], Awaitable[None]], *roles: Role, **settings: object) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), pair_fleet(folder, roles, **settings) as f:
            await check(f)

    uvloop.run(scenario())


def alone(behave: Behaviour, leg: Behaviour = silent) -> Behaviour:
    """Answer what comes without a transfer; a leg waits for K/V for ever, unless told otherwise."""

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await (behave if seen.header(KV_TRANSFER) is None else leg)(seen, writer)

    return answer


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one for one in caplog.messages if "refuses what this router says" in one]


@pytest.mark.parametrize("fallback", ["recompute", "fail"])
def test_a_request_that_a_prefill_engine_finds_wrong_goes_to_no_other(tmp_path: Path, fallback: str) -> None:
    async def check(f: PairFleet) -> None:
        for number in range(30):  # more than the budget would grant
            answer = await f.made.ask(post(long_chat(number, temperature=99)))
            assert (answer.status, answer.error["message"]) == (400, "too hot")
        metrics = f.made.router.metrics
        assert len(f.of("p")) == 30, "one each"
        assert (metrics.retries.total(), metrics.retries_denied) == (0, 0), "others may need them"
        assert metrics.failures.total() == 0
        assert f.metric('pagefleet_router_pd_retries_total{reason="rejected"}') == 30

    roles = [prefill(TOO_HOT)] * 3
    run(tmp_path, check, *roles, decode(alone(TOO_HOT)), pd_fallback=fallback)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (whole(429), "status"),
        (whole(400, extra=f"x-pagefleet-incarnation: {'e' * 32}\r\n"), "handoff"),
    ],
    ids=["full", "began anew"],
)
def test_what_is_wrong_with_a_prefill_engine_alone_is_tried_at_another(
    tmp_path: Path, fault: Behaviour, reason: str
) -> None:
    async def check(f: PairFleet) -> None:
        assert (await f.made.ask(post(long_chat()))).status == 200
        assert len(f.of("p")) == 2
        assert f.made.router.metrics.failures.total() == 0
        assert f.metric(f'pagefleet_router_pd_retries_total{{reason="{reason}"}}') == 2

    run(tmp_path, check, prefill(fault), prefill(fault), decode(alone(whole())))


@pytest.mark.parametrize("fallback", ["recompute", "fail"])
def test_engines_with_another_fleet_key_compute_prompts_where_they_are_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fallback: str
) -> None:
    async def check(f: PairFleet) -> None:
        for number in range(30):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
        metrics = f.made.router.metrics
        assert (metrics.failures.total(), metrics.retries_denied) == (0, 0)
        assert f.metric("pagefleet_router_pd_recomputed_total") == 30
        assert f.metric('pagefleet_router_pd_retries_total{reason="handoff"}') >= 30, "whoever runs it can see why"

    roles = [prefill(silent), prefill(silent), decode(alone(whole(), leg=NOT_MINE))]
    run(tmp_path, check, *roles, pd_fallback=fallback)
    [told] = refusals(caplog)
    assert told.startswith("engine e2 ")
    assert "--fleet-key-file" in told


def num_spells(began: float) -> int:
    """Return how often an engine may have been tried that is left alone for half a minute each time."""
    return int((time.monotonic() - began) // 30) + 1


@pytest.mark.parametrize("fallback", ["recompute", "fail"])
def test_a_decode_engine_that_says_that_it_believes_nothing_is_told_nothing_for_a_while(
    tmp_path: Path, fallback: str
) -> None:
    async def check(f: PairFleet) -> None:
        began = time.monotonic()
        for number in range(20):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
        told = [leg for leg in f.of("d") if leg.transfer is not None]
        assert 1 <= len(told) <= num_spells(began)
        assert len(f.of("p")) <= len(told), "another prefill engine would help nothing"
        assert f.made.router.metrics.failures.total() == 0

    roles = [prefill(silent), prefill(silent), decode(alone(whole(), leg=NOT_BELIEVED))]
    run(tmp_path, check, *roles, pd_fallback=fallback)


def test_a_prefill_engine_that_says_that_it_believes_nothing_is_passed_over_for_a_while(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        began = time.monotonic()
        for number in range(20):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
        asked = [leg.engine for leg in f.of("p")]
        assert 1 <= asked.count("p0") <= num_spells(began)
        assert asked.count("p1") == 20 - asked.count("p0"), "which the others compute"
        assert f.made.router.metrics.failures.total() == 0

    run(tmp_path, check, prefill(NOT_BELIEVED), prefill(), decode(not_from_p0(whole())))


def test_a_prefill_engine_with_another_fleet_key_is_told_of_once_in_its_life(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(f: PairFleet) -> None:
        for number in range(3):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
        assert [one.partition(" refuses")[0] for one in refusals(caplog)] == ["engine e0"]
        table, anew = f.made.router.table, pair_facts("f" * 32, "prefill")
        f.engine("p0").incarnation = anew.incarnation
        f.engine("p0").internal[FACTS_PATH] = encode_facts(anew)
        table.set_facts("e0", None)
        await f.made.until(lambda: any(engine.facts == anew for engine in table.snapshot.engines))
        assert (await f.made.ask(post(long_chat(9)))).status == 200
        assert [one.partition(" refuses")[0] for one in refusals(caplog)] == ["engine e0"] * 2

    run(tmp_path, check, prefill(NOT_MINE), decode(alone(whole())))


def test_a_request_that_is_wrong_is_no_word_about_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check(f: PairFleet) -> None:
        assert (await f.made.ask(post(long_chat(temperature=99)))).status == 400

    run(tmp_path, check, prefill(TOO_HOT), decode(alone(TOO_HOT)))
    assert not refusals(caplog)


def test_a_prompt_that_ends_its_engines_is_sent_to_two_at_most(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat()))
        assert (answer.status, code_of(answer.body)) == (503, "kv_load_failed")
        assert len(f.of("p")) == 2
        assert all(leg.transfer is not None for leg in f.of("d")), "no engine gets it whole after that"

    run(tmp_path, check, *[prefill(reset)] * 4, decode(alone(whole())))


def test_a_prompt_that_ends_engines_of_both_parts_is_sent_to_two_at_most(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat()))
        assert (answer.status, code_of(answer.body)) == (502, "engine_lost")
        assert len(f.of("p")) == 1
        assert [leg.transfer is None for leg in f.of("d")] == [False, True]

    run(tmp_path, check, prefill(reset), decode(alone(reset)), decode(alone(reset)))


def test_a_decode_engine_that_no_kv_reaches_ejects_no_prefill_engine(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        for number in range(30):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
        metrics = f.made.router.metrics
        assert (metrics.failures["kv_lost"], metrics.ejections) == (1, 0)
        assert len({leg.engine for leg in f.of("p")}) == 3

    run(tmp_path, check, *[prefill()] * 3, decode(alone(whole(), leg=KV_LOST)))


@pytest.mark.parametrize("fault", ["unknown_peer", "incompatible"])
def test_two_engines_that_do_not_know_each_other_are_parted_and_neither_has_failed(tmp_path: Path, fault: str) -> None:
    """Each cannot pass K/V with one of the others."""

    async def check(f: PairFleet) -> None:
        began = time.monotonic()
        strangers.update({f.engine("p0").incarnation or "": "d0", f.engine("p1").incarnation or "": "d1"})
        for number in range(20):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
        metrics = f.made.router.metrics
        assert (metrics.failures.total(), metrics.ejections) == (0, 0)
        tried = [(leg.engine, leg.transfer.peer_incarnation) for leg in f.of("d") if leg.transfer is not None]
        vain = [one for one in tried if strangers[one[1]] == one[0]]
        assert 1 <= len(vain) <= 2 * ((time.monotonic() - began) // 5 + 1), "once each in five seconds"
        assert len(tried) - len(vain) == 20 - metrics.pairs.recomputed, "the others pass K/V"
        assert f.metric('pagefleet_router_pd_retries_total{reason="kv_lost"}') == len(vain)

    strangers: dict[str, str] = {}

    def strange_to(name: str) -> Behaviour:
        async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
            value = seen.header(KV_TRANSFER)
            peer = "" if value is None else value.partition("peer=")[2][:32]
            await (kv_lost(fault) if strangers.get(peer) == name else whole())(seen, writer)

        return answer

    run(tmp_path, check, prefill(), prefill(), decode(strange_to("d0")), decode(strange_to("d1")))


@pytest.mark.parametrize(
    ("fault", "blamed"),
    [("not_asked", 0), ("unreachable", 1), ("transfer_failed", 1), ("struck_by_lightning", 1)],
)
def test_the_decode_engine_says_whether_a_prefill_engine_is_to_blame(tmp_path: Path, fault: str, blamed: int) -> None:
    """And words of a later version say nothing."""

    async def check(f: PairFleet) -> None:
        for number in range(3):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
        assert len(f.of("p")) == 3, "they are tried again"
        failures = f.made.router.metrics.failures
        assert failures["kv_lost"] == failures.total() == 3 * blamed

    run(tmp_path, check, prefill(), decode(alone(whole(), leg=kv_lost(fault))))


def test_a_prefill_engine_that_could_not_pass_its_blocks_on_has_not_failed_to_compute_them(tmp_path: Path) -> None:
    async def computes_last(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if "fail=fail" in (seen.header(KV_TRANSFER) or ""):
            await silent(seen, writer)
        await asyncio.sleep(0.3)
        await whole()(seen, writer)

    async def check(f: PairFleet) -> None:
        assert (await f.made.ask(post(long_chat()))).status == 200
        assert f.metric('pagefleet_router_pd_retries_total{reason="kv_lost"}') == 1
        failures = f.made.router.metrics.failures
        assert (failures["kv_lost"], failures["status"]) == (1, 0), "the second one that says so is believed"

    run(tmp_path, check, prefill(KV_LOST), prefill(KV_LOST), decode(computes_last))
