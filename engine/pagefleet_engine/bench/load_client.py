"""Sends completions to a server when they are due, and notes when each token comes back.

A conversation is a request with turns after it: each turn's prompt is the one before, its answer, and a new question.
"""

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


Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a conversation asks after an answer."""

    question: Prompt
    """Of the kind of the first one's prompt."""
    max_tokens: int
    think_s: float = 0.0
    """Seconds between the answer before and this."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and the turns that follow it."""

    prompt: Prompt
    max_tokens: int
    at: float = 0.0
    """Seconds after the first one's time."""
    then: Sequence[Turn] = ()

    @property
    def wants_ids(self) -> bool:
        """Whether the next turn is made of this one's ids."""
        return bool(self.then) and not isinstance(self.prompt, str)

    def body(self, model: str) -> bytes:
        """As JSON; the most likely token is taken each time, to the full length."""
        fixed = {"model": model, "temperature": 0.0, "ignore_eos": True, "stream": True}
        is_text = isinstance(self.prompt, str)
        prompt = {"prompt": self.prompt if is_text else list(self.prompt), "max_tokens": self.max_tokens}
        usage = {"stream_options": {"include_usage": True}}
        ids = {"return_token_ids": True} if self.wants_ids else {}
        return json.dumps({**fixed, **prompt, **usage, **ids}).encode()

    def followed(self, answer: Answer) -> Asked:
        """Return what the next turn asks, after this answer."""
        turn, *rest = self.then
        if isinstance(self.prompt, str):
            prompt: Prompt = f"{self.prompt}{answer.text}\n\n{turn.question}"
        else:
            assert not isinstance(turn.question, str)
            prompt = [*self.prompt, *answer.token_ids, *turn.question]
        return Asked(prompt, turn.max_tokens, then=rest)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request."""

    timing: Timing
    text: str
    token_ids: Sequence[int] = ()
    """Where they were asked for."""
    num_cached_tokens: int | None = None
    """Of the prompt, those that the server found in its cache; None: it does not tell."""
    turn: int = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was not completed."""

    reason: str


Outcome = Answer | Failure
_NOT_ASKED = Failure("the turn before was not answered")


async def drive(
    target: Target, requests: Sequence[Asked], max_concurrency: int | None, done: Callable[[int, Outcome], None]
) -> float:
    """Send each request at its time, or when a place is free; returns the seconds until the last was answered.

    `done` is told every outcome as it comes, with the request's number: one for each of its turns. A conversation keeps
    its place to its end. Turns after one that failed are not asked, and fail too.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    started = time.perf_counter()
    async with new_session(target.api_key) as web:

        async def one(number: int, asked: Asked) -> None:
            await asyncio.sleep(started + asked.at - time.perf_counter())
            body = asked.body(target.model)
            async with places:
                for turn in range(1, len(asked.then) + 2):
                    sent = replace(asked, at=time.perf_counter() - started)
                    outcome = await complete(web, target.base_url, sent, body)
                    if isinstance(outcome, Failure):
                        for failure in (outcome, *[_NOT_ASKED] * len(asked.then)):
                            done(number, failure)
                        return
                    done(number, replace(outcome, turn=turn))
                    if asked.then:
                        await asyncio.sleep(asked.then[0].think_s)
                        asked = asked.followed(outcome)
                        body = asked.body(target.model)

        await asyncio.gather(*(one(number, asked) for number, asked in enumerate(requests)))
    return time.perf_counter() - started


def require_client() -> None:
    """Raise ConfigError where requests cannot be sent: ask before measuring."""
    try:
        import aiohttp  # noqa: F401, PLC0415 an extra
    except ImportError:
        raise ConfigError("this benchmark needs aiohttp: pip install 'pagefleet-engine[bench]'") from None


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
    token_ids: list[int] = []
    usage: Mapping[str, Any] = {}
    try:
        async with web.post(f"{base_url}/completions", data=body, headers=headers) as response:
            if response.status != 200:
                return Failure(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for event in _events(response):
                if event.get("error"):
                    return Failure(f"the stream ended: {event['error']}"[:300])
                for choice in event.get("choices", ()):
                    new_ids = choice.get("token_ids") or ()
                    times += [time.perf_counter() - started] * (len(new_ids) if asked.wants_ids else 1)
                    texts.append(choice["text"])
                    token_ids += new_ids
                usage = event.get("usage") or usage
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Failure(type(error).__name__)
    if not times:
        if asked.wants_ids and texts:
            return Failure("the server tells no token ids, which later turns need: give --dataset-name sharegpt")
        return Failure("the stream held no token")
    num_input_tokens = usage.get("prompt_tokens", 0) if isinstance(asked.prompt, str) else len(asked.prompt)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    timing = Timing(asked.at, num_input_tokens, times, usage.get("completion_tokens", 0))
    return Answer(timing, "".join(texts), token_ids, cached)


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
