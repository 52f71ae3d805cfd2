"""A real server over a scripted engine, in a thread of its own."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_engine.server.access import ApiKeys
from pagefleet_engine.server.app import Parts, create_app
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.lifecycle import Drain, FrontDoor, Running, StopSignals, bind, run_until_stopped
from pagefleet_engine.server.operations import encoded_text, identity_headers
from pagefleet_engine.server.ports import ServedModel
from pagefleet_engine.server.responses_api.shelf import ResponseShelf
from pagefleet_engine.server.responses_api.store import ResponseStore, StoreLimits
from pagefleet_engine.server.route import TransferReader
from pagefleet_protocol.engine_facts import EngineFacts, text_digest
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_text.chat_template import ChatTemplate
from pagefleet_text.text_model import TextModel
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.scripted_engine import MAX_MODEL_LEN, VOCAB_SIZE, ByteTokenizer, PlainChat, ScriptedEngine
from tests.fakes.small_tokenizers import byte_level_backend

MODEL = "scripted"
FLEET_KEY = FleetKey(b"fleet" * 8)
TEXT_MODEL = TextModel(Tokenizer(byte_level_backend(), {}), ChatTemplate("{{ messages[0].content }}", {}))
TEXT = encoded_text(TEXT_MODEL)
"""What routers get; the server itself uses a tokenizer of bytes."""
assert TEXT is not None
FACTS = EngineFacts(
    incarnation="0123456789abcdef" * 2,
    model=MODEL,
    scope=MODEL,
    block_size=16,
    num_blocks=64,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    vocab_size=VOCAB_SIZE,
    text_digest=text_digest(TEXT),
)


def make_parts(engine: ScriptedEngine, pool: ThreadPoolExecutor, key_file: str | None = None) -> Parts:
    tokenizer, drain, open_requests = ByteTokenizer(), Drain(max_in_flight=256), OpenRequests()
    store = ResponseStore(sqlite3.connect(":memory:", check_same_thread=False), None, StoreLimits(2**24, 3600.0))
    return Parts(
        engine=engine,
        tokenizer=tokenizer,
        chat=PlainChat(tokenizer),
        model=ServedModel(MODEL, 1_700_000_000, ModelLimits(MAX_MODEL_LEN, VOCAB_SIZE)),
        metrics=EngineMetrics(MODEL, lambda: engine.stats, max_num_seqs=FACTS.max_num_seqs),
        pool=pool,
        drain=drain,
        open_requests=open_requests,
        facts=FACTS,
        text=TEXT,
        keys=ApiKeys(Path(key_file)) if key_file is not None else None,
        transfers=TransferReader(FLEET_KEY, (FACTS.incarnation,)),
        shelf=ResponseShelf(store, drain, open_requests),
    )


@dataclass
class LiveServer:
    """One running server; `stop` ends it as a signal would and returns the exit status."""

    config: ServerConfig
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)

    def __post_init__(self) -> None:
        self.listener = bind("127.0.0.1", 0)
        self.url = self.listener.url
        self.signals = StopSignals()
        self.engine_died = asyncio.Event()
        self.status: int | None = None
        self.loop_lag_s = 0.0
        self.parts: Parts
        self._loop: asyncio.AbstractEventLoop
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._up.wait(60)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self._wait_until_answering()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._measure_lag())
        with ThreadPoolExecutor(2) as pool, self.listener:
            profiler = None if self.config.profiler_dir is None else self.engine
            self.parts = replace(make_parts(self.engine, pool, self.config.api_key_file), profiler=profiler)
            app = create_app(self.parts, self.config)
            running = Running(
                self.parts.drain,
                self.parts.open_requests,
                self.engine_died,
                self.config.drain_timeout,
                self.engine,
            )
            self._up.set()
            async with FrontDoor(self.listener.sock, app) as door:
                door.open(app, identity_headers(self.parts.facts))
                self.status = await run_until_stopped(door, self.signals, running)
            assert self.parts.shelf is not None
            await self.parts.shelf.close()
        watch.cancel()

    async def _measure_lag(self) -> None:
        while True:
            before, worked = time.monotonic(), time.process_time()
            await asyncio.sleep(0.01)
            # Where other processes hold the machine up this one waits and does no work.
            lag = min(time.monotonic() - before - 0.01, time.process_time() - worked)
            self.loop_lag_s = max(self.loop_lag_s, lag)

    def _wait_until_answering(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                self.http.get("/livez")
            except httpx.ConnectError:
                time.sleep(0.01)
            else:
                return
        raise AssertionError("the server does not answer")

    def call(self, function: Callable[[], None]) -> None:
        """Run something in the server's event loop."""
        self._loop.call_soon_threadsafe(function)

    def signal(self) -> None:
        """Deliver SIGTERM."""
        self.call(self.signals.received)

    def stop(self) -> int | None:
        """Deliver signals until the server has ended."""
        self.http.close()
        if self._thread.is_alive():
            self.signal()
            self.signal()
        return self.join()

    def join(self, timeout_s: float = 60.0) -> int | None:
        """Wait for the end."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        return self.status

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 4, **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hello"}]
        return self.http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 4, **fields}
        )

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> float:
        """Wait for a condition; return how long it took."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < timeout_s, "the condition did not come true"
            time.sleep(0.005)
        return time.monotonic() - started


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LiveServer]:
    """One server for all tests of a module that leave it as it was."""
    server = LiveServer(ServerConfig(max_body_bytes=2 * 1024 * 1024))
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server, which must be idle again afterwards."""
    yield shared_server
    shared_server.wait_until(lambda: not shared_server.engine.running)


@pytest.fixture
def start_server() -> Iterator[Callable[..., LiveServer]]:
    """Start servers of one's own: `start_server(drain_timeout=1.0)`."""
    started: list[LiveServer] = []

    def start(**settings: Any) -> LiveServer:
        started.append(LiveServer(ServerConfig(**settings)))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def client(shared_server: LiveServer) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=shared_server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
