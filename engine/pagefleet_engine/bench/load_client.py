"""Sends completions to a server when they are due, and notes when each token comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefleet_engine.bench.goodput import Timing
from pagefleet_engine.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

    from pagefleet_engine.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    base_url: str
    """With the /v1, as OpenAI clients take it."""
    model: str
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was not completed."""

    reason: str


Outcome = Timing | Failure


async def drive(
    target: Target,
    workload: Workload,
    arrivals: Sequence[float],
    max_concurrency: int | None,
    done: Callable[[Outcome], None],
) -> float:
    """Send each request at its time, or when a place is free; returns the seconds until the last was answered.

    `done` is told every outcome as it comes.
    """
    import aiohttp  # noqa: PLC0415 an extra

    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    started = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(None)) as web:

        async def one(index: int) -> None:
            await asyncio.sleep(started + arrivals[index] - time.perf_counter())
            body = _body(target, workload.prompts[index], workload.output_lens[index])
            async with places:
                sent_at = time.perf_counter() - started
                done(await _complete(web, target, body, sent_at))

        await asyncio.gather(*(one(index) for index in range(len(workload.prompts))))
    return time.perf_counter() - started


async def served_model(base_url: str, api_key: str | None) -> str:
    """The first model that the server names.

    Raises:
        ConfigError: it does not answer as an OpenAI server does.
    """
    import aiohttp  # noqa: PLC0415 an extra

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with aiohttp.ClientSession(headers=headers) as web, web.get(f"{base_url}/models") as response:
            models = (await response.json())["data"]
            return str(models[0]["id"])
    except (aiohttp.ClientError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{base_url} does not list models ({type(error).__name__}): give the --base-url of an OpenAI server, "
            "ending in /v1"
        ) from None


def _body(target: Target, prompt: Sequence[int], num_output: int) -> dict[str, Any]:
    return {
        "model": target.model,
        "prompt": list(prompt),
        "max_tokens": num_output,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }


async def _complete(web: aiohttp.ClientSession, target: Target, body: dict[str, Any], sent_at: float) -> Outcome:
    import aiohttp  # noqa: PLC0415 an extra

    started = time.perf_counter()
    times = []
    try:
        async with web.post(f"{target.base_url}/completions", json=body) as response:
            if response.status != 200:
                return Failure(f"HTTP {response.status}: {(await response.text())[:200]}")
            async for event in _events(response):
                if event.get("error"):
                    return Failure(str(event["error"])[:200])
                if event.get("choices"):
                    times.append(time.perf_counter() - started)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Failure(type(error).__name__)
    return Timing(sent_at, len(body["prompt"]), times) if times else Failure("the stream held no token")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])
