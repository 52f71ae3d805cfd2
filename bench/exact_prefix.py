"""What exact prefix routing costs a router: `python bench/exact_prefix.py`.

Long prompts are read (tokenized and hashed in threads) while a watchdog measures for how long the event loop is held
up; then the choice among engines with full caches is timed, and so is a dump of an engine's whole cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import EngineFacts, TextData, encode_text, text_digest
from pagefleet_protocol.kv_events import Stored
from pagefleet_router.engines.endpoints import EndpointTable
from pagefleet_router.events.subscriber import EventCounts, EventSubscriber
from pagefleet_router.prefix.exact import ExactIndex
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.knowledge import ApproximatePrefixes, PrefixBook
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.policies import make_policy
from pagefleet_router.tokens.prompt_work import CHAT
from pagefleet_router.tokens.tokenized_prompts import TokenizedPrompts

from bench.report import write_report

TINY = Path(__file__).parents[1] / "engine" / "pagefleet_engine" / "builtin" / "tiny"


@dataclass
class Watchdog:
    """Wakes every millisecond and notes how late it is."""

    lateness: list[float] = field(default_factory=list)

    async def run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.lateness.append(now - last - 0.001)
            last = now

    async def begin(self) -> None:
        """Forget what it has seen, what this process did just now included."""
        await asyncio.sleep(0.05)
        self.lateness = []

    async def figures(self) -> dict[str, float]:
        """Return for how long others were held up since `begin`."""
        await asyncio.sleep(0.01)
        seen = sorted(self.lateness)
        return {"loop_held_p99_ms": rounded(seen[int(len(seen) * 0.99)]), "loop_held_longest_ms": rounded(seen[-1])}


def text_of(rng: random.Random, size: int) -> str:
    """Return so many bytes of words from what the tokenizer was trained on."""
    words = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text().split()
    return " ".join(rng.choice(words) for _ in range(size // 4))[:size]


def rounded(seconds: float) -> float:
    """Return milliseconds."""
    return round(seconds * 1e3, 2)


def figures_of(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and maximum."""
    return {"p50_ms": rounded(statistics.median(seconds)), "longest_ms": rounded(max(seconds))}


async def serve_text(encoded: bytes) -> asyncio.Server:
    """Answer everything with the text data."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n" % len(encoded) + encoded)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def load_text() -> bytes:
    """Return the embedded model's text data."""
    settings = json.loads((TINY / "tokenizer_config.json").read_text())
    template = TINY / "chat_template.jinja"
    source = template.read_text() if template.is_file() else settings["chat_template"]
    return encode_text(
        TextData(tokenizer=(TINY / "tokenizer.json").read_text(), settings=settings, chat_template=source)
    )


def fill(table: EndpointTable, url: str, digest: str, num_engines: int, num_blocks: int) -> None:
    """Put engines that publish events into a table."""
    table.replace([Endpoint(f"e{i}", url, "m") for i in range(num_engines)])
    for i in range(num_engines):
        table.set_ready(f"e{i}", True)
        table.set_facts(f"e{i}", EngineFacts(
            incarnation=f"{i:032x}", model="m", scope="m", block_size=16, num_blocks=num_blocks,
            max_model_len=10**7, max_num_seqs=256, max_num_batched_tokens=8192, vocab_size=10**6,
            kv_events_port=1, text_digest=digest,
        ))  # fmt: skip


async def read(prompts: TokenizedPrompts, body: bytes) -> tuple[RequestView, float]:
    """Return a prompt's view and how long its reading took."""
    arrived: asyncio.Future[RequestView] = asyncio.get_running_loop().create_future()
    started = time.perf_counter()
    view = prompts.read(CHAT, body, RequestView("m"), arrived.set_result) or await arrived
    return view, time.perf_counter() - started


async def measure_reading(
    prompts: TokenizedPrompts, watchdog: Watchdog, size: int, count: int
) -> tuple[dict[str, Any], Sequence[RequestView]]:
    """Read prompts that are new, then the same conversations with one more turn."""
    rng = random.Random(size)
    conversations = [[{"role": "user", "content": text_of(rng, size)}] for _ in range(count)]
    figures: dict[str, Any] = {}
    views: list[RequestView] = []
    for name in ("new", "one_turn_more"):
        bodies = [json.dumps({"model": "m", "messages": messages}).encode() for messages in conversations]
        await watchdog.begin()
        results = [await read(prompts, body) for body in bodies]
        views = [view for view, _ in results]
        tokens = round(statistics.mean(view.num_tokens for view in views))
        figures[name] = {"tokens": tokens, **figures_of([took for _, took in results]), **await watchdog.figures()}
        for messages in conversations:
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    return figures, views


def measure_choice(table: EndpointTable, views: Sequence[RequestView], num_blocks: int) -> dict[str, Any]:
    """Time the choice where every engine has a part of every prompt."""
    index = ExactIndex()
    book = PrefixBook(ApproximatePrefixes(PrefixIndex(100_000)), index)
    policy = make_policy("auto", book, time.monotonic, random.Random())
    rng = random.Random(1)
    engines = table.snapshot.usable["m"]
    for number, engine in enumerate(engines):
        index.join(engine.id, num_blocks)
        for view in views:
            index.add(engine.id, view.blocks[: len(view.blocks) * (number + 1) // len(engines)])
        index.add(engine.id, [rng.getrandbits(64) for _ in range(num_blocks - index.num_keys(engine.id))])
        book.set_live(engine.id, True)
    figures: dict[str, Any] = {"blocks_of_a_prompt": len(views[0].blocks), "blocks_in_the_index": len(index)}
    for name, is_cached in (("cached", True), ("not_cached", False)):
        seconds = []
        for view in views:
            blocks = view.blocks if is_cached else [rng.getrandbits(64) for _ in view.blocks]
            request = RequestView("m", blocks=blocks, block_size=16, scope="m", num_tokens=view.num_tokens)
            started = time.thread_time()
            choice = policy.choose(request, engines)
            policy.sent(request, choice.engine)
            seconds.append(time.thread_time() - started)
        figures[name] = figures_of(seconds)
    return figures


async def measure_dump(watchdog: Watchdog, num_keys: int) -> dict[str, Any]:
    """Apply one part of a dump."""
    index = ExactIndex()
    index.join("e", num_keys)
    subscriber = EventSubscriber("e", "0" * 32, index, EventCounts(), lambda name, live: None)
    part = Stored(random.Random(2).randbytes(8 * num_keys))
    await watchdog.begin()
    started = time.perf_counter()
    await subscriber.apply(part)
    return {"keys": num_keys, "took_ms": rounded(time.perf_counter() - started), **await watchdog.figures()}


async def main(arguments: argparse.Namespace) -> None:
    """Measure all."""
    sys.setswitchinterval(0.0005)  # as `pagefleet route` does
    encoded = load_text()
    server = await serve_text(encoded)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    table = EndpointTable()
    prompts = TokenizedPrompts(table)
    fill(table, url, text_digest(encoded), arguments.engines, arguments.blocks)
    short = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x " * 2000}]}).encode()
    while (await read(prompts, short))[0].num_tokens == 0:  # noqa: ASYNC110 - until its text is loaded
        await asyncio.sleep(0.05)
    watchdog = Watchdog()
    task = asyncio.create_task(watchdog.run())
    figures: dict[str, Any] = {"engines": arguments.engines}
    views: Sequence[RequestView] = ()
    for size in arguments.sizes:
        figures[f"prompts_of_{size}_bytes"], views = await measure_reading(prompts, watchdog, size, arguments.count)
    figures["choice_cpu"] = measure_choice(table, views, arguments.blocks)
    figures["dump"] = await measure_dump(watchdog, 65_536)
    print(json.dumps(figures, indent=2))
    if arguments.json:
        write_report(arguments.json, "exact_prefix", figures)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await prompts.stop()
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_048, 10_000, 400_000], help="bytes of a prompt")
    parser.add_argument("--count", type=int, default=10, help="prompts of each size")
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=100_000, help="of each engine")
    parser.add_argument("--json", help="file for the figures")
    uvloop.run(main(parser.parse_args()))
