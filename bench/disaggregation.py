"""How much of a K/V transfer shows in the time to the first token: one prefill, one decode engine, one request.

A prompt's blocks travel while the rest of it is computed (put_async), all at its end (put), or when the decode engine
fetches them then (get). Each round asks the same prompt in all three ways, and of an engine that computes whole
requests on the core of the prefill engines; answers have to be equal. `disaggregation_sweep.py` measures load.
With `--ranks` the three ways are put_async from one tensor rank to one, from two to one, and from one to two.

python bench/disaggregation.py --json bench/results/disaggregation.json
python bench/disaggregation.py --ranks --json bench/results/disaggregation_ranks.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagefleet_engine.bench.load_client import Answer, Asked, complete, completed, new_session
from pagefleet_engine.bench.workloads import FIRST_TOKEN
from pagefleet_protocol.fleet_key import read_fleet_key
from pagefleet_protocol.kv_handoff import KV_TRANSFER, KvTransfer

from bench.disaggregation_fleet import MODEL, VOCAB_SIZE, EngineLimits, EngineSpec, Fleet, Ports, Process, write_model
from bench.report import write_report

BLOCK_SIZE = 16
WARM_UP_TURNS = 2
"""Not counted: until a process has the memory that it works in, its prompts take up to half as long again."""
SEND_TYPES = ("put_async", "put", "get")
DECODE, WHOLE = "decode", "whole"
TWO_PREFILL, TWO_DECODE = "prefill-2", "decode-2"
PREFIX = "pagefleet_engine_kv_transfer"
LOADED, RECEIVED = f"{PREFIX}_seconds_count", f"{PREFIX}_received_bytes_total"
EXPOSED, HIDDEN = f"{PREFIX}_exposed_seconds_total", f"{PREFIX}_hidden_seconds_total"
FIRST_TOKENS = "pagefleet_engine_time_to_first_token_seconds"
FIGURES_S = 30.0
"""How long an engine's figures may take to say what it has done."""


@dataclass(frozen=True, slots=True)
class Way:
    """Which engine computes a prompt for which."""

    name: str
    source: str
    target: str = DECODE


SENDS = tuple(Way(name, name) for name in SEND_TYPES)
RANKS = (Way("1_to_1", SEND_TYPES[0]), Way("2_to_1", TWO_PREFILL), Way("1_to_2", SEND_TYPES[0], TWO_DECODE))


@dataclass(frozen=True, slots=True)
class Passed:
    """One prompt that one engine computed for another; seconds."""

    ttft_s: float
    """At the client, of the decode leg; both legs are sent at once."""
    prefill_s: float
    """From the prefill leg's arrival to its end, as the prefill engine has it: with put, when all blocks have come."""
    exposed_s: float
    """From the end of the prefill engine's last step until the decode engine has all blocks, as that one has it."""
    hidden_s: float
    """From the first frame to the end of the last step."""
    received_mb: float

    def figures(self) -> dict[str, float]:
        """Return all, and what they come to."""
        return {
            "ttft_s": self.ttft_s,
            "prefill_s": self.prefill_s,
            "exposed_s": self.exposed_s,
            "hidden_s": self.hidden_s,
            "received_mb": self.received_mb,
            "exposed_share": self.exposed_s / self.ttft_s,
            "after_prefill_share": (self.ttft_s - self.prefill_s) / self.ttft_s,
        }


def specs(ways: Sequence[Way]) -> list[EngineSpec]:
    """Return the engines of these ways, and one for whole requests. Idle ones cost nothing."""
    found = [EngineSpec(WHOLE, 0)]
    for source in dict.fromkeys(way.source for way in ways):
        is_two = source == TWO_PREFILL
        found.append(EngineSpec(source, 0, "prefill", SEND_TYPES[0] if is_two else source, 1 + is_two))
    for target in dict.fromkeys(way.target for way in ways):
        is_two = target == TWO_DECODE
        found.append(EngineSpec(target, 1 - is_two, "decode", ranks=1 + is_two))
    return found


async def pass_on(fleet: Fleet, way: Way, asked: Asked) -> tuple[Passed, Answer]:
    """Ask both legs as a router does, and read what the engines say of them."""
    prefill, decode = fleet.engines[way.source], fleet.engines[way.target]
    before, first_tokens = decode.metrics(), prefill.metrics()
    ours, theirs = headers_of(fleet, way)
    body = asked.body(MODEL)
    async with new_session() as web:
        leg = asyncio.create_task(_prefill_leg(web, prefill.url, body, ours))
        answer = completed(await complete(web, f"{decode.url}/v1", asked, body, theirs))
        await leg
    after = await _grown(decode, LOADED, before)
    computed = await _grown(prefill, f"{FIRST_TOKENS}_count", first_tokens)
    grown = {name: after[name] - before.get(name, 0.0) for name in (EXPOSED, HIDDEN, RECEIVED)}
    prefill_s = computed[f"{FIRST_TOKENS}_sum"] - first_tokens.get(f"{FIRST_TOKENS}_sum", 0.0)
    passed = Passed(answer.timing.ttft, prefill_s, grown[EXPOSED], grown[HIDDEN], grown[RECEIVED] / 1e6)
    return passed, answer


def headers_of(fleet: Fleet, way: Way) -> tuple[dict[str, str], dict[str, str]]:
    """Return what tells the two engines of a new transfer."""
    key, number = read_fleet_key(fleet.key_file), secrets.token_hex(16)
    prefill, decode = fleet.facts(way.source), fleet.facts(way.target)
    assert prefill.kv_transfer is not None
    ours = KvTransfer("prefill", number, decode.incarnation)
    theirs = KvTransfer("decode", number, prefill.incarnation, f"127.0.0.1:{prefill.kv_transfer.port}", "fail")
    return (
        {KV_TRANSFER: ours.encode(key, prefill.incarnation)},
        {KV_TRANSFER: theirs.encode(key, decode.incarnation)},
    )


async def _prefill_leg(web: Any, url: str, body: bytes, headers: Mapping[str, str]) -> None:
    async with web.post(f"{url}/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"the prefill leg: HTTP {response.status}: {(await response.text())[:300]}")
        await response.read()


async def _grown(engine: Process, name: str, before: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's figures as soon as they count what happened since."""
    give_up_at = time.monotonic() + FIGURES_S
    while (now := engine.metrics()).get(name, 0.0) <= before.get(name, 0.0):
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"{engine.name}: {name} does not grow: no K/V was passed")
        await asyncio.sleep(0.05)
    return now


async def measure(fleet: Fleet, ways: Sequence[Way], input_len: int, output_len: int, rounds: int) -> dict[str, Any]:
    """Run the rounds; returns the figures."""
    for number in range(rounds, rounds + WARM_UP_TURNS):
        await _turn(fleet, ways, input_len, output_len, seed=number)
    seen: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for name, figures in (await _turn(fleet, ways, input_len, output_len, seed=number)).items():
            seen[name].append(figures)
            print(number, name, {key: round(value, 4) for key, value in figures.items()}, flush=True)
    return {name: described(turns) for name, turns in seen.items()}


async def _turn(
    fleet: Fleet, ways: Sequence[Way], input_len: int, output_len: int, seed: int
) -> dict[str, dict[str, float]]:
    """Ask a new prompt in each way, since the decode engine remembers those that it has seen."""
    generator = random.Random(seed)
    found = {}
    for way in random.Random(seed).sample(ways, len(ways)):
        asked = Asked([generator.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(input_len)], output_len)
        async with new_session() as web:
            whole = completed(await complete(web, f"{fleet.engines[WHOLE].url}/v1", asked, asked.body(MODEL)))
        passed, answer = await pass_on(fleet, way, asked)
        figures = passed.figures()
        figures |= {"whole_ttft_s": whole.timing.ttft, "ttft_over_whole": passed.ttft_s / whole.timing.ttft}
        found[way.name] = figures | {"equal_answers": float(answer.text == whole.text)}
    return found


def described(turns: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return each figure's values and their median."""
    values = {name: [turn[name] for turn in turns] for name in turns[0]}
    medians = {f"median_{name}": statistics.median(seen) for name, seen in values.items() if name != "equal_answers"}
    return {**medians, **values, "equal_answers": sum(values["equal_answers"])}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the engines, measure, end them."""
    length, ways = arguments.input_len + arguments.output_len, RANKS if arguments.ranks else SENDS
    limits = EngineLimits(length + BLOCK_SIZE, arguments.chunk, 2 * length // BLOCK_SIZE + 64)
    with tempfile.TemporaryDirectory(prefix="pagefleet-bench-") as name:
        folder = Path(name)
        with Fleet(folder / "fleet", write_model(folder / "model"), specs(ways), limits, Ports()) as fleet:
            fleet.wait_ready()
            return await measure(fleet, ways, arguments.input_len, arguments.output_len, arguments.rounds)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-len", type=int, default=8192)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens of one step; 2,048 is the default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", action="store_true", help="over tensor ranks instead of three ways of sending")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = asyncio.run(run(arguments))
    print(json.dumps(figures, indent=2))
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("input_len", "output_len", "chunk", "rounds")}
        write_report(arguments.json, "disaggregation", {"settings": settings, **figures})


if __name__ == "__main__":
    main()
