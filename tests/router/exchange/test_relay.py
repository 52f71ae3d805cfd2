"""What passes through: bytes, heads, errors, routes. A real router, real sockets, programmed engines."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path

import pytest
import uvloop
from pagefleet_protocol import metric_names as names
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_router.exchange.attempt import Attempt
from pagefleet_router.exchange.exchange import Exchange
from pagefleet_router.wire.engine_call import EngineCall

from tests.fakes.faulty_engine import (
    CHAT,
    GAUGES,
    SSE_HEAD,
    Behaviour,
    Fleet,
    Seen,
    chat,
    chunked,
    fleet,
    post,
    raw,
    stream,
    whole,
)

EVENTS = [b'data: {"n": %d, "text": "\xc3\xa4\xf0\x9f\x99\x82"}\n\n' % n for n in range(50)] + [b"data: [DONE]\n\n"]


def test_a_whole_answer_passes_unchanged(tmp_path: Path) -> None:
    body = json.dumps({"text": "ä" * 70_000}).encode()

    async def scenario() -> None:
        async with fleet(tmp_path, whole(200, body, "x-other: 1\r\nserver: s\r\n")) as f:
            sent = json.dumps(chat("hello"), indent=3).encode()
            answer = await f.ask(post(sent, headers="x-request-id: abc.1\r\ncontent-type: application/json\r\n"))
            assert (answer.status, answer.body) == (200, body)
            assert answer.headers["x-other"] == "1"
            assert answer.headers["x-request-id"] == "abc.1"
            assert answer.headers["x-pagefleet-engine"] == "e0"
            seen = f.engines[0].seen[0]
            assert seen.line == f"POST {CHAT} HTTP/1.1"
            assert seen.body == sent
            assert seen.header("x-request-id") == "abc.1"
            assert seen.header("content-type") == "application/json"

    uvloop.run(scenario())


@pytest.mark.parametrize("behaviour", [whole(200, b"{}"), stream(EVENTS)], ids=["whole", "stream"])
def test_an_answered_request_is_no_garbage_to_be_collected(tmp_path: Path, behaviour: Behaviour) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, behaviour) as f:
            gc.collect()
            gc.disable()
            try:
                for _ in range(5):
                    assert (await f.ask(post(chat("hello")))).status == 200
                left = [one for one in gc.get_objects() if type(one) in (Exchange, Attempt, EngineCall)]
            finally:
                gc.enable()
            assert not left

    uvloop.run(scenario())


@pytest.mark.parametrize("gap", [0.0, 0.001])
def test_a_stream_passes_byte_for_byte(tmp_path: Path, gap: float) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, stream(EVENTS, gap)) as f:
            answer = await f.ask(post(chat(stream=True)))
            assert answer.body == b"".join(EVENTS)
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert not answer.cut

    uvloop.run(scenario())


def test_each_event_arrives_before_the_next_is_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        arrived = asyncio.Semaphore(0)

        async def one_by_one(seen: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(SSE_HEAD)
            for event in EVENTS[:3]:
                writer.write(chunked(event))
                await arrived.acquire()
            writer.write(b"0\r\n\r\n")

        async with fleet(tmp_path, one_by_one) as f:
            client = await f.connect()
            await client.send(post(chat(stream=True)))
            head = await client.head()
            assert head.headers["transfer-encoding"] == "chunked"
            for event in EVENTS[:3]:
                async with asyncio.timeout(30):
                    assert await client.chunk() == event
                arrived.release()
            assert await client.chunk() == b""

    uvloop.run(scenario())


def test_odd_framings_of_an_engine(tmp_path: Path) -> None:
    cases = [
        (b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"hi"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            + chunked(b"a")
            + chunked(b"b")
            + b"0\r\nx: y\r\n\r\n",
            b"ab",
        ),
        (b"HTTP/1.1 299 Whatever\r\ncontent-length: 0\r\n\r\n", b""),
    ]

    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            for data, body in cases:
                f.engines[0].behave = raw(data)
                answer = await f.ask(post(chat()))
                assert (answer.body, answer.cut) == (body, False), data
            assert answer.status == 299

    uvloop.run(scenario())


def test_connections_are_kept_on_both_sides(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            client = await f.connect()
            for _ in range(20):
                await client.send(post(chat()))
                assert (await client.answer()).status == 200
            assert f.router.pools.num_open() == 1

    uvloop.run(scenario())


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async def echo(seen, writer) -> None:  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.03 if b"first" in seen.body else 0)
        await whole(200, seen.body)(seen, writer)

    async def scenario() -> None:
        async with fleet(tmp_path, echo, echo) as f:
            client = await f.connect()
            texts = ["first", *(f"text {n}" for n in range(8))]
            await client.send(b"".join(post(chat(text)) for text in texts[:4]))
            await asyncio.sleep(0.01)
            await client.send(b"".join(post(chat(text)) for text in texts[4:]))
            got = [(await client.answer()).json["messages"][0]["content"] for _ in texts]
            assert got == texts

    uvloop.run(scenario())


def test_a_client_of_http_1_0_gets_a_closed_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, stream(EVENTS[:5], 0.001)) as f:
            client = await f.connect()
            body = json.dumps(chat(stream=True)).encode()
            await client.send(f"POST {CHAT} HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await client.answer()
            assert "transfer-encoding" not in answer.headers
            assert answer.headers["connection"] == "close"
            assert answer.body == b"".join(EVENTS[:5])

    uvloop.run(scenario())


def test_a_chunked_body_reaches_the_engine_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            body = json.dumps(chat("x" * 3000)).encode()
            client = await f.connect()
            await client.send(f"POST {CHAT} HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for start in range(0, len(body), 7):
                await client.send(chunked(body[start : start + 7]))
            await client.send(b"0\r\n\r\n")
            assert (await client.answer()).status == 200
            assert f.engines[0].seen[0].body == body

    uvloop.run(scenario())


def test_expect_100_continue(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            client = await f.connect()
            request = post(chat(), headers="expect: 100-continue\r\n")
            head, body = request.split(b"\r\n\r\n")
            await client.send(head + b"\r\n\r\n")
            assert (await client.head()).status == 100
            await client.send(body)
            assert (await client.answer()).status == 200
            assert f.engines[0].seen[0].header("expect") is None

    uvloop.run(scenario())


def test_headers_that_stay_here(tmp_path: Path) -> None:
    headers = (
        "connection: x-secret, keep-alive\r\nkeep-alive: 5\r\nte: trailers\r\nproxy-authorization: x\r\nx_under: 1\r\n"
        "x-pagefleet-engine: e7\r\nx-pagefleet-transfer: t\r\naccept-encoding: gzip\r\ntraceparent: 00-a-b-01\r\n"
    )

    async def scenario() -> None:
        async with fleet(tmp_path, whole(extra="connection: keep-alive\r\nkeep-alive: timeout=5\r\n")) as f:
            answer = await f.ask(post(chat(), headers=headers))
            assert "keep-alive" not in answer.headers
            names = {name for name, _ in f.engines[0].seen[0].headers}
            assert names == {"host", "traceparent", "x-request-id", "content-length"}

    uvloop.run(scenario())


@pytest.mark.parametrize("given", ["a b", "x" * 65, "a\x1b[31m", "ä", ""])
def test_a_request_id_that_is_not_harmless_is_replaced(tmp_path: Path, given: str) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            answer = await f.ask(post(chat(), headers=f"x-request-id: {given}\r\n"))
            used = answer.headers.get("x-request-id", "")
            assert answer.status == 400 or (
                used.startswith("req-") and f.engines[0].seen[0].header("x-request-id") == used
            )

    uvloop.run(scenario())


def test_own_routes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(200, b'{"version":"9"}')) as f:
            assert (await f.get("/livez")).status == 200
            assert (await f.get("/readyz")).json == {"status": "ready", "engines": 1}
            assert (await f.get("/health")).status == 200
            models = (await f.get("/v1/models")).json
            assert [model["id"] for model in models["data"]] == ["m"]
            assert (await f.get("/v1/models/m")).json["object"] == "model"
            assert (await f.get("/v1/models/other")).error["code"] == "model_not_found"
            assert (await f.get("/version")).json == {"version": "9"}
            await f.ask(post(chat()))
            text = (await f.get("/metrics")).body.decode()
            assert 'pagefleet_router_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
            assert 'pagefleet_router_endpoints{state="ready"} 1.0' in text
            assert "pagefleet_router_upstream_first_byte_seconds_count 2.0" in text

    uvloop.run(scenario())


def test_a_models_name_may_hold_a_slash(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            f.write_endpoints(Endpoint("e0", f.engines[0].url, "org/name"))
            await f.until(lambda: f.router.table.snapshot.models == ("org/name",) and f.num_usable() == 1)
            assert (await f.get("/v1/models/org/name")).status == 200
            assert (await f.get("/v1/models/org%2Fname")).status == 200
            assert (await f.ask(post({**chat(), "model": "org/name"}))).status == 200

    uvloop.run(scenario())


async def refused(f: Fleet, request: bytes) -> tuple[int, str | None, str | None]:
    answer = await f.ask(request)
    error = answer.error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "127.0.0.1" not in error["message"]
    return answer.status, error["param"], error["code"]


def test_refusals_have_the_openai_shape_and_no_engine_sees_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), max_body_bytes=1000) as f:
            assert await refused(f, post(b"")) == (400, None, None)
            assert await refused(f, post(b"{")) == (400, None, None)
            assert await refused(f, post(b"[]")) == (400, None, None)
            assert await refused(f, post(b"null")) == (400, None, None)
            assert await refused(f, post(b'{"model": "\xff\xfe"}')) == (400, None, None)
            assert await refused(f, post(b"[" * 900)) == (400, None, None)
            assert await refused(f, post({**chat(), "model": "n\x1b" * 50})) == (404, "model", "model_not_found")
            assert await refused(f, post(b"x" * 1001)) == (413, None, "request_too_large")
            assert await refused(f, post(chat(), "/v1/nothing")) == (404, None, "unknown_url")
            assert await refused(f, post(chat(), "/v1/chat/completions/")) == (404, None, "unknown_url")
            assert await refused(f, post(chat(), "//v1/chat/completions")) == (404, None, "unknown_url")
            assert await refused(f, post(chat(), "/v1/%2e%2e/metrics")) == (404, None, "unknown_url")
            assert await refused(f, post(chat(), "/livez")) == (405, None, "method_not_allowed")
            assert await refused(f, b"GET /v1/completions HTTP/1.1\r\nhost: r\r\n\r\n") == (
                405,
                None,
                "method_not_allowed",
            )
            assert f.engines[0].seen == []
            assert (await f.ask(post(chat()))).status == 200

    uvloop.run(scenario())


def test_a_body_of_any_shape_is_left_to_the_only_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(400, b'{"error":{"message":"engine"}}')) as f:
            for body in (
                {},
                {"model": 7},
                {"model": None},
                {"model": "m", "messages": 5, "stream": "maybe", "cache_salt": []},
            ):
                answer = await f.ask(post(body))
                assert (answer.status, answer.error["message"]) == (400, "engine")
            deep = b'{"model":"m","messages":' + b"[" * 100_000
            assert (await f.ask(post(deep))).status == 400

    uvloop.run(scenario())


def test_two_models_have_engines_of_their_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), whole()) as f:
            f.write_endpoints(Endpoint("a", f.engines[0].url, "one"), Endpoint("b", f.engines[1].url, "two"))
            await f.until(lambda: f.router.table.snapshot.models == ("one", "two") and f.num_usable() == 2)
            for _ in range(4):
                assert (await f.ask(post({**chat(), "model": "two"}))).headers["x-pagefleet-engine"] == "b"
            assert await refused(f, post({"messages": []})) == (400, "model", "missing_required_parameter")
            assert await refused(f, post({"model": 7})) == (400, "model", "invalid_type")

    uvloop.run(scenario())


def test_api_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# people\nsecret-1\n")

    async def scenario() -> None:
        async with fleet(tmp_path, whole(), api_key_file=keys) as f:
            for headers in (
                "",
                "authorization: Bearer wrong\r\n",
                "authorization: Basic secret-1\r\n",
                "authorization: secret-1\r\n",
                "authorization: Bearer secret-1\r\nauthorization: Bearer secret-1\r\n",
                "authorization: Bearer s\xe4\r\n",
            ):
                assert await refused(f, post(chat(), headers=headers)) == (401, None, "invalid_api_key")
                assert (await f.get("/v1/models", headers)).status == 401
            assert (await f.get("/nothing")).status == 401
            assert (await f.get("/readyz")).status == 200
            assert f.engines[0].seen == []
            answer = await f.ask(post(chat(), headers="authorization: bearer secret-1\r\n"))
            assert answer.status == 200
            assert f.engines[0].seen[0].header("authorization") is None

    uvloop.run(scenario())


def test_without_keys_of_its_own_the_router_leaves_them_to_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            await f.ask(post(chat(), headers="authorization: Bearer theirs\r\n"))
            assert f.engines[0].seen[0].header("authorization") == "Bearer theirs"

    uvloop.run(scenario())


def test_what_engines_say_of_their_load_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), whole()) as f:
            f.engines[0].metrics = GAUGES.replace('waiting{model_name="m"} 0', 'waiting{model_name="m"} 5')
            await f.until(lambda: f.router.table.snapshot.engines[0].num_requests == 5)
            assert {(await f.ask(post(chat()))).headers["x-pagefleet-engine"] for _ in range(12)} == {"e1"}
            text = (await f.get("/metrics")).body.decode()
            assert 'pagefleet_router_engine_requests_waiting{engine="e0"} 5.0' in text
            f.engines[0].metrics = "nothing here"
            await asyncio.sleep(0.15)
            assert f.router.table.snapshot.engines[0].num_requests == 5, "the last figures stay"

    uvloop.run(scenario())


def test_prompt_tokens_that_nobody_has_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), policy="auto") as f:
            for expected in (528, 528 + 16):
                assert (await f.ask(post(chat("x" * 2080)))).status == 200
                assert f.router.metrics.prompt_tokens == {"m": expected}
            text = (await f.get("/metrics")).body.decode()
            assert f'{names.ROUTER_PROMPT_TOKENS}{{model="m"}} 544.0' in text

    uvloop.run(scenario())


def test_tenants_never_share_a_prefix(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")

    async def scenario() -> None:
        async with fleet(tmp_path, whole(), whole(), policy="prefix", api_key_file=keys) as f:
            metrics = f.router.metrics
            for key, hits in (("one", 0), ("one", 512), ("two", 512), ("two", 1024)):
                answer = await f.ask(post(chat("x" * 2100), headers=f"authorization: Bearer {key}\r\n"))
                assert (answer.status, metrics.prefix_hits) == (200, hits)

    uvloop.run(scenario())
