"""What a round of polls costs the router's event loop: `python bench/router_polls.py --engines 1000`.

Each engine's answers are taken as the monitor takes them, once per second of a made clock, while somebody looks at the
snapshot after every poll, as a request's choice does. Told: the sum of a round, and the longest piece between two
turns of the loop. The first round is told apart: there each engine becomes ready. Reading the metrics' text has a line
of its own.

Then `Monitor` itself asks fakes in another process over loopback sockets, every second. Times are the thread's own, the
kernel's for it included, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_router.admission.gate import Gate, GateLimits
from pagefleet_router.admission.room import FleetRooms
from pagefleet_router.engines.endpoints import EndpointTable
from pagefleet_router.signals.figures import EngineFigures, parse_figures
from pagefleet_router.signals.monitor import Monitor

from bench.report import write_report

TICKS = 4
"""Looks of the gate at its rooms in a second, as in the router."""


class Fleet:
    """A table with a gate that follows it, on a clock of its own."""

    def __init__(self, num_engines: int) -> None:
        self.now = 0.0
        self.table = EndpointTable(clock=lambda: self.now)
        rooms = FleetRooms(lambda: self.table.snapshot)
        limits = GateLimits(1024, 60.0, 0.0, 2**28)
        self.gate = Gate(rooms, limits, lambda name: None, lambda: self.now, lambda: 0.5)
        self.ids = [f"e{number}" for number in range(num_engines)]
        self.facts = EngineFacts(
            incarnation="0" * 32, model="m", scope="s", block_size=16, num_blocks=10_000, max_model_len=4096,
            max_num_seqs=64, max_num_batched_tokens=2048, vocab_size=1000,
        )  # fmt: skip
        self.table.watch(self.gate.engines_changed)
        urls = (f"http://10.0.{number // 256}.{number % 256}:8000" for number in range(num_engines))
        self.table.replace([Endpoint(name, url, "m") for name, url in zip(self.ids, urls, strict=True)])
        first = [_timed(lambda name=name: self.poll(name, EngineFigures(0.0, 0.0, 0.0, 0.0))) for name in self.ids]  # type: ignore[misc]
        self.first_s = sum(first)
        """Of the round in which each engine becomes ready."""
        self.gate._new_gate("m")

    def poll(self, engine_id: str, figures: EngineFigures) -> None:
        """Take one engine's answers as `Monitor` does."""
        table = self.table
        table.set_facts(engine_id, self.facts)
        table.set_ready(engine_id, True)
        engine = table.engine(engine_id)
        assert engine is not None
        engine.rates.refresh(self.now)
        table.set_load(
            engine_id, figures.num_running, figures.num_waiting, figures.kv_usage, figures.num_generated,
            figures.transfer,
        )  # fmt: skip
        assert len(table.snapshot.usable["m"]) > 0

    def round(self, number: int) -> tuple[float, float]:
        """Poll every engine once; returns seconds of the whole and of its longest piece."""
        pieces = []
        step = max(1, len(self.ids) // TICKS)
        for place, name in enumerate(self.ids):
            self.now = number + place / len(self.ids)
            busy = float((number + place) % 7)
            figures = EngineFigures(busy, busy / 2, busy / 10, 100.0 * number * (1 + busy))
            pieces.append(_timed(lambda name=name, figures=figures: self.poll(name, figures)))  # type: ignore[misc]
            if place % step == 0:
                pieces.append(_timed(lambda: self.gate.check(self.now)))
        return sum(pieces), max(pieces)


def _timed(work: Callable[[], object]) -> float:
    start = time.thread_time()  # another process's turn is no piece of ours
    work()
    return time.thread_time() - start


def metrics_text() -> bytes:
    """Return a text as engines have: the figures among a few hundred lines."""
    other = "".join(f'pagefleet_engine_other_{i}_bucket{{le="{i}",model_name="m"}} {i}.0\n' for i in range(250))
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "generation_tokens_total")
    return (other + "".join(f'pagefleet_engine_{name}{{model_name="m"}} 0.5\n' for name in names)).encode()


@dataclass(frozen=True)
class Probing:
    """What asking engines over sockets cost the thread."""

    seconds_per_second: float
    seconds_per_poll: float
    """Of one engine: its readiness and its metrics."""


async def probe(urls: Sequence[str], seconds: float) -> Probing:
    """Let the router's monitor ask engines for a while, once all of them are ready."""
    table = EndpointTable()
    polls: Counter[str] = Counter()
    monitor = Monitor(table, lambda engine_id: polls.update((engine_id,)))
    table.replace([Endpoint(f"e{number}", url, "m") for number, url in enumerate(urls)])
    while len(table.snapshot.usable["m"]) < len(urls):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)
    gc.freeze()
    polls.clear()
    started, used = time.monotonic(), time.thread_time()
    await asyncio.sleep(seconds)
    used, passed = time.thread_time() - used, time.monotonic() - started
    await monitor.stop()
    return Probing(used / passed, used / polls.total())


def probe_fakes(num_engines: int, seconds: float) -> Probing:
    """Measure `probe` on fakes in a process of their own."""
    command = [sys.executable, str(Path(__file__).with_name("fake_engine.py")), "--engines", str(num_engines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as fakes:
        try:
            assert fakes.stdout is not None
            ports = fakes.stdout.readline().split()[1:]
            probing: Probing = uvloop.run(probe([f"http://127.0.0.1:{port}" for port in ports], seconds))
        finally:
            fakes.kill()
    return probing


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sockets", type=int, default=200, help="fakes that are asked over sockets")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which they are asked")
    parser.add_argument("--out", type=Path, default=Path("bench/results/router_polls.json"))
    given = parser.parse_args(arguments)
    fleet = Fleet(given.engines)
    fleet.round(1)
    gc.freeze()  # as the router does
    rounds = [fleet.round(number) for number in range(2, given.rounds + 2)]
    text = metrics_text()
    parsing = statistics.median(_timed(lambda: parse_figures(text)) for _ in range(200))
    probing = probe_fakes(given.sockets, given.seconds)
    figures = {
        "engines": given.engines,
        "rounds": given.rounds,
        "first_round_ms": round(1e3 * fleet.first_s, 1),
        "round_ms_p50": round(1e3 * statistics.median(whole for whole, _ in rounds), 2),
        "longest_piece_ms_p50": round(1e3 * statistics.median(piece for _, piece in rounds), 3),
        "longest_piece_ms": round(1e3 * max(piece for _, piece in rounds), 3),
        "reading_one_metrics_text_us": round(1e6 * parsing, 1),
        "engines_over_sockets": given.sockets,
        "probing_thread_ms_per_s": round(1e3 * probing.seconds_per_second, 1),
        "probing_thread_us_per_poll": round(1e6 * probing.seconds_per_poll, 1),
    }
    print(figures)
    write_report(given.out, "router_polls", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
