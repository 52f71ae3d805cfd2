"""Runs in a pod: asks a Service without a pause, half of the time on new connections, and prints how it went.

Each line is the whole account so far: answers that were right, streams that were whole, and what failed.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count

import aiohttp

STREAM_TOKENS = 60
PAUSE_S = 0.05
PRINT_S = 0.5
SILENCE_S = 120
"""Without a byte of an answer: a busy node may take minutes for one, and it is none the worse."""
SENTENCE = " It says what a page fleet is, and what it is not."
TOPICS = ("The router", "A fleet", "The engine", "Each block", "Tokens", "Caches", "The model", "Requests")


class Account:
    """How the requests ended."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def line(self) -> str:
        return json.dumps({**self.counts, "failures": self.failures})


@dataclass(frozen=True)
class Asked:
    """Whom to ask, and for what."""

    url: str
    model: str
    sentences: int
    """0: a few prompts that are short; else each is another one, and that long."""

    def prompt(self, number: int) -> str:
        topic = TOPICS[number % len(TOPICS)]
        return f"Part {number}. {topic}:{SENTENCE * self.sentences}" if self.sentences else topic


async def ask(session: aiohttp.ClientSession, asked: Asked, number: int) -> str:
    """Ask for a short answer. Returns what is wrong with it."""
    body = {"model": asked.model, "prompt": asked.prompt(number), "max_tokens": 8, "ignore_eos": True}
    async with session.post(f"{asked.url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            return f"{reply.status} {await reply.text()}"
        usage = (await reply.json())["usage"]
        return "" if usage["completion_tokens"] == 8 else f"usage {usage}"


async def stream(session: aiohttp.ClientSession, asked: Asked, number: int) -> str:
    """Read a longer answer as it comes. Returns what is wrong with it."""
    body = {"model": asked.model, "prompt": asked.prompt(number), "max_tokens": STREAM_TOKENS, "ignore_eos": True}
    ends, done = [], 0
    async with session.post(f"{asked.url}/v1/completions", json={**body, "stream": True}) as reply:
        if reply.status != 200:
            return f"{reply.status} {await reply.text()}"
        async for line in reply.content:
            if line.startswith(b"data: [DONE]"):
                done += 1
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"cut: {event['error']}"
                ends += [one["finish_reason"] for one in event["choices"] if one["finish_reason"]]
    return "" if (ends, done) == (["length"], 1) else f"ended by {ends} and {done} [DONE]"


Work = Callable[[aiohttp.ClientSession, Asked, int], Awaitable[str]]


async def repeat(work: Work, asked: Asked, numbers: Iterator[int], account: Account) -> None:
    """Ask for ever. Every second client takes a new connection for each request."""
    number = next(numbers)
    connector = aiohttp.TCPConnector(force_close=number % 2 == 0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        while True:
            try:
                wrong = await work(session, asked, number)
            except (aiohttp.ClientError, TimeoutError) as error:
                wrong = repr(error)
            if wrong:
                account.failures.append(f"{time.strftime('%H:%M:%S')} {work.__name__}: {wrong}"[:400])
            account.counts[f"{work.__name__}_{'failed' if wrong else 'right'}"] += 1
            number = next(numbers)
            await asyncio.sleep(PAUSE_S)


async def main(asked: Asked, askers: int, streamers: int) -> None:
    account = Account()
    work = [ask] * askers + [stream] * streamers
    async with asyncio.TaskGroup() as group:
        for number, one in enumerate(work):
            group.create_task(repeat(one, asked, count(number, len(work) + 1), account))
        while True:
            print(account.line(), flush=True)
            await asyncio.sleep(PRINT_S)


if __name__ == "__main__":
    url, model, *numbers = sys.argv[1:]
    askers, streamers, sentences = map(int, numbers)
    asyncio.run(main(Asked(url, model, sentences), askers, streamers))
