"""Time to the first token of a long prompt whose K/V the pool has given up: brought back from host memory, from disk,
and computed again, in turns. Each round's prompt is new and takes the place of that of the round before.

python bench/offload.py --json bench/results/offload.json

Two rounds compute eight prompts, which take 6 to 15 s each on two cores; what is done is told as it is done.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.bench.shapes import named_shapes, write_shape
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_kv.offload.connector import OffloadConnector

from bench.report import write_report

BLOCK_SIZE = 16
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
SETTLE_S = 60.0
WARM_UP_LEN = 256


@dataclass(frozen=True, slots=True)
class Timing:
    """One prompt, one token."""

    seconds: float
    num_cached: int
    """Tokens that were not computed."""


class Subject:
    """An engine with room for one prompt and a little; the next prompt pushes it out."""

    def __init__(self, model: str, input_len: int, options: Mapping[str, Any]) -> None:
        self._llm = LLM(
            model,
            skip_tokenizer_init=True,
            load_format="dummy",
            block_size=BLOCK_SIZE,
            num_kv_blocks=input_len // BLOCK_SIZE + 2,
            max_model_len=input_len + BLOCK_SIZE,
            **options,
        )

    def ask(self, prompt: Sequence[int]) -> Timing:
        """Time from the request to its first token."""
        started = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], ONE_TOKEN, use_tqdm=False)
        return Timing(time.perf_counter() - started, output.num_cached_tokens or 0)

    def block_bytes(self) -> int:
        """Of one block of K/V in memory."""
        return self._core().executor.cache.bytes_per_block

    def _core(self) -> EngineCore:
        core = self._llm.llm_engine._core
        assert isinstance(core, EngineCore)
        return core

    def settle(self) -> None:
        """Let what is being saved end, so that no round pays for the one before."""
        core = self._core()
        connector = core._scheduler.connector
        deadline = time.monotonic() + SETTLE_S
        while isinstance(connector, OffloadConnector) and connector.num_moves:
            if time.monotonic() > deadline:
                raise SystemExit(f"K/V is still being moved after {SETTLE_S:.0f} s: is the disk full, or very slow?")
            select.select([connector.bell], [], [], 1.0)
            core.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the model."""
        self._llm.shutdown()


def random_prompt(rng: random.Random, input_len: int, vocab_size: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    return [rng.randrange(3, vocab_size) for _ in range(input_len)]


class Round:
    """What the ways took, in the order in which they were taken; told as they come."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.shares: dict[str, list[float]] = {}
        self._started = time.monotonic()

    def note(self, way: str, timing: Timing, input_len: int) -> None:
        """Take in one prompt."""
        self.seconds.setdefault(way, []).append(timing.seconds)
        self.shares.setdefault(way, []).append(timing.num_cached / input_len)
        share = f"{timing.num_cached} of {input_len} tokens cached"
        self.say(f"{way}: {timing.seconds:.2f} s, {share}")

    def say(self, what: str) -> None:
        """Tell how far it is."""
        print(f"[{time.monotonic() - self._started:5.0f} s] {what}", file=sys.stderr, flush=True)


def measure(model: str, vocab_size: int, input_len: int, rounds: int) -> dict[str, Any]:
    """Run the rounds; returns the figures."""
    rng = random.Random(0)
    times = Round()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pagefleet-offload-"))
        plain = stack.enter_context(Subject(model, input_len, {}))
        prompt_bytes = plain.block_bytes() * (input_len // BLOCK_SIZE)
        in_memory = {"kv_connector": "offload", "kv_offload_memory": 3 * prompt_bytes}
        memory = stack.enter_context(Subject(model, input_len, in_memory))
        on_disk = {"kv_connector": "offload", "kv_offload_memory": prompt_bytes, "kv_offload_dir": folder}
        disk = stack.enter_context(Subject(model, input_len, {**on_disk, "kv_offload_disk": 8 * prompt_bytes}))
        for subject in (plain, memory, disk):
            subject.ask(random_prompt(rng, WARM_UP_LEN, vocab_size))
        times.say("warm")
        before = random_prompt(rng, input_len, vocab_size)
        for subject in (memory, disk):
            subject.ask(before)
            subject.settle()
            times.say("first prompt saved")
        for _ in range(rounds):
            prompt = random_prompt(rng, input_len, vocab_size)
            for way, subject in (("without_connector", plain), ("computed", memory), ("computed_disk", disk)):
                times.note(way, subject.ask(prompt), input_len)
                subject.settle()
            for way, subject in (("from_memory", memory), ("from_disk", disk)):
                times.note(way, subject.ask(before), input_len)
                subject.settle()
            before = prompt
    least = {f"least_share_{way}": min(times.shares[way]) for way in ("from_memory", "from_disk")}
    return {**describe(times.seconds), **least, "prompt_kv_mb": prompt_bytes / 1e6}


def describe(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, rounds, and each way as a share of computing in the same round."""
    figures: dict[str, Any] = {f"{name}_s": list(values) for name, values in seconds.items()}
    figures |= {f"median_{name}_s": statistics.median(values) for name, values in seconds.items()}
    for name in ("from_memory", "from_disk", "computed", "computed_disk"):
        pairs = zip(seconds[name], seconds["without_connector"], strict=True)
        figures[f"{name}_over_without_connector"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=named_shapes(), default="llama-125m")
    parser.add_argument("--input-len", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagefleet-shape-") as folder:
        model = write_shape(arguments.shape, Path(folder))
        shape = {**named_shapes()[arguments.shape], "max_position_embeddings": arguments.input_len + BLOCK_SIZE}
        (model / "config.json").write_text(json.dumps(shape))
        vocab_size = int(named_shapes()[arguments.shape]["vocab_size"])
        figures = measure(str(model), vocab_size, arguments.input_len, arguments.rounds)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("shape", "input_len", "rounds")}
        write_report(arguments.json, "offload", {"settings": settings, **figures})


if __name__ == "__main__":
    main()
