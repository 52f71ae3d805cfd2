"""Both legs of a transfer are spans of one trace, each the parent of its engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop
from pagefleet_protocol import trace_names as names

from tests.fakes.faulty_engine import CHAT, Seen, post, reset, silent, whole
from tests.fakes.otlp_collector import CLIENT, Got, collector
from tests.fakes.pair_fleet import KV_LOST, PairFleet, Role, decode, id_of, long_chat, pair_fleet, prefill

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = f"traceparent: 00-{TRACE_ID}-b7ad6b7169203331-01\r\n"


def traced(folder: Path, check: Callable[[PairFleet], Awaitable[None]], *roles: Role) -> list[Got]:
    """Check a fleet; return the spans of its router."""

    async def scenario(url: str) -> None:
        async with pair_fleet(folder, roles, otlp_traces_endpoint=url) as f:
            await check(f)
            await f.made.until(lambda: f.made.router.budget.live_requests == 0)

    with collector() as site:
        uvloop.run(scenario(site.url))
        return site.spans


def legs_of(spans: list[Got], role: str) -> list[Got]:
    return [span for span in spans if span.kind == CLIENT and span.attributes.get(names.LEG) == role]


def test_both_legs_are_below_their_request(tmp_path: Path) -> None:
    told: dict[str, str | None] = {}
    engines: dict[str, str] = {}

    async def check(f: PairFleet) -> None:
        assert (await f.made.ask(post(long_chat(), headers=CONTEXT))).status == 200
        for leg in f.log:
            assert leg.transfer is not None
            told[leg.transfer.leg] = leg.seen.header("traceparent")
            transfers.add(leg.transfer.transfer_id)
            engines[leg.transfer.leg] = id_of(f, leg.engine)

    transfers: set[str] = set()
    spans = traced(tmp_path, check, prefill(), decode())
    (request,) = [span for span in spans if span.name == CHAT]
    assert (request.attributes[names.PREFILL_BY], request.failure) == ("remote", None)
    for role in ("prefill", "decode"):
        (leg,) = legs_of(spans, role)
        assert (leg.trace_id, leg.parent_id, leg.failure) == (TRACE_ID, request.span_id, None)
        assert told[role] == f"00-{TRACE_ID}-{leg.span_id}-01"
        assert {leg.attributes[names.TRANSFER_ID]} == transfers
        assert leg.attributes[names.ENGINE] == engines[role]
    assert legs_of(spans, "decode")[0].attributes[names.STATUS] == 200
    assert request.attributes[names.ENGINE] == engines["decode"]


def test_a_transfer_that_fails_and_the_next_one_are_apart(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        assert (await f.made.ask(post(long_chat(), headers=CONTEXT))).status == 200

    answers = [silent, whole()]

    async def in_turn(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await answers.pop(0)(seen, writer)

    spans = traced(tmp_path, check, prefill(reset), decode(in_turn))
    (failed,) = legs_of(spans, "prefill")
    assert failed.failure == "reset"
    waited, alone = [span for span in spans if span.kind == CLIENT and span is not failed]
    assert (waited.failure, waited.attributes[names.LEG]) == ("reset", "decode")
    assert waited.attributes[names.TRANSFER_ID] == failed.attributes[names.TRANSFER_ID]
    assert (alone.failure, alone.attributes.get(names.TRANSFER_ID)) == (None, None)
    assert {waited.parent_id, alone.parent_id} == {failed.parent_id}


def test_kv_that_did_not_come_is_said_in_the_decode_leg(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        await f.made.ask(post(long_chat(), headers=CONTEXT))

    spans = traced(tmp_path, check, prefill(), decode(KV_LOST))
    first = legs_of(spans, "decode")[0]
    assert first.failure == "kv_lost"
    (request,) = [span for span in spans if span.name == CHAT]
    assert request.attributes[names.RETRIES] > 0
