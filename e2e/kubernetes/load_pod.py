"""Runs in a pod: asks a Service without a pause, half of the time on new connections, and prints how it went.

Each line is the whole account so far: answers that were right, streams that were whole, and what failed.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import aiohttp

STREAM_TOKENS = 60
PAUSE_S = 0.05
PRINT_S = 0.5
TOPICS = ("The router", "A fleet", "The engine", "Each block", "Tokens", "Caches", "The model", "Requests")


class Account:
    """How the requests ended."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def line(self) -> str:
        return json.dumps({**self.counts, "failures": self.failures})


async def ask(session: aiohttp.ClientSession, url: str, model: str, number: int) -> str:
    """Ask for a short answer. Returns what is wrong with it."""
    body = {"model": model, "prompt": TOPICS[number % len(TOPICS)], "max_tokens": 8, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            return f"{reply.status} {await reply.text()}"
        usage = (await reply.json())["usage"]
        return "" if usage["completion_tokens"] == 8 else f"usage {usage}"


async def stream(session: aiohttp.ClientSession, url: str, model: str, number: int) -> str:
    """Read a longer answer as it comes. Returns what is wrong with it."""
    body = {"model": model, "prompt": TOPICS[number % len(TOPICS)], "max_tokens": STREAM_TOKENS, "ignore_eos": True}
    ends, done = [], 0
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as reply:
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


async def repeat(
    work: Callable[[aiohttp.ClientSession, str, str, int], Awaitable[str]], where: tuple[str, str], number: int,
    account: Account,
) -> None:  # fmt: skip
    """Ask for ever. Every second client takes a new connection for each request."""
    connector = aiohttp.TCPConnector(force_close=number % 2 == 0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
        while True:
            try:
                wrong = await work(session, *where, number)
            except (aiohttp.ClientError, TimeoutError) as error:
                wrong = repr(error)
            if wrong:
                account.failures.append(f"{time.strftime('%H:%M:%S')} {work.__name__}: {wrong}"[:400])
            account.counts[f"{work.__name__}_{'failed' if wrong else 'right'}"] += 1
            number += 3
            await asyncio.sleep(PAUSE_S)


async def main(url: str, model: str, askers: int, streamers: int) -> None:
    account = Account()
    work = [ask] * askers + [stream] * streamers
    async with asyncio.TaskGroup() as group:
        for number, one in enumerate(work):
            group.create_task(repeat(one, (url, model), number, account))
        while True:
            print(account.line(), flush=True)
            await asyncio.sleep(PRINT_S)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
