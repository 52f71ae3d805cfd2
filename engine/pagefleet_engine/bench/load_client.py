"""Sends completions to a server when they are due, and notes when each token comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagefleet_engine.bench.goodput import Timing
from pagefleet_engine.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    base_url: str
    """With the /v1, as OpenAI clients take it."""
    model: str
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt: Sequence[int]
    max_tokens: int
    at: float = 0.0
    """Seconds after the first one's time."""

    def body(self, model: str) -> bytes:
        """As JSON; the most likely token is taken each time, to the full length."""
        fixed = {"model": model, "temperature": 0.0, "ignore_eos": True, "stream": True}
        return json.dumps({**fixed, "prompt": list(self.prompt), "max_tokens": self.max_tokens}).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request."""

    timing: Timing
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was not completed."""

    reason: str


Outcome = Answer | Failure


async def drive(
    target: Target, requests: Sequence[Asked], max_concurrency: int | None, done: Callable[[int, Outcome], None]
) -> float:
    """Send each request at its time, or when a place is free; returns the seconds until the last was answered.

    `done` is told every outcome as it comes, with the request's number.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    started = time.perf_counter()
    async with new_session(target.api_key) as web:

        async def one(number: int, asked: Asked) -> None:
            await asyncio.sleep(started + asked.at - time.perf_counter())
            body = asked.body(target.model)
            async with places:
                sent = replace(asked, at=time.perf_counter() - started)
                done(number, await complete(web, target.base_url, sent, body))

        await asyncio.gather(*(one(number, asked) for number, asked in enumerate(requests)))
    return time.perf_counter() - started


def new_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """A client without limits of its own."""
    import aiohttp  # noqa: PLC0415 an extra

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(None),
        headers={"content-type": "application/json", **headers},
    )


async def complete(
    web: aiohttp.ClientSession, base_url: str, asked: Asked, body: bytes, headers: Mapping[str, str] | None = None
) -> Outcome:
    """Send a request, whose body is ready, and read its stream to the end."""
    import aiohttp  # noqa: PLC0415 an extra

    started = time.perf_counter()
    times: list[float] = []
    texts: list[str] = []
    try:
        async with web.post(f"{base_url}/completions", data=body, headers=headers) as response:
            if response.status != 200:
                return Failure(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for event in _events(response):
                if event.get("error"):
                    return Failure(f"the stream ended: {event['error']}"[:300])
                if event.get("choices"):
                    times.append(time.perf_counter() - started)
                    texts.append(event["choices"][0]["text"])
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Failure(type(error).__name__)
    if not times:
        return Failure("the stream held no token")
    return Answer(Timing(asked.at, len(asked.prompt), times), "".join(texts))


def completed(outcome: Outcome) -> Answer:
    """The answer.

    Raises:
        RuntimeError: there is none.
    """
    if isinstance(outcome, Failure):
        raise RuntimeError(outcome.reason)
    return outcome


async def served_model(base_url: str, api_key: str | None) -> str:
    """The first model that the server names.

    Raises:
        ConfigError: it does not answer as an OpenAI server does.
    """
    import aiohttp  # noqa: PLC0415 an extra

    try:
        async with new_session(api_key) as web, web.get(f"{base_url}/models") as response:
            models = (await response.json())["data"]
            return str(models[0]["id"])
    except (aiohttp.ClientError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{base_url} does not list models ({type(error).__name__}): give the --base-url of an OpenAI server, "
            "ending in /v1"
        ) from None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])
