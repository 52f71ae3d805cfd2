"""Clients that ask again and again, and remember how every request ended."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

import httpx

from e2e.fleet_process import PATIENCE_S, SERVICE
from tiny.dataset import Exchange

LONG_PAUSE_S = 0.4
SENTENCE = " It says what a page fleet is, and what it is not."


@dataclass(slots=True)
class Streamed:
    """How one stream ended."""

    status: int = 0
    engine: str = ""
    num_texts: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    nothing_after_end: bool = True

    @property
    def whole(self) -> bool:
        """It has everything."""
        return self.status == 200 and self.finish_reasons == ["length"] and self.num_done == 1 and not self.errors

    @property
    def cut(self) -> bool:
        """It had begun, and says once that there will be no more."""
        return self.status == 200 and self.num_texts > 0 and len(self.errors) == 1 and self.num_done == 0

    def take(self, data: str) -> None:
        """Note one event."""
        self.nothing_after_end &= not self.errors and not self.num_done
        if data == "[DONE]":
            self.num_done += 1
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.num_texts += 1
        self.finish_reasons += [one["finish_reason"] for one in event["choices"] if one["finish_reason"]]


def long_request(max_tokens: int) -> dict[str, Any]:
    """Return a completion that takes its time."""
    return {"model": SERVICE, "prompt": "The", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}


async def read_stream(http: httpx.AsyncClient, body: dict[str, Any], streamed: Streamed) -> None:
    """Send one streamed completion and note each event as it comes.

    Raises:
        httpx.TransportError: the connection ended in the middle of the answer.
    """
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        streamed.status = reply.status_code
        streamed.engine = reply.headers.get("x-pagefleet-engine", "")
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                streamed.take(line.removeprefix("data: "))


class Load:
    """Questions answered whole, and long streams, side by side until the `async with` ends.

    Args:
        url: of the router.
        exchanges: asked in turn.
        askers: clients that want whole answers.
        streamers: clients that read streams of `stream_tokens`.
        sentences: of the prompt of each stream, which is then another one each time; 0: all have one short prompt.
        pause_s: of each client between two requests. Where there only has to be traffic all the time, a longer one
            leaves the processor to what is tested.
    """

    def __init__(
        self,
        url: str,
        exchanges: Sequence[Exchange],
        askers: int = 8,
        streamers: int = 4,
        stream_tokens: int = 300,
        sentences: int = 0,
        *,
        pause_s: float = 0.005,
    ) -> None:
        self.num_right = 0
        self.failures: list[str] = []
        self.streams: list[Streamed] = []
        self._exchanges = exchanges
        self._next = count()
        self._clients = (askers, streamers)
        self._body = long_request(stream_tokens)
        self._sentences = sentences
        self._pause_s = pause_s
        self._http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)
        self._stop = False

    async def __aenter__(self) -> Self:
        askers, streamers = self._clients
        work = [self._ask] * askers + [self._stream] * streamers
        self._tasks = [asyncio.create_task(self._repeat(one)) for one in work]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    @contextmanager
    def lighter(self) -> Iterator[None]:
        """Within it clients pause for longer: there is traffic all the time, and the processor is for what starts."""
        before, self._pause_s = self._pause_s, LONG_PAUSE_S
        try:
            yield
        finally:
            self._pause_s = before

    async def progress(self, more: int = 10) -> None:
        """Wait until so many more questions are answered, and every streamer has begun to read.

        Raises:
            TimeoutError: they are not, within `PATIENCE_S`.
        """
        target = self.num_right + more

        def enough() -> bool:
            return self.num_right >= target and sum(one.num_texts > 0 for one in self.streams) >= self._clients[1]

        async with asyncio.timeout(PATIENCE_S):
            while not enough():  # noqa: ASYNC110 - load may be watched from outside
                await asyncio.sleep(0.01)

    def busiest(self) -> str:
        """Return the engine that writes most of the streams, or wrote most where none is under way."""
        under_way = Counter(one.engine for one in self.streams if one.engine and not one.num_done)
        return (under_way or Counter(one.engine for one in self.streams)).most_common(1)[0][0]

    async def _repeat(self, work: Any) -> None:
        while not self._stop:
            try:
                await work()
            except httpx.TransportError as error:
                self.failures.append(repr(error))
            await asyncio.sleep(self._pause_s)

    async def _ask(self) -> None:
        exchange = self._exchanges[next(self._next) % len(self._exchanges)]
        body = {"model": SERVICE, "messages": exchange.messages, "temperature": 0}
        reply = await self._http.post("/v1/chat/completions", json=body)
        if reply.status_code != 200:
            self.failures.append(f"{reply.status_code} {reply.text}")
        elif (text := reply.json()["choices"][0]["message"]["content"]) != exchange.answer:
            self.failures.append(f"{exchange.messages[-1]['content']}: {text}")
        else:
            self.num_right += 1

    async def _stream(self) -> None:
        body = self._body
        if self._sentences:
            body = {**body, "prompt": f"Part {len(self.streams)}." + SENTENCE * self._sentences}
        streamed = Streamed()
        self.streams.append(streamed)
        await read_stream(self._http, body, streamed)
