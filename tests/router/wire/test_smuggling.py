"""Requests that two readers could understand differently, and clients that waste our time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import uvloop
from pagefleet_router.errors import Refusal
from pagefleet_router.wire.client_connection import ConnectionTiming
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.memory import BodyMemory
from pagefleet_router.wire.request_parser import RequestParser

from tests.fakes.faulty_engine import CHAT, chat, chunked, fleet, post, whole

LINE = f"POST {CHAT} HTTP/1.1\r\n"
BODY = json.dumps(chat()).encode()
LENGTH = f"content-length: {len(BODY)}\r\n"
CORPUS = {
    "length and coding": LINE + "host: r\r\ntransfer-encoding: chunked\r\n" + LENGTH + "\r\n0\r\n\r\n",
    "coding and length": LINE + "host: r\r\n" + LENGTH + "transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": LINE + "host: r\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    "two equal lengths": LINE + "host: r\r\n" + LENGTH * 2 + "\r\n",
    "a list of lengths": LINE + "host: r\r\ncontent-length: 5, 5\r\n\r\n",
    "a signed length": LINE + "host: r\r\ncontent-length: +5\r\n\r\n",
    "a negative length": LINE + "host: r\r\ncontent-length: -1\r\n\r\n",
    "a hexadecimal length": LINE + "host: r\r\ncontent-length: 0x10\r\n\r\n",
    "a length with a space": LINE + "host: r\r\ncontent-length: 1 0\r\n\r\n",
    "a length beyond 64 bits": LINE + "host: r\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    "identity coding": LINE + "host: r\r\ntransfer-encoding: identity\r\n\r\n",
    "two codings": LINE + "host: r\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": LINE + "host: r\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a hidden coding": LINE + "host: r\r\ntransfer-encoding: xchunked\r\n\r\n",
    "a folded coding": LINE + "host: r\r\ntransfer-encoding:\r\n chunked\r\n" + LENGTH + "\r\n",
    "a space before the colon": LINE + "host: r\r\ntransfer-encoding : chunked\r\n" + LENGTH + "\r\n",
    "chunked in HTTP/1.0": f"POST {CHAT} HTTP/1.0\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bad chunk size": LINE + "host: r\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "a huge chunk size": LINE + "host: r\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "bare line feeds": LINE.replace("\r\n", "\n") + "host: r\n" + LENGTH.replace("\r\n", "\n") + "\n",
    "a bare return in a value": LINE + "host: r\r\nx: a\rb\r\n" + LENGTH + "\r\n",
    "a NUL in a value": LINE + "host: r\r\nx: a\0b\r\n" + LENGTH + "\r\n",
    "no host": LINE + LENGTH + "\r\n",
    "two hosts": LINE + "host: a\r\nhost: b\r\n" + LENGTH + "\r\n",
    "an empty host": LINE + "host: \r\n" + LENGTH + "\r\n",
    "a host with a path": LINE + "host: a/livez\r\n" + LENGTH + "\r\n",
    "a host with a query": LINE + "host: a?x\r\n" + LENGTH + "\r\n",
    "a host with credentials": LINE + "host: u@a\r\n" + LENGTH + "\r\n",
    "another protocol": "GET / FTP/9\r\n\r\n",
    "HTTP/2 by force": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a target with a fragment": f"POST {CHAT}#x HTTP/1.1\r\nhost: r\r\n" + LENGTH + "\r\n",
    "a whole URL as target": f"POST http://e{CHAT} HTTP/1.1\r\nhost: r\r\n" + LENGTH + "\r\n",
    "CONNECT": "CONNECT 10.0.0.1:22 HTTP/1.1\r\nhost: 10.0.0.1:22\r\n\r\n",
}


def test_ambiguous_requests_are_refused_and_nothing_reaches_an_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            for name, text in CORPUS.items():
                hidden = post(chat("smuggled"))
                client = await f.connect()
                await client.send(text.encode("latin-1") + BODY + hidden)
                async with asyncio.timeout(30):
                    answer = await client.answer()
                    # Refused either as a whole, or the body is read as it was declared and the connection ends there.
                    assert answer.status == 400, name
                    assert answer.error["type"] == "invalid_request_error", name
                    assert await client.ended(), name
                assert f.engines[0].seen == [], name
            assert (await f.ask(post(chat()))).status == 200

    uvloop.run(scenario())


@pytest.mark.parametrize(
    "head",
    [
        "x: " + "y" * 70_000 + "\r\n",
        "".join(f"x{n}: y\r\n" for n in range(200)),
        "".join(f"x{n}: {'y' * 1000}\r\n" for n in range(99)),
    ],
    ids=["one long", "many", "many long"],
)
def test_heads_have_limits(tmp_path: Path, head: str) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            answer = await f.ask(post(chat(), headers=head))
            assert (answer.status, answer.error["code"]) == (431, "head_too_large")

    uvloop.run(scenario())


def test_an_endless_head_is_not_collected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            client = await f.connect()
            await client.send(b"POST /" + b"a" * 200_000)
            assert (await client.answer()).status == 431

    uvloop.run(scenario())


def test_a_chunked_body_is_cut_at_the_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), max_body_bytes=10_000) as f:
            client = await f.connect()
            await client.send(f"{LINE}host: r\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for _ in range(11):
                await client.send(chunked(b"x" * 1000))
            assert (await client.answer()).status == 413
            assert f.engines[0].seen == []

    uvloop.run(scenario())


def test_a_large_body_that_is_refused_still_gets_its_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), max_body_bytes=1000) as f:
            answer = await f.ask(post(b"x" * 4_000_000))
            assert (answer.status, answer.headers["connection"]) == (413, "close")

    uvloop.run(scenario())


def test_framing_without_body_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            client = await f.connect()
            await client.send(f"{LINE}host: r\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for _ in range(40):
                await client.send(b"1;" + b"e" * 20_000 + b"\r\nx\r\n")
            assert (await client.answer()).status == 400

    uvloop.run(scenario())


def test_one_byte_chunks_are_fine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            body = json.dumps(chat("x" * 100_000)).encode()
            client = await f.connect()
            pieces = b"".join(chunked(body[i : i + 1]) for i in range(len(body)))
            await client.send(f"{LINE}host: r\r\ntransfer-encoding: chunked\r\n\r\n".encode() + pieces + b"0\r\n\r\n")
            assert (await client.answer()).status == 200
            assert f.engines[0].seen[0].body == body

    uvloop.run(scenario())


@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1", LINE.encode() + b"host: r\r\nx: "], ids=["nothing", "line", "head"]
)
def test_a_slow_head_is_cut(tmp_path: Path, begun: bytes) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), timing=ConnectionTiming(head=0.3)) as f:
            client = await f.connect()
            await client.send(begun)
            async with asyncio.timeout(30):
                for _ in range(100):  # a byte now and then does not help
                    await asyncio.sleep(0.02)
                    if client.reader.at_eof() or client.writer.is_closing():
                        break
                    if begun:
                        client.writer.write(b"a")
                assert await client.ended()

    uvloop.run(scenario())


def test_a_slow_body_and_an_idle_connection_are_cut(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), timing=ConnectionTiming(body=0.3, idle=0.8)) as f:
            client = await f.connect()
            await client.send(post(chat())[:-5])
            async with asyncio.timeout(30):
                assert await client.ended()
            client = await f.connect()
            await client.send(post(chat()))
            assert (await client.answer()).status == 200
            async with asyncio.timeout(30):
                assert await client.ended()

    uvloop.run(scenario())


def test_random_bytes_end_nothing(tmp_path: Path) -> None:
    import random

    rng = random.Random(5)
    valid = post(chat("x" * 200))

    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            for _ in range(300):
                data = bytearray(valid)
                for _ in range(rng.randrange(1, 8)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                client = await f.connect()
                client.writer.write(bytes(data))
                client.writer.write_eof()
                async with asyncio.timeout(30):
                    await client.ended()
                client.close()
            assert (await f.ask(post(chat()))).status == 200
            await f.until(lambda: not f.router.budget.live_requests and len(f.router.connections) <= 1)

    uvloop.run(scenario())


def test_an_offer_of_another_protocol_is_ignored(tmp_path: Path) -> None:
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"

    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            client = await f.connect()
            request = post(chat("offered"), headers=offer)
            for cut in (len(request), 30, request.index(b"\r\n\r\n") + 4, request.index(b"\r\n\r\n") + 10):
                await client.send(request[:cut])
                await asyncio.sleep(0.01)
                await client.send(request[cut:] + post(chat("next")))
                assert [(await client.answer()).status for _ in range(2)] == [200, 200]
            bodies = [seen.body for seen in f.engines[0].seen]
            assert bodies == [json.dumps(chat(text)).encode() for text in ("offered", "next")] * 4
            assert f.engines[0].seen[0].header("upgrade") is None

    uvloop.run(scenario())


@pytest.mark.parametrize("offer", ["", "connection: Upgrade\r\nupgrade: h2c\r\n"])
def test_connect_is_answered_and_harms_nobody(tmp_path: Path, offer: str) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            client = await f.connect()
            await client.send(f"CONNECT r:80 HTTP/1.1\r\nhost: r\r\n{offer}\r\n".encode() + b"x" * 100)
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (400, "close")
            assert await client.ended()
            assert (await f.ask(post(chat()))).status == 200

    uvloop.run(scenario())


def test_a_tunnel_is_looked_at_once() -> None:
    heads: list[ClientRequest] = []
    parser = RequestParser(1 << 20, heads.append, BodyMemory(1 << 20))
    with pytest.raises(Refusal):
        parser.feed(b"CONNECT r:80 HTTP/1.1\r\nhost: r\r\n\r\n" + b"x" * 90)
    assert len(heads) <= 1


@pytest.mark.parametrize("framing", ["content-length: 30000000\r\n", "transfer-encoding: chunked\r\n"])
def test_who_may_not_ask_hears_so_before_the_body(tmp_path: Path, framing: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-" + "a" * 30 + "\n")

    async def scenario() -> None:
        async with fleet(tmp_path, whole(), api_key_file=keys) as f:
            client = await f.connect()
            await client.send(f"{LINE}host: r\r\nx-request-id: mine\r\n{framing}\r\n".encode())
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (401, "close")
            assert answer.headers["x-request-id"] == "mine"
            assert f.router.metrics.requests["/v1/chat/completions", 401] == 1
            await client.send(b"x" * 100_000)
            assert await client.ended()
            # A short body is read over, and the connection kept.
            client = await f.connect()
            await client.send(post(chat()) + post(chat()))
            assert [(await client.answer()).status for _ in range(2)] == [401, 401]

    uvloop.run(scenario())
