"""Two engines for one request, through a real router: what each is sent, and that no failure reaches a client."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from pagefleet_protocol.kube_names import RANK_PORTS_APART
from pagefleet_protocol.kv_handoff import KV_TRANSFER
from pagefleet_router.exchange.exchange import Exchange
from pagefleet_router.signals.monitor import MonitorTiming
from pagefleet_router.telemetry.access_log import AccessLog

from tests.fakes.faulty_engine import (
    Behaviour,
    Seen,
    chat,
    post,
    raw,
    reset,
    silent,
    stream,
    whole,
)
from tests.fakes.pair_fleet import (
    KV_LOST,
    LONG,
    NOT_MINE,
    PREFILLED,
    PairFleet,
    Role,
    code_of,
    decode,
    id_of,
    long_chat,
    not_from_p0,
    pair_fleet,
    prefill,
)

SLOW_MONITOR = MonitorTiming(period=0.2, unready_period=30.0)
PATIENCE_S = 60.0
EVENTS = (b'data: {"n": 1}\n\n', b"data: [DONE]\n\n")


def run(folder: Path, check: Callable[[PairFleet], Awaitable[None]], *roles: Role, **settings: object) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), pair_fleet(folder, roles, **settings) as f:
            await check(f)
            router = f.made.router
            await f.made.until(lambda: router.budget.live_requests == 0)
            engines = router.table.snapshot.engines
            assert all(engine.tally.num_requests == 0 for engine in engines), "a leg is left behind"
            await f.made.until(lambda: not any(engine.num_open for engine in f.made.engines))

    uvloop.run(scenario())


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Answer each request by the next one, the last one for ever."""
    left = list(behaviours)

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(seen, writer)

    return answer


def in_pieces(status: int, body: bytes) -> Behaviour:
    """Answer as servers do whose head and body are written apart."""

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        await writer.drain()
        for part in (body[:20], body[20:]):
            await asyncio.sleep(0.02)
            writer.write(part)
            await writer.drain()

    return answer


def test_both_engines_get_the_request_and_are_told_of_each_other(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        forged = f"{KV_TRANSFER}: leg=decode;forged\r\nX-PageFleet-KV-Transfer: again\r\n"
        answer = await f.made.ask(post(long_chat(), headers=forged + "x-pagefleet-explain: 1\r\n"))
        assert answer.status == 200
        assert answer.headers["x-pagefleet-engine"] == id_of(f, "d0")
        [asked], [asks] = f.of("p"), f.of("d")
        assert asked.seen.body == asks.seen.body == json.dumps(long_chat()).encode()
        assert asked.transfer is not None
        assert asks.transfer is not None
        assert asked.transfer.transfer_id == asks.transfer.transfer_id
        assert (asked.transfer.leg, asks.transfer.leg) == ("prefill", "decode")
        assert asked.transfer.peer_incarnation == f.engine("d0").incarnation
        assert asks.transfer.peer_incarnation == f.engine("p0").incarnation
        assert asks.transfer.peer_address == "127.0.0.1:7000"
        assert asks.transfer.on_failure == "recompute", "there is no other prefill engine"
        for leg in (asked, asks):
            assert [name for name, _ in leg.seen.headers].count(KV_TRANSFER) == 1, "the client's went no further"
        ways = json.loads(answer.headers["x-pagefleet-explain"])
        [pair] = [way for way in ways if way.get("prefill")]
        assert (pair["engine"], pair["prefill"]) == (id_of(f, "d0"), id_of(f, "p0"))
        [alone] = [way for way in ways if not way.get("prefill")]
        assert pair["seconds"] < alone["seconds"]
        assert f.metric('pagefleet_router_pd_requests_total{choice="remote"}') == 1

    run(tmp_path, check, prefill(), decode())


def test_a_data_rank_of_each_engine_is_told_of_one_of_the_other(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        told = set()
        for number in range(12):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
            asked, asks = f.of("p")[-1].transfer, f.of("d")[-1].transfer
            assert asked is not None
            assert asks is not None
            assert (asked.peer_incarnation, asks.peer_incarnation) == (asks.told, asked.told)
            rank = int(asked.told[-1])
            assert asks.peer_address == f"127.0.0.1:{7000 + RANK_PORTS_APART * rank}"
            told |= {asked.told, asks.told}
        assert told == {f"{31 * '0'}0", f"{31 * '0'}1", f"{31 * '1'}0", f"{31 * '1'}1"}

    run(tmp_path, check, prefill(num_ranks=2), decode(num_ranks=2))


def test_the_decode_leg_does_not_wait_for_the_other(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await PREFILLED(seen, writer)

    async def check(f: PairFleet) -> None:
        client = await f.made.connect()
        await client.send(post(long_chat(stream=True)))
        assert (await client.head()).status == 200
        assert await client.chunk() == EVENTS[0]
        release.set()
        assert await client.chunk() == EVENTS[1]
        await f.made.until(lambda: len(f.of("p")) == 1)

    run(tmp_path, check, prefill(slow), decode(stream(EVENTS, gap=0.05)))


@pytest.mark.parametrize(
    "fault",
    [reset, whole(500), whole(503), whole(429), whole(400), NOT_MINE, raw(b"SSH-2.0-x\r\n"),
     whole(503, extra="connection: close\r\n"), in_pieces(502, b"x" * 40)],
    ids=["reset", "500", "503", "429", "400", "invalid_handoff", "garbage", "ending", "502 in pieces"],
)  # fmt: skip
@pytest.mark.parametrize("streams", [True, False])
def test_a_prefill_engine_that_fails_is_replaced_by_another(tmp_path: Path, fault: Behaviour, streams: bool) -> None:
    async def check(f: PairFleet) -> None:
        for number in range(6):
            answer = await f.made.ask(post(long_chat(number, stream=streams)))
            assert (answer.status, answer.cut) == (200, False)
        assert f.of("p")
        failed = len([leg for leg in f.log if leg.engine == "p0"])
        assert sum(f.made.router.metrics.pairs.retries.values()) == failed
        ids = [leg.transfer.transfer_id for leg in f.of("p") if leg.transfer is not None]
        assert len(set(ids)) == len(ids), "each attempt has an id of its own"

    answers = not_from_p0(stream(EVENTS) if streams else whole())
    run(tmp_path, check, prefill(fault), prefill(), decode(answers), monitor=SLOW_MONITOR)


def test_a_prefill_engine_that_is_gone_gets_nothing_more(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        await f.engine("p0").kill()
        answers = [await f.made.ask(post(long_chat(number))) for number in range(6)]
        assert {answer.status for answer in answers} == {200}
        states = [engine.state for engine in f.made.router.table.snapshot.engines]
        assert states in (["unready", "ready", "ready"], ["ready", "ready", "ready"])
        assert f.made.router.metrics.pairs.retries.total() <= 1

    run(tmp_path, check, prefill(), prefill(), decode(not_from_p0(whole())), monitor=SLOW_MONITOR)


@pytest.mark.parametrize("lost", [KV_LOST, in_pieces(503, b'{"error":{"message":"","code":"kv_load_failed"}}')])
def test_kv_that_did_not_come_is_computed_by_another_engine(tmp_path: Path, lost: Behaviour) -> None:
    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat()))
        assert answer.status == 200
        first, second = (leg.transfer for leg in f.of("d"))
        assert first is not None
        assert second is not None
        assert (first.on_failure, second.on_failure) == ("fail", "recompute")
        assert first.peer_incarnation != second.peer_incarnation
        assert first.transfer_id != second.transfer_id
        assert f.metric('pagefleet_router_pd_retries_total{reason="kv_lost"}') == 1

    run(tmp_path, check, prefill(), prefill(), decode(in_turn(lost, whole())))


def test_without_another_the_decode_engine_computes_the_prompt(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat()))
        assert answer.status == 200
        assert [leg.transfer is None for leg in f.of("d")] == [False, True]
        assert f.metric("pagefleet_router_pd_recomputed_total") == 1

    run(tmp_path, check, prefill(whole(500)), decode(in_turn(silent, whole())))


def test_a_prompt_that_the_decode_engine_computes_already_is_computed_once(tmp_path: Path) -> None:
    """With `put` the prefill engine says too that its K/V did not arrive, before the decode engine has its answer."""

    async def slow(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        await whole()(seen, writer)

    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat()))
        assert answer.status == 200
        [leg] = f.of("d")
        assert leg.transfer is not None
        assert leg.transfer.on_failure == "recompute"
        assert f.made.router.metrics.pairs.retries.total() == 0

    run(tmp_path, check, prefill(KV_LOST), decode(slow))


def test_where_it_must_not_the_client_is_told(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat()))
        assert (answer.status, code_of(answer.body)) == (503, "kv_load_failed")
        assert "retry-after" in answer.headers
        [leg] = f.of("d")
        assert leg.transfer is not None
        assert leg.transfer.on_failure == "fail"

    run(tmp_path, check, prefill(whole(500)), decode(silent), pd_fallback="fail")


def test_prefill_engines_that_all_fail_cost_no_more_than_the_retries(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat()))
        assert answer.status == 200
        assert len(f.of("p")) == 3
        assert [leg.transfer is None for leg in f.of("d")] == [False, False, False, True]

    run(tmp_path, check, *[prefill(whole(500))] * 5, decode(in_turn(silent, silent, silent, whole())))


def test_a_decode_engine_that_began_anew_gives_no_wrong_status(tmp_path: Path) -> None:
    body = b'{"error":{"message":"of another engine","type":"x","param":null,"code":"invalid_handoff"}}'
    anew = whole(400, body, f"x-pagefleet-incarnation: {'e' * 32}\r\n")

    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat()))
        assert answer.status == 200
        assert f.metric('pagefleet_router_pd_retries_total{reason="handoff"}') == 1
        assert f.made.router.metrics.failures.total() == 0

    run(tmp_path, check, prefill(), decode(in_turn(anew, whole())))


def test_a_decode_engine_that_dies_is_replaced_and_the_prompt_is_sent_again(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        number = itertools.count()
        while {leg.engine for leg in f.of("d")} != {"d0", "d1"}:  # which is asked first is drawn
            assert (await f.made.ask(post(long_chat(next(number))))).status == 200
        legs = [leg.transfer.transfer_id for leg in f.log if leg.transfer is not None]
        assert len(legs) == 2 * len(set(legs)), "each attempt has two legs"

    run(tmp_path, check, prefill(), decode(reset), decode(), monitor=SLOW_MONITOR)


def test_when_the_client_leaves_both_engines_see_it(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        client = await f.made.connect()
        await client.send(post(long_chat()))
        await f.made.until(lambda: all(engine.num_open == 1 for engine in f.made.engines))
        client.close()
        await f.made.until(lambda: all(engine.num_open == 0 for engine in f.made.engines))

    run(tmp_path, check, prefill(silent), decode(silent))


def test_an_engine_that_is_silent_for_too_long_is_blamed(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat()))
        assert answer.status == 200
        assert f.metric('pagefleet_router_pd_retries_total{reason="silent"}') == 1
        assert len(f.of("d")) == 2

    run(tmp_path, check, prefill(silent), decode(in_turn(silent, whole())), first_byte_timeout=1.0)


@pytest.mark.parametrize(
    "body",
    [
        chat("short"),
        {"model": "m", "prompt": [LONG, LONG]},
        {"model": "m", "prompt": LONG, "echo": True},
        {"model": "m", "prompt": LONG, "prompt_logprobs": 1},
    ],
    ids=["short", "two prompts", "echo", "prompt_logprobs"],
)
def test_what_cannot_be_split_or_need_not_goes_to_a_decode_engine(tmp_path: Path, body: dict[str, object]) -> None:
    async def check(f: PairFleet) -> None:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        assert (await f.made.ask(post(body, path))).status == 200
        [leg] = f.log
        assert (leg.engine, leg.transfer) == ("d0", None)
        assert f.metric('pagefleet_router_pd_requests_total{choice="local"}') == 1

    run(tmp_path, check, prefill(), decode())


def test_token_lists_and_texts_are_split(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        for prompt in (LONG, [1] * 2000):
            answer = await f.made.ask(post({"model": "m", "prompt": prompt}, "/v1/completions"))
            assert answer.status == 200
        assert len(f.of("p")) == 2
        assert (await f.made.ask(post({"model": "m", "prompt": LONG}, "/tokenize"))).status == 200
        assert len(f.of("p")) == 2, "that computes nothing"

    run(tmp_path, check, prefill(), decode())


@pytest.mark.parametrize("fallback", ["recompute", "fail"])
@pytest.mark.parametrize(
    ("roles", "answers"),
    [
        ((decode(), decode()), "d"),
        ((prefill(), prefill()), "p"),
        ((prefill(compatibility="b" * 64), decode()), "d"),
        ((Role("both", whole()), Role("both", whole())), "b"),
        ((prefill(), Role(None, whole())), "b"),
    ],
    ids=["no prefill", "no decode", "other K/V", "both", "an engine that says nothing"],
)
def test_where_no_pair_can_be_made_one_engine_does_all(
    tmp_path: Path, roles: tuple[Role, ...], answers: str, fallback: str
) -> None:
    async def check(f: PairFleet) -> None:
        for number in range(3):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
        assert {leg.engine[0] for leg in f.log} == {answers}
        assert all(leg.transfer is None for leg in f.log)

    run(tmp_path, check, *roles, pd_fallback=fallback)


def test_a_prefill_engine_that_fails_in_a_row_is_ejected(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        f.made.keep_ejected()
        for number in range(60):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
            if f.made.router.metrics.ejections:
                break
        states = [engine.state for engine in f.made.router.table.snapshot.engines]
        assert states == ["ejected", "ready", "ready"]
        before = len([leg for leg in f.of("p") if leg.engine == "p0"])
        for number in range(100, 104):
            assert (await f.made.ask(post(long_chat(number)))).status == 200
        assert len([leg for leg in f.of("p") if leg.engine == "p0"]) == before

    answers = not_from_p0(whole())
    run(tmp_path, check, prefill(whole(500)), prefill(), decode(answers), monitor=MonitorTiming(unready_period=0.02))


def test_without_a_fleet_key_nothing_is_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check(f: PairFleet) -> None:
        assert (await f.made.ask(post(long_chat()))).status == 200
        [leg] = f.log
        assert (leg.engine, leg.transfer) == ("d0", None)

    run(tmp_path, check, prefill(), decode(), fleet_key_file=None)
    assert [one for one in caplog.messages if "give --fleet-key-file" in one], "whoever runs it is told"


def test_clients_cannot_direct_transfers(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat(kv_transfer_params={"do_remote_prefill": True})))
        assert (answer.status, answer.error["param"]) == (400, "kv_transfer_params")
        assert not f.log, "nobody was asked"

    run(tmp_path, check, prefill(), decode())


def test_a_bad_request_is_told_in_the_decode_engine_s_words(tmp_path: Path) -> None:
    refused = whole(400, b'{"error":{"message":"too hot","type":"x","param":"temperature","code":"invalid_value"}}')

    async def check(f: PairFleet) -> None:
        answer = await f.made.ask(post(long_chat(temperature=99)))
        assert (answer.status, answer.error["message"]) == (400, "too hot")
        assert f.made.router.metrics.failures.total() == 0, "it is no engine's fault"

    run(tmp_path, check, prefill(refused), decode(refused))


def test_the_access_log_names_both_engines(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        out = io.StringIO()
        f.made.router.front._log = AccessLog(out)
        await f.made.ask(post(long_chat()))
        await f.made.ask(post(chat("short")))
        f.made.router.front._log.flush()
        split, short = (json.loads(line) for line in out.getvalue().splitlines())
        [leg, _] = f.of("d")
        assert leg.transfer is not None
        assert (split["pd"], split["prefill_engine"]) == ("remote", id_of(f, "p0"))
        assert split["transfer_id"] == leg.transfer.transfer_id
        assert (short["pd"], short["transfer_id"], short["prefill_engine"]) == ("local", None, None)

    run(tmp_path, check, prefill(), decode())


def test_a_prompt_computed_elsewhere_is_no_prefill_load_where_it_is_answered(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        client = await f.made.connect()
        await client.send(post(long_chat(stream=True)))
        await f.made.until(lambda: all(engine.num_open == 1 for engine in f.made.engines))
        found = {engine.role: engine for engine in f.made.router.table.snapshot.engines}
        now = f.made.router._dispatcher.clock()
        assert found["prefill"].tally.queued(now) > 900
        assert found["decode"].tally.queued(now) == 0
        assert f.metric('pagefleet_router_role_requests{model="m",role="prefill"}') == 1
        client.close()

    run(tmp_path, check, prefill(silent), decode(silent))


def test_a_running_answer_keeps_nothing_of_its_prompt(tmp_path: Path) -> None:
    async def check(f: PairFleet) -> None:
        client = await f.made.connect()
        await client.send(post(long_chat(stream=True)))
        assert (await client.head()).status == 200
        assert await client.chunk() == EVENTS[0]
        [exchange] = [one._responder for one in f.made.router.connections if isinstance(one._responder, Exchange)]
        assert exchange.attempt is not None
        assert exchange.attempt.pair is not None
        leg = exchange.attempt.pair.leg
        assert leg is not None
        await f.made.until(lambda: not leg.is_running)
        for view in (exchange.view, leg._in_flight.view):
            assert (view.num_tokens > 900, view.pieces, view.token_ids) == (True, (), b"")
        assert (exchange.request.body, leg._pieces) == (b"", [])
        client.close()

    run(tmp_path, check, prefill(), decode(stream(EVENTS[:1] * 2, gap=PATIENCE_S)))


def test_transfers_teach_how_long_they_take(tmp_path: Path) -> None:
    fleets: list[PairFleet] = []

    async def late(seen: Seen, writer: asyncio.StreamWriter) -> None:
        engines = fleets[0].made.router.table.snapshot.engines
        await fleets[0].made.until(lambda: engines[0].tally.num_requests == 0)
        await asyncio.sleep(0.05)
        await stream(EVENTS)(seen, writer)

    async def check(f: PairFleet) -> None:
        fleets.append(f)
        [rates] = [one.rates for one in f.made.router.table.snapshot.engines if one.role == "decode"]
        before, prefill_rate = rates.transfer.handover.value, rates.prefill.value
        assert (await f.made.ask(post(long_chat(stream=True)))).status == 200
        assert rates.transfer.handover.value > before
        assert rates.prefill.value == pytest.approx(prefill_rate, rel=0.2), "its first byte says nothing of its speed"
        assert f.metric("pagefleet_router_pd_handover_seconds_count") == 1

    run(tmp_path, check, prefill(), decode(late))
