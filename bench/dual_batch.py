"""What two halves of a step gain (`--enable-dbo`): prompts through two data ranks that share experts, with it and
without in turns, over links of several speeds. Of the fastest rounds, which other work disturbed least: how much of the
messages' time is hidden.

    python bench/dual_batch.py --output bench/results/dual_batch.json
    python bench/dual_batch.py --played --output bench/results/dual_batch.json

Ranks have a core each and meet in memory; a link is played: a rank waits for what it is sent as long as so many bytes
take, one message after another, and uses no processor meanwhile.

That wants an idle machine. With `--played` computing is played, too: the engine's own turns, in a step whose layers and
messages take as long as they are told to. It says how much of the messages' time they hide, and what that is worth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.engine_core.process import main as core_main
from pagefleet_engine.ranks.copies import CopyGroups
from pagefleet_engine.ranks.group import RankGroup, Reduction
from pagefleet_engine.ranks.shared_handles import SharedHandles
from pagefleet_engine.ranks.turns import Turns
from pagefleet_engine.settings import engine_config
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_text.tokenizer import Tokenizer
from torch import Tensor

from bench.report import write_report
from tests.fakes.small_tokenizers import byte_level_backend

GIGABITS = (0.0, 1.0, 0.25)
"""Of a link, per second; 0: nothing is played."""
LAYERS, LAYER_S, READING = 8, 0.02, 0.1
"""Of a step that is played. Experts take half of a layer's time, and reading their weights, which each half does, so
much of that."""
MESSAGES = (0.1, 0.25, 0.5, 1.0, 2.0)
RANKS, PROMPTS, LENGTH = 2, 1, 512
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 512,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}


def on_link_s(gigabits: float) -> float:
    """At least so long whole steps wait for messages: rows of the others, and sums of their own, in each layer."""
    num_bytes: int = 2 * SHAPE["num_hidden_layers"] * (RANKS - 1) * PROMPTS * LENGTH * SHAPE["hidden_size"] * 4
    return round(num_bytes * 8 / (gigabits * 1e9), 3) if gigabits else 0.0


def play(message_s: float, *, halves: bool) -> tuple[float, float, float]:
    """Seconds of a step of one rank: in all, and as they came of computing and of messages."""
    turns, link = Turns(), threading.Lock()
    computed, carried = list[float](), list[float]()

    def last(seconds: float, into: list[float]) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        into.append(time.perf_counter() - began)

    def compute(share: float) -> None:
        for _ in range(LAYERS):
            for seconds in (LAYER_S / 2 * share, LAYER_S / 2 * (READING + (1 - READING) * share)):
                last(seconds, computed)
                with turns.away(), link:
                    last(message_s * share, carried)

    began = time.perf_counter()
    if halves:
        turns.take(partial(compute, 0.5), partial(compute, 0.5))
    else:
        compute(1.0)
    return time.perf_counter() - began, sum(computed), sum(carried)


def play_all(rounds: int) -> dict[str, Any]:
    """By how long a layer's two messages take beside its computing: medians of rounds in turns."""
    found: dict[str, Any] = {"layers": LAYERS, "layer_s": LAYER_S, "of_experts_reading_weights_ratio": READING}
    for ratio in MESSAGES:
        message_s = ratio * LAYER_S / 2
        pairs = [(play(message_s, halves=False), play(message_s, halves=True)) for _ in range(rounds)]
        found[f"messages_{ratio:g}_of_computing"] = {
            "whole_s": round(statistics.median(whole for (whole, *_), _ in pairs), 4),
            "halves_s": round(statistics.median(halved for _, (halved, *_) in pairs), 4),
            "speed_of_halves_ratio": round(statistics.median(whole / halved for (whole, *_), (halved, *_) in pairs), 3),
            "hidden_of_messages_ratio": round(
                statistics.median(1 - (took - computed) / carried for _, (took, computed, carried) in pairs), 3
            ),
        }
        print(ratio, found[f"messages_{ratio:g}_of_computing"], flush=True)
    return found


class Link:
    """Between a rank and the others; both halves of a step use it."""

    def __init__(self, gigabits: float) -> None:
        self._bytes_per_s = gigabits * 1e9 / 8
        self._busy = threading.Lock()

    def carry(self, num_bytes: float) -> None:
        """Wait as long as the last of so many bytes takes to come."""
        with self._busy:
            time.sleep(num_bytes / self._bytes_per_s)


class Linked:
    """Implements `RankGroup` over a link; what tells sizes takes none."""

    def __init__(self, group: RankGroup, link: Link) -> None:
        self.size, self.index = group.size, group.index
        self._group, self._link = group, link
        self._others = (group.size - 1) / group.size

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        return self._group.all_reduce(x, reduction)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return self._group.all_gather(x, widths)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        found = self._group.reduce_scatter(x)
        self._link.carry(x.nbytes * self._others)
        return found

    def gather_rows(self, x: Tensor) -> Tensor:
        found = self._group.gather_rows(x)
        self._link.carry(found.nbytes * self._others)
        return found

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        found = self._group.all_to_all(x, rows)
        self._link.carry(found.nbytes * self._others)
        return found

    def barrier(self) -> None:
        self._group.barrier()


def core() -> None:
    """Run a core whose data ranks meet over a link, at the command's end."""
    link, join = Link(float(sys.argv[2])), CopyGroups._join

    def linked(self: CopyGroups, name: str, handles: SharedHandles | None, index: int, each: int = 1) -> RankGroup:
        return Linked(join(self, name, handles, index, each), link)

    CopyGroups._join = linked  # type: ignore[method-assign]
    sys.exit(core_main())


def command(gigabits: float) -> tuple[str, ...]:
    """Of such a core."""
    kind = "core_main" if not gigabits else "core"
    program = f"import sys; sys.path.insert(0, sys.argv[1]); from bench import dual_batch; dual_batch.{kind}()"
    return (sys.executable, "-c", program, str(ROOT), str(gigabits))


async def start(model: str, gigabits: float, *, halves: bool) -> AsyncEngineClient:
    """Two ranks with a core each."""
    settings: dict[str, object] = {"model": model, "device": "cpu", "dtype": "float32", "load_format": "dummy"}
    settings |= {"num_threads": RANKS, "num_kv_blocks": 1024, "enable_prefix_caching": False}
    settings |= {"data_parallel_size": RANKS, "enable_expert_parallel": True, "enable_dbo": halves}
    config = engine_config({**settings, "max_num_batched_tokens": LENGTH})
    return await AsyncEngineClient.start(config, Tokenizer(byte_level_backend(), {}), None, command(gigabits))


async def seconds(client: AsyncEngineClient, dice: random.Random) -> float:
    """That prompts take, as many on each rank, until all have their token."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    async def ask(number: int) -> None:
        prompt = [dice.randrange(3, 250) for _ in range(LENGTH)]
        async for _ in client.generate(Generation(f"r{number}-{dice.random()}", [prompt], sampling)):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(ask(number) for number in range(RANKS * PROMPTS)))
    return time.perf_counter() - began


async def compare(model: str, gigabits: float, rounds: int) -> dict[str, object]:
    """Whole steps and halves in turns."""
    ways = {"whole": await start(model, gigabits, halves=False), "halves": await start(model, gigabits, halves=True)}
    took: dict[str, list[float]] = {way: [] for way in ways}
    dice = random.Random(0)
    for turn in range(rounds + 1):  # the first warms up
        for way, client in ways.items():
            one = await seconds(client, dice)
            took[way] += [round(one, 3)] if turn else []
    for client in ways.values():
        await client.close()
    speed = statistics.median(one / other for one, other in zip(took["whole"], took["halves"], strict=True))
    found: dict[str, object] = {"speed_of_halves_ratio": round(speed, 3)}
    fastest = {way: min(each) for way, each in took.items()}
    found["fastest_ratio"] = round(fastest["whole"] / fastest["halves"], 3)
    if gigabits:
        found["hidden_of_link_ratio"] = round((fastest["whole"] - fastest["halves"]) / on_link_s(gigabits), 2)
    return found | {f"{way}_s": each for way, each in took.items()}


def measure_all(rounds: int) -> dict[str, Any]:
    """Of links of each speed."""
    found: dict[str, Any] = {"shape": SHAPE}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        for gigabits in GIGABITS:
            name = f"link_{gigabits:g}_gbit" if gigabits else "no_link"
            found[name] = {"on_link_s": on_link_s(gigabits)}
            found[name] |= asyncio.run(compare(folder, gigabits, rounds))
            print(name, found[name], flush=True)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--played", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}
    found |= play_all(arguments.rounds) if arguments.played else measure_all(arguments.rounds)
    if arguments.output:
        write_report(arguments.output, "dual_batch", found)


if __name__ == "__main__":
    main()
