"""Has a server record a profile of a part of a load, by the routes that vLLM has for it too."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from pagefleet_engine.bench.load_client import Target, new_session
from pagefleet_engine.errors import ConfigError


async def profiled(
    target: Target, load: Coroutine[Any, Any, float], delay_s: float, seconds: float
) -> tuple[float, str | None]:
    """Run a load, and record it from `delay_s` on for so many seconds, or to its end.

    Returns:
        What the load returns, and where the server says that the profile is; None: it does not say.

    Raises:
        ConfigError: the server records none, in its words.
    """
    if delay_s <= 0:  # to begin takes a moment, for which nothing should wait yet
        try:
            await _ask(target, "start_profile")
        except ConfigError:
            load.close()
            raise
    running = asyncio.create_task(load)
    try:
        if delay_s > 0:
            await asyncio.wait({running}, timeout=delay_s)
            await _ask(target, "start_profile")
        await asyncio.wait({running}, timeout=seconds)
        path = await _ask(target, "stop_profile")
        return await running, path
    finally:
        running.cancel()


async def _ask(target: Target, route: str) -> str | None:
    import aiohttp  # noqa: PLC0415 an extra

    url = f"{target.base_url.removesuffix('/v1')}/{route}"
    try:
        async with new_session(target.api_key) as web, web.post(url) as response:
            body, status = await response.read(), response.status
    except (aiohttp.ClientError, OSError) as error:
        raise ConfigError(f"--profile: {url} does not answer ({type(error).__name__})") from None
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = None
    if status != 200:
        error_of = answer.get("error") if isinstance(answer, dict) else None
        said = error_of.get("message") if isinstance(error_of, dict) else f"HTTP {status}"
        raise ConfigError(f"--profile: {url}: {said}")
    return answer.get("path") if isinstance(answer, dict) else None
