"""How soon an engine notices that its peer is gone in the middle of transfers, and has the blocks back.

Real engines of builtin://tiny, the prefill engine in a network namespace of its own (as root, on Linux), long prompts
under way. Seconds from the fault, as an engine's metrics tell, which are up to 0.3 s late; the worst of all turns.

python bench/kv_faults.py --json bench/results/kv_faults.json
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.report import write_report
from tests.fakes.kv_namespaces import ADDRESS, Partitioned, long_prompt, partitioned_pair
from tests.fakes.kv_serving import Asked, Questions, ServedEngine, until

AT_ONCE = 2


@dataclass(slots=True)
class Measured:
    """Seconds by what they are."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def note(self, side: str, began: float, noticed: Awaitable[object], engine: ServedEngine) -> None:
        """Wait until one side has noticed, then until it has its blocks back."""
        await noticed
        self.seconds[f"{side}_notices_s"].append(time.monotonic() - began)
        await until(lambda: engine.at_baseline)
        self.seconds[f"{side}_freed_s"].append(time.monotonic() - began)


async def midway(pair: Partitioned, questions: Questions) -> Awaitable[object]:
    """Begin transfers until blocks have come of one; returns the end of decode's requests."""
    while True:  # after a fault it is dialled again after a pause
        received = pair.decode.figure("received_blocks_total")
        first = time.monotonic_ns() % 1_000_000
        asked = [
            questions.complete(pair.prefill, pair.decode, ADDRESS, long_prompt(first + number), "fail")
            for number in range(AT_ONCE)
        ]
        ended = asyncio.create_task(leave_with_decode(asked))
        while not ended.done():
            if pair.decode.figure("received_blocks_total") > received:
                return ended
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)


async def leave_with_decode(asked: Sequence[Asked]) -> None:
    """As a router does: once decode has failed, nobody waits for the prompt any more."""
    await asyncio.gather(*(one.decode for one in asked), return_exceptions=True)
    for one in asked:
        one.drop()


async def fault(pair: Partitioned, measured: Measured, name: str, do: Callable[[], None], sides: Sequence[str]) -> None:
    """Do something in the middle of transfers and note what follows on each side that is left."""
    async with httpx.AsyncClient(timeout=120) as http:
        questions = Questions(http, pair.key)
        ended = await midway(pair, questions)
        failures = pair.prefill.figure("failures_total")
        do()
        began, waits = time.monotonic(), []
        if "decode" in sides:
            waits.append(measured.note(f"{name}_decode", began, ended, pair.decode))
        if "prefill" in sides:
            noticed = until(lambda: pair.prefill.figure("failures_total") > failures)
            waits.append(measured.note(f"{name}_prefill", began, noticed, pair.prefill))
        await asyncio.gather(*waits)
        await questions.ended()


async def turn(measured: Measured) -> None:
    """Every fault once."""
    with tempfile.TemporaryDirectory() as folder, partitioned_pair(Path(folder)) as pair:
        await fault(pair, measured, "partition", pair.cut, ("decode", "prefill"))
        pair.cut(False)
        await fault(pair, measured, "prefill_frozen", pair.prefill.freeze, ("decode",))
        pair.prefill.freeze(False)
        await fault(pair, measured, "decode_killed", pair.decode.kill, ("prefill",))
    with tempfile.TemporaryDirectory() as folder, partitioned_pair(Path(folder)) as pair:
        await fault(pair, measured, "prefill_killed", pair.prefill.kill, ("decode",))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measured = Measured()
    for _ in range(arguments.turns):
        asyncio.run(turn(measured))
    figures = {name: round(max(seconds), 2) for name, seconds in sorted(measured.seconds.items())}
    for name, seconds in figures.items():
        print(f"{name:34} {seconds:6.2f}")
    if arguments.json:
        write_report(arguments.json, "kv_faults", {"turns": arguments.turns, **figures})


if __name__ == "__main__":
    main()
