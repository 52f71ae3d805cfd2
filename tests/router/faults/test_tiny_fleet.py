"""Routers that die (F15), and noise on engines' event ports: real routers and engines with the embedded model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_events import TOPIC, Dump, EventBatch, Replay, Stored, encode
from prometheus_client.parser import text_string_to_metric_families
from zmq.utils import z85

from tests.fakes.faulty_engine import Answer, Client, post
from tests.fakes.free_ports import free_ports
from tests.fakes.route_process import RouteProcess, route_process, until, write_endpoints

pytestmark = pytest.mark.fleet
PATIENCE_S = 120.0
BLOCK = 16
PATH = "/v1/completions"
SECRET = b"s" * 40


class TinyEngine:
    """One `pagefleet serve builtin://tiny` whose KV events only the fleet hears."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.url = ""
        self.events_port = free_ports(2)
        self._log = folder / f"{name}.log"
        flags = ["--served-model-name", "m", "--port", "0", "--num-kv-blocks", "512", "--num-threads", "1"]
        flags += ["--kv-events-port", str(self.events_port), "--fleet-key-file", str(folder / "fleet-key")]
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "pagefleet_engine.cli", "builtin://tiny", *flags]
            self.process = subprocess.Popen(command, stderr=log)

    async def until_it_serves(self) -> None:
        async def serves() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            found = re.search(r"serving m on (http://\S+)", self._log.read_text())
            self.url = found[1] if found else ""
            return bool(self.url)

        await until(serves, PATIENCE_S)

    async def num_dropped(self) -> float:
        client = Client(*await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2])))
        await client.send(b"GET /metrics HTTP/1.1\r\nhost: e\r\n\r\n")
        text = (await client.answer()).body.decode()
        client.close()
        samples = (one for family in text_string_to_metric_families(text) for one in family.samples)
        return sum(one.value for one in samples if one.name == "pagefleet_engine_kv_events_dropped_total")

    def stop(self) -> None:
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    (made / "fleet-key").write_bytes(SECRET)
    return made


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[list[TinyEngine]]:
    started = [TinyEngine(folder, f"e{number}") for number in range(2)]
    try:
        yield started
    finally:
        for engine in started:
            engine.stop()


def run(folder: Path, engines: Sequence[TinyEngine], check: Callable[[list[str]], Awaitable[None]]) -> None:
    async def scenario() -> None:
        for engine in engines:
            await engine.until_it_serves()
        file = folder / "endpoints.json"
        write_endpoints(file, *(Endpoint(engine.name, engine.url, "m") for engine in engines))
        await check(["--endpoints-file", str(file), "--fleet-key-file", str(folder / "fleet-key"), "--explain"])

    asyncio.run(scenario())


def document(name: str) -> str:
    return " ".join(f"{name} {number} says what a page fleet is, and what it is not." for number in range(45))


async def complete(router: RouteProcess, prompt: str) -> Answer:
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    headers = "content-type: application/json\r\nx-pagefleet-explain: 1\r\n"
    answer = await router.ask(post(body, PATH, headers))
    assert answer.status == 200, answer.body
    return answer


async def complete_again(router: RouteProcess) -> tuple[Answer, Answer]:
    """Return two answers to one prompt, which the router had the time to read both times."""
    for number in range(8):
        late, prompt = await router.metric("prompts_late_total"), document(f"Afterwards {number}")
        told, again = await complete(router, prompt), await complete(router, prompt)
        if await router.metric("prompts_late_total") == late:
            return told, again
    raise AssertionError("it never had the time")


def cached_of(answer: Answer) -> tuple[int, int]:
    """Return the tokens that were cached, and those that could have been."""
    usage = answer.json["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], (usage["prompt_tokens"] - 1) // BLOCK * BLOCK


async def knows(router: RouteProcess, blocks: float | None = None) -> bool:
    """Whether a router follows both engines and can tokenize, and has at least so many blocks of them."""
    if await router.metric("kv_engines_followed") != 2 or not any("tokenizer" in line for line in router.log):
        return False
    return blocks is None or await router.metric("kv_blocks") >= blocks


def test_when_a_router_is_killed_the_other_serves_and_a_new_one_knows_what_they_knew(
    folder: Path, engines: list[TinyEngine]
) -> None:
    """F15."""

    async def is_so(flags: list[str], number: int) -> bool:
        """Whether it is, as far as routers had the time to read prompts: else they go by the text."""
        prompts = [document(f"Page {number} {letter}") for letter in "ABCDEF"]
        async with route_process(*flags) as first, route_process(*flags) as second:
            for router in (first, second):
                await until(lambda router=router: knows(router), PATIENCE_S)  # type: ignore[misc]
            told = [await complete(first, prompt) for prompt in prompts]
            blocks = sum(answer.json["usage"]["prompt_tokens"] // BLOCK for answer in told)
            await until(lambda: knows(second, blocks))
            asked = [asyncio.create_task(complete(second, prompt)) for prompt in prompts]
            os.kill(first.process.pid, signal.SIGKILL)
            assert await first.ended() == -signal.SIGKILL
            homes = [answer.headers["x-pagefleet-engine"] for answer in told]
            followed = [(await one).headers["x-pagefleet-engine"] for one in asked]
            if await second.metric("prompts_late_total"):
                return False
            assert followed == homes
            async with route_process(*flags) as third:
                await until(lambda: knows(third, blocks), PATIENCE_S)
                answers = [await complete(third, prompt) for prompt in prompts]
                if await third.metric("prompts_late_total"):
                    return False
                for answer, home in zip(answers, homes, strict=True):
                    cached, most = cached_of(answer)
                    rows = {row["engine"]: row for row in json.loads(answer.headers["x-pagefleet-explain"])}
                    assert answer.headers["x-pagefleet-engine"] == home
                    assert cached == most == rows[home]["cached_tokens"] > 500
        return True

    async def check(flags: list[str]) -> None:
        for number in range(8):
            if await is_so(flags, number):
                return
        raise AssertionError("routers never had the time")

    run(folder, engines, check)


def pour_garbage(port: int, rng: random.Random) -> None:
    """Send what is no ZMQ to a port, on connections of its own."""
    for data in (
        b"GET /metrics HTTP/1.1\r\nhost: e\r\n\r\n", rng.randbytes(3000), b"", b"\xff" + bytes(8) + b"\x7f\x03",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48), b"\x16\x03\x01\x02\x00\x01\x00",
    ):  # fmt: skip
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as one:
            one.sendall(data)


class Stranger:
    """Whoever connects to an engine's event ports without the fleet's key, and says and asks what routers would."""

    def __init__(self, port: int, key: FleetKey | None) -> None:
        self._context = zmq.Context()
        self.heard = [self._connect(zmq.SUB, port, key), self._connect(zmq.DEALER, port + 1, key)]
        self.heard[0].setsockopt(zmq.SUBSCRIBE, b"")
        self._forger = self._connect(zmq.PUB, port, key)
        self._pusher = self._connect(zmq.DEALER, port, key)

    def speak(self) -> None:
        forged = encode(EventBatch("f" * 32, 1, [Stored(bytes(800))]))
        for one, frames in (
            (self.heard[1], [encode(Dump())]), (self.heard[1], [encode(Replay(1, 2**63))]),
            (self._forger, [TOPIC, forged]), (self._pusher, [TOPIC, forged]),
        ):  # fmt: skip
            with contextlib.suppress(zmq.Again):
                one.send_multipart(frames, zmq.NOBLOCK)

    def has_heard(self) -> bool:
        return any(one.poll(0) for one in self.heard)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _connect(self, kind: int, port: int, key: FleetKey | None) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.RECONNECT_IVL, 50)
        if key is not None:
            secret = z85.encode(key.curve_secret("router"))
            made.setsockopt(zmq.CURVE_SECRETKEY, secret)
            made.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            # The engine's own public key is no secret that a test could not know.
            server = z85.encode(FleetKey(SECRET).curve_secret("engine"))
            made.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(server))
        made.connect(f"tcp://127.0.0.1:{port}")
        return made


def test_strangers_and_garbage_on_event_ports_under_load_change_nothing(
    folder: Path, engines: list[TinyEngine]
) -> None:
    rng = random.Random(5)
    stop = asyncio.Event()

    async def load(router: RouteProcess, name: str) -> None:
        for turn in range(10**6):
            if stop.is_set():
                return
            assert cached_of(await complete(router, document(f"{name} {turn % 4}")))[1] > 500

    async def check(flags: list[str]) -> None:
        async with route_process(*flags) as router:
            await until(lambda: knows(router), PATIENCE_S)
            before = [await engine.num_dropped() for engine in engines]
            strangers = [
                Stranger(engine.events_port, key)
                for engine in engines
                for key in (None, FleetKey(b"x" * 40), FleetKey(b"y" * 40))
            ]
            loads = [asyncio.create_task(load(router, name)) for name in ("Red", "Blue")]
            try:

                async def dropped_everywhere() -> bool:
                    for stranger in strangers:
                        stranger.speak()
                    for engine in engines:
                        for port in (engine.events_port, engine.events_port + 1):
                            await asyncio.to_thread(pour_garbage, port, rng)
                    now = [await engine.num_dropped() for engine in engines]
                    return all(after - was > 30 for after, was in zip(now, before, strict=True))

                await until(dropped_everywhere)
                assert not any(stranger.has_heard() for stranger in strangers)
            finally:
                stop.set()
                await asyncio.gather(*loads)
                for stranger in strangers:
                    stranger.close()
            assert await router.metric("kv_events_dropped_total") == 0
            assert all(engine.process.poll() is None for engine in engines)
            told, again = await complete_again(router)
            cached, most = cached_of(again)
            assert (again.headers["x-pagefleet-engine"], cached) == (told.headers["x-pagefleet-engine"], most)

    run(folder, engines, check)
