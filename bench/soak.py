"""Hours of mixed load with clients that leave: requests lost or answered wrongly, and what memory does meanwhile.

    python bench/soak.py router --minutes 60 --requests 5000000 --json bench/results/soak_router.json
    python bench/soak.py engine --minutes 60 --json bench/results/soak_engine.json

`router`: one router before fake engines, whose answers name the request that they are for. `engine`: one engine with
`builtin://tiny`, which has to answer by heart. The slope is that of a line through resident memory, in MB an hour; the
first fifth does not count, as caches fill then. Exit status 1: a request was lost, or answered wrongly, or left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import uvloop

from bench.fake_engine import ANSWER, ANSWER_ID, CHUNK
from bench.http_load import ClientConnection, Pool, raw_request
from bench.report import write_report
from bench.routers import MODEL, ROUTERS, RunningRouter, free_port, installed, raise_open_files
from tiny.dataset import load_knowledge

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATIENCE_S = 60.0
"""A request without an end for so long is lost."""
FIRST_SHARE = 0.2
NUM_TOLD = 10
CHUNKS = 4
LONG_TOKENS = 100
KV_BLOCKS = 4096
"""Few, so that the cache is full, and all of its memory taken, before slopes count."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and what its answer has to be; a client that leaves goes once the answer has begun."""

    path: str
    body: dict[str, Any]
    right: Callable[[bytes], bool]
    leaves: bool = False


@dataclass(slots=True)
class Tally:
    """How requests ended."""

    right: int = 0
    left: int = 0
    """Clients that went before the end."""
    lost: int = 0
    wrong: int = 0
    told: list[str] = field(default_factory=list)
    """The first faults."""

    @property
    def faults(self) -> int:
        return self.lost + self.wrong

    def fault(self, what: str) -> None:
        """Note one; the first few are told."""
        if len(self.told) < NUM_TOLD:
            self.told.append(what[:300])


class Memory:
    """Resident bytes of some processes over time."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self._seen: dict[str, list[tuple[float, int]]] = {name: [] for name in processes}

    async def watch(self, every_s: float) -> None:
        """Look again and again until cancelled."""
        while True:
            for name, process in self._processes.items():
                self._seen[name].append((time.monotonic(), process.memory_info().rss))
            await asyncio.sleep(every_s)

    def figures(self) -> dict[str, dict[str, float]]:
        """For each process: megabytes at the end, and the slope."""
        return {
            name: {"end_mb": round(seen[-1][1] / 1e6, 1), "mb_per_hour": round(slope_mb_per_hour(seen), 3)}
            for name, seen in self._seen.items()
        }


def slope_mb_per_hour(seen: Sequence[tuple[float, int]]) -> float:
    """Of the line of least squares through (seconds, bytes), without the first fifth; 0 for fewer than two points."""
    points = seen[int(len(seen) * FIRST_SHARE) :]
    mean_t = sum(at for at, _ in points) / max(len(points), 1)
    mean_b = sum(size for _, size in points) / max(len(points), 1)
    spread = sum((at - mean_t) ** 2 for at, _ in points)
    if spread == 0:
        return 0.0
    return sum((at - mean_t) * (size - mean_b) for at, size in points) / spread * 3600 / 1e6


def router_asks(seed: int = 0) -> Iterator[Ask]:
    """Nine in ten are whole answers; of the streams each tenth client leaves. 500 conversations come again."""
    draw, number = random.Random(seed), 0
    texts = [f"Conversation {n % 50}. " * 40 + f"Question {n}?" for n in range(500)]
    while True:
        number += 1
        own_id = f"soak-{seed}-{number}"
        named = b'"id":"%s"' % own_id.encode()
        streams = draw.random() < 0.1
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": draw.choice(texts)}],
            "user": own_id,
        }
        whole = ANSWER.replace(ANSWER_ID, named)
        if streams:
            whole = CHUNK.replace(ANSWER_ID, named) * CHUNKS + b"data: [DONE]\n\n"
            body["stream"] = True
        yield Ask(CHAT, body, whole.__eq__, leaves=streams and draw.random() < 0.1)


def engine_asks(seed: int = 0) -> Iterator[Ask]:
    """Questions by heart, whole and streamed; long streams, sampled, of which half the clients leave."""
    draw, exchanges = random.Random(seed), list(load_knowledge().exchanges())
    while True:
        kind = draw.random()
        if kind < 0.8:
            exchange = draw.choice(exchanges)
            body = {"model": "tiny", "messages": exchange.messages, "temperature": 0, "stream": kind < 0.2}
            yield Ask(CHAT, body, lambda reply, answer=exchange.answer: text_of(reply) == answer)  # type: ignore[misc]
        else:
            body = {"model": "tiny", "prompt": f"Part {draw.randrange(10**6)}.", "n": draw.choice((1, 2))}
            body |= {"max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
            yield Ask(COMPLETIONS, body, lambda reply, n=body["n"]: has_all(reply, n), leaves=kind > 0.9)  # type: ignore[misc]


def text_of(reply: bytes) -> str:
    """The text of a chat's answer, whole or streamed; "" for a stream that was cut."""
    if reply.startswith(b"{"):
        return str(json.loads(reply)["choices"][0]["message"]["content"])
    if not reply.endswith(b"data: [DONE]\n\n"):
        return ""
    return "".join(choice["delta"].get("content") or "" for event in events(reply) for choice in event["choices"])


def has_all(reply: bytes, n: int) -> bool:
    """Whether a stream has the end of each of `n` choices, and its own."""
    ends = [choice["index"] for event in events(reply) for choice in event["choices"] if choice["finish_reason"]]
    return sorted(ends) == list(range(n)) and reply.endswith(b"data: [DONE]\n\n")


def events(reply: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream; an error in it has no choices, and so nothing of what is looked for."""
    for line in reply.split(b"\n\n"):
        if line.startswith(b"data: {"):
            yield {"choices": [], **json.loads(line[6:])}


async def press(pool: Pool, asks: Sequence[Iterator[Ask]], per_second: float | None, seconds: float) -> Tally:
    """Send from as many clients as there are iterators, together at a rate or as fast as they are answered."""
    tally, began = Tally(), time.monotonic()

    async def client(number: int) -> None:
        turn = 0
        while (due := began + (turn * len(asks) + number) / per_second if per_second else 0.0) < began + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() >= began + seconds:
                return
            await send(pool, next(asks[number]), tally)
            turn += 1

    await asyncio.gather(*(client(number) for number in range(len(asks))))
    pool.close()
    return tally


async def send(pool: Pool, ask: Ask, tally: Tally) -> None:
    """One request to its end."""
    connection: ClientConnection | None = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            connection = await pool.take()
            done = connection.request(raw_request(pool.host, ask.path, json.dumps(ask.body).encode()))
            while ask.leaves and not connection.has_begun and not done.done():  # noqa: ASYNC110 a protocol has no event
                await asyncio.sleep(0.001)
            if ask.leaves and not done.done():
                tally.left += 1
                done.cancel()
                connection.close()
                return
            sample = await done
    except (OSError, TimeoutError) as error:
        tally.lost += 1
        tally.fault(f"lost: {error!r}: {ask.body}")
        if connection is not None:
            connection.close()
        return
    pool.give(connection)
    if sample.status == 200 and ask.right(sample.body):
        tally.right += 1
    else:
        tally.wrong += 1
        tally.fault(f"wrong: {sample.status} {sample.body!r} for {ask.body}")


@contextlib.contextmanager
def router_scene(folder: Path) -> Iterator[tuple[int, dict[str, psutil.Process], Callable[[], int]]]:
    """A router before four fake engines: its port, the processes to watch, and how many streams are still open."""
    script = Path(__file__).with_name("fake_engine.py")
    command = [sys.executable, str(script), "--chunks", str(CHUNKS), "--gap", "0.005"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engines:
        try:
            assert engines.stdout is not None
            ports = [int(word) for word in engines.stdout.readline().split()[1:]]
            with RunningRouter(ROUTERS[0], installed({}), ports, folder) as router:

                def open_streams() -> int:
                    return sum(json.loads(page(f"http://127.0.0.1:{port}/stats"))["open_streams"] for port in ports)

                yield router.port, {"router": router.process}, open_streams
        finally:
            engines.kill()


@contextlib.contextmanager
def engine_scene(folder: Path) -> Iterator[tuple[int, dict[str, psutil.Process], Callable[[], int]]]:
    """An engine with the embedded model: its port, its two processes, and how many requests it still has."""
    port = free_port()
    command = [sys.executable, "-m", "pagefleet_engine.cli", "builtin://tiny", "--port", str(port)]
    with (folder / "engine.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--served-model-name", "tiny", "--num-kv-blocks", str(KV_BLOCKS)], stdout=log, stderr=log
        )
        try:
            url = f"http://127.0.0.1:{port}"
            give_up_at = time.monotonic() + PATIENCE_S
            while not answers(f"{url}/readyz"):
                if time.monotonic() > give_up_at or server.poll() is not None:
                    raise RuntimeError(f"the engine is not ready: {(folder / 'engine.log').read_text()[-1000:]}")
                time.sleep(0.1)
            api = psutil.Process(server.pid)
            (core,) = (child for child in api.children() if "resource_tracker" not in " ".join(child.cmdline()))

            def requests() -> int:
                names = ("pagefleet_engine_requests_running", "pagefleet_engine_requests_waiting")
                lines = page(f"{url}/metrics").decode().splitlines()
                return sum(int(float(line.split()[-1])) for line in lines if line.startswith(names))

            yield port, {"api": api, "core": core}, requests
        finally:
            server.terminate()
            server.wait(30)


def page(url: str) -> bytes:
    """What a GET gives."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


def answers(url: str) -> bool:
    """Whether a GET gives 200."""
    try:
        page(url)
    except OSError:
        return False
    return True


def left_behind(count: Callable[[], int]) -> int:
    """What is still there some seconds after the last client has gone."""
    give_up_at = time.monotonic() + 10
    while (number := count()) and time.monotonic() < give_up_at:
        time.sleep(0.2)
    return number


def soak(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Press one scene for the time that was asked for; returns the figures."""
    scene, asks = (router_scene, router_asks) if arguments.what == "router" else (engine_scene, engine_asks)
    seconds = arguments.minutes * 60
    rate = arguments.requests / seconds if arguments.requests else None
    with scene(folder) as (port, processes, count):
        memory, pool = Memory(processes), Pool("127.0.0.1", port, keep_bodies=True)

        async def watched() -> Tally:
            watching = asyncio.create_task(memory.watch(min(5.0, seconds / 100)))
            tally = await press(pool, [asks(seed) for seed in range(arguments.clients)], rate, seconds)
            watching.cancel()
            return tally

        began = time.monotonic()
        tally = uvloop.run(watched())
        took = time.monotonic() - began
        return {
            "minutes": round(took / 60, 2),
            "requests": tally.right + tally.left + tally.faults,
            "right": tally.right,
            "clients_that_left": tally.left,
            "lost": tally.lost,
            "wrong": tally.wrong,
            "left_behind": left_behind(count),
            "memory": memory.figures(),
            "first_faults": tally.told,
        }


def main() -> int:
    """Print the figures; returns 1 for any fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("router", "engine"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--requests", type=int, help="In all, at an even rate. Default: as many as are answered.")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--json", metavar="PATH", help="write the figures with machine, commit and command")
    arguments = parser.parse_args()
    raise_open_files()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        figures = soak(arguments, Path(folder))
    print(json.dumps(figures, indent=2))
    if arguments.json:
        write_report(arguments.json, f"soak {arguments.what}", figures)
    return int(bool(figures["lost"] or figures["wrong"] or figures["left_behind"]))


if __name__ == "__main__":
    sys.exit(main())
