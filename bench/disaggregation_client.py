"""Streamed completions of token ids: when each token came, and what was answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from pagefleet_engine.bench.goodput import Timing
from pagefleet_engine.bench.load_client import Failure

from bench.disaggregation_fleet import MODEL

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt: Sequence[int]
    max_tokens: int
    at: float = 0.0
    """Seconds after the first one's time."""

    def body(self) -> bytes:
        """Return it as JSON; the most likely token is taken each time."""
        fixed = {"model": MODEL, "temperature": 0.0, "ignore_eos": True, "stream": True}
        return json.dumps({**fixed, "prompt": list(self.prompt), "max_tokens": self.max_tokens}).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request."""

    timing: Timing
    text: str


def new_session() -> aiohttp.ClientSession:
    """Return a client without limits of its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(None),
        headers={"content-type": "application/json"},
    )


async def ask(
    web: aiohttp.ClientSession, url: str, asked: Asked, body: bytes, headers: Mapping[str, str] | None = None
) -> Answer:
    """Send a request and read its stream.

    Raises:
        RuntimeError: the answer is no stream of as many tokens as were asked for.
    """
    times: list[float] = []
    text = ""
    started = time.perf_counter()
    async with web.post(f"{url}{COMPLETIONS}", data=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the stream ended: {event['error']}")
                if event["choices"]:
                    times.append(time.perf_counter() - started)
                    text += event["choices"][0]["text"]
    if not times:
        raise RuntimeError("the stream held no token")
    return Answer(Timing(asked.at, len(asked.prompt), times), text)


async def ask_each_at_its_time(url: str, requests: Sequence[Asked]) -> tuple[list[Answer | Failure], float]:
    """Send each request when it is due; returns what came of each, and the seconds until the last had ended."""
    bodies = [asked.body() for asked in requests]
    async with new_session() as web:
        started = time.perf_counter()

        async def one(asked: Asked, body: bytes) -> Answer | Failure:
            await asyncio.sleep(max(0.0, started + asked.at - time.perf_counter()))
            try:
                return await ask(web, url, asked, body)
            except (RuntimeError, aiohttp.ClientError) as error:
                return Failure(str(error) or type(error).__name__)

        answers = await asyncio.gather(*map(one, requests, bodies))
        return list(answers), time.perf_counter() - started


async def ask_so_many_at_once(url: str, requests: Sequence[Asked], at_once: int) -> float:
    """Keep so many requests under way until all are answered; returns requests per second."""
    places = asyncio.Semaphore(at_once)
    async with new_session() as web:
        started = time.perf_counter()

        async def one(asked: Asked) -> Answer:
            async with places:
                return await ask(web, url, asked, asked.body())

        await asyncio.gather(*map(one, requests))
        return len(requests) / (time.perf_counter() - started)
