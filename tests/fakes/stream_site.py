"""A server without sockets over an inline engine, and what tests of streams compare. No test in here."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from pagefleet_engine.config import (
    ServerConfig,
)
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_engine.server.app import Parts, create_app
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.lifecycle import Drain
from pagefleet_engine.server.ports import ServedModel
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.handoff import (
    PROMPT_TOKENS,
    STREAM,
    Shown,
    StreamState,
    take_note,
)
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.inline_engine import CONTEXT, InlineEngine, script_core
from tests.fakes.scripted_engine import PlainChat
from tests.fakes.small_tokenizers import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), {"eos_token": "<|im_end|>"})
TEXT = "The héllo 你好 😀 fox, ÿ and the end. Thé"
STATE = StreamState("0123456789abcdef" * 2, 1_700_000_001)
ROUTES = ("/v1/chat/completions", "/v1/completions")
JSON = {"content-type": "application/json"}
USAGE = {"stream_options": {"include_usage": True}}


@dataclass
class Site:
    """A server without sockets."""

    http: httpx.AsyncClient
    parts: Parts
    engine: InlineEngine
    prompt: str = "Hello you"

    def fields(self, route: str, **fields: Any) -> bytes:
        ask = {"messages": [{"role": "user", "content": self.prompt}]} if "chat" in route else {"prompt": self.prompt}
        return json.dumps({"model": "m", "stream": True, "temperature": 0, **ask, **fields}).encode()

    async def send(
        self, route: str, body: bytes, state: StreamState | None = None, ids: bytes = b"", num_prompt: int | None = None
    ) -> httpx.Response:
        headers = {} if state is None else {STREAM: state.encode()}
        if num_prompt is not None:
            headers[PROMPT_TOKENS] = str(num_prompt)
        return await self.http.post(route, content=body + ids, headers=headers)


@asynccontextmanager
async def open_site(core: EngineCore, tokenizer: Tokenizer, **more_parts: Any) -> AsyncIterator[Site]:
    engine = InlineEngine(core, tokenizer)
    with ThreadPoolExecutor(1) as pool:
        parts = Parts(
            engine=engine,
            tokenizer=tokenizer,
            chat=PlainChat(tokenizer),  # type: ignore[arg-type]
            model=ServedModel("m", 0, core.limits),
            metrics=EngineMetrics("m", lambda: engine.stats),
            pool=pool,
            drain=Drain(max_in_flight=8),
            open_requests=OpenRequests(),
            facts=EngineFacts(
                incarnation="0" * 32,
                model="m",
                scope="m",
                block_size=4,
                num_blocks=64,
                max_model_len=CONTEXT,
                max_num_seqs=4,
                max_num_batched_tokens=64,
                vocab_size=core.limits.vocab_size,
            ),
            **more_parts,
        )
        transport = httpx.ASGITransport(create_app(parts, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=JSON) as http:
            yield Site(http, parts, engine)
    assert core.stats().kv_usage == 0
    core.check_integrity()


@dataclass
class Gathered:
    """What a router has of a stream."""

    events: bytes = b""
    """Without notes."""
    tokens: dict[int, bytes] = field(default_factory=dict)
    num_chars: dict[int, int] = field(default_factory=dict)

    @property
    def state(self) -> StreamState:
        choices = (Shown(len(self.tokens.get(i, b"")) // 4, self.num_chars.get(i, 0)) for i in range(self._num_choices))
        return replace(STATE, choices=tuple(choices))

    @property
    def packed(self) -> bytes:
        return b"".join(self.tokens.get(i, b"") for i in range(self._num_choices))

    @property
    def _num_choices(self) -> int:
        return max(self.num_chars) + 1


def gathered(stream: bytes) -> Gathered:
    found = Gathered()
    for block in blocks_of(stream):
        event, note = take_note(block)
        found.events += event
        if note is not None:
            found.tokens[note.choice] = found.tokens.get(note.choice, b"") + note.tokens
            found.num_chars[note.choice] = note.num_chars
    return found


def shown(num_tokens: int = 0, num_chars: int = 0) -> StreamState:
    """Return the state of a stream of one choice."""
    return replace(STATE, choices=(Shown(num_tokens, num_chars),))


def script_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def scripted(test: Callable[[Site], Any], script: list[int] | None = None) -> None:
    async def run() -> None:
        script_ids = script_of(TEXT) if script is None else script
        async with open_site(script_core(script_ids, 400), TOKENIZER) as site:
            await test(site)

    asyncio.run(run())


def blocks_of(stream: bytes) -> list[bytes]:
    """Return the events of a stream, each with its note."""
    blocks = [block + b"\n\n" for block in stream.split(b"\n\n")]
    assert blocks.pop() == b"\n\n"
    return blocks


def without_names(stream: bytes) -> bytes:
    """Return a stream without what differs from answer to answer."""
    return re.sub(rb'"id":"(chatcmpl|cmpl)-[0-9a-f]+"|"created":[0-9]+', b"", stream)


def without_cached(stream: bytes) -> bytes:
    return re.sub(rb'"cached_tokens":[0-9]+', b"", stream)
