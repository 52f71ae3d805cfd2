"""Time to the first token of a long prompt whose K/V the pool has given up: brought back from host memory, from disk,
and computed again, in turns. Each round's prompts are new and take the place of those of the round before.

python bench/offload.py --json bench/results/offload.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.bench.shapes import named_shapes, write_shape

from bench.report import write_report

BLOCK_SIZE = 16
METRIC = "pagefleet_engine_kv_transfer_offload"
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
SETTLE_S = 60.0


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
        return self._llm._core.executor.cache.bytes_per_block

    def settle(self) -> None:
        """Let what is being saved end, so that no round pays for the one before."""
        deadline = time.monotonic() + SETTLE_S
        before: Mapping[str, float] = {}
        while time.monotonic() < deadline:
            self._llm._core.settle()
            time.sleep(1.1)  # figures are as old as a second
            now = self._llm.stats().kv_transfer
            if now == before:
                return
            before = now

    def close(self) -> None:
        """Free the model."""
        self._llm.shutdown()


def random_prompt(rng: random.Random, input_len: int, vocab_size: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    return [rng.randrange(3, vocab_size) for _ in range(input_len)]


def measure(model: str, vocab_size: int, input_len: int, rounds: int) -> dict[str, Any]:
    """Run the rounds; returns the figures."""
    rng = random.Random(0)
    seconds: dict[str, list[float]] = {"without_connector": [], "computed": [], "from_memory": [], "from_disk": []}
    shares: dict[str, list[float]] = {"from_memory": [], "from_disk": []}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pagefleet-offload-"))
        plain = Subject(model, input_len, {})
        stack.callback(plain.close)
        prompt_bytes = plain.block_bytes() * (input_len // BLOCK_SIZE)
        memory = Subject(model, input_len, {"kv_connector": "offload", "kv_offload_memory": 3 * prompt_bytes})
        stack.callback(memory.close)
        on_disk = {"kv_connector": "offload", "kv_offload_memory": prompt_bytes, "kv_offload_dir": folder}
        disk = Subject(model, input_len, {**on_disk, "kv_offload_disk": 8 * prompt_bytes})
        stack.callback(disk.close)
        before = random_prompt(rng, input_len, vocab_size)
        for subject in (plain, memory, disk):  # the first prompt of each warms it up
            subject.ask(before)
        for _ in range(rounds):
            prompt = random_prompt(rng, input_len, vocab_size)
            for name, subject in (("without_connector", plain), ("computed", memory), ("computed on disk", disk)):
                timing = subject.ask(prompt)
                assert timing.num_cached == 0, "the prompt was to be new"
                subject.settle()
                if name in seconds:
                    seconds[name].append(timing.seconds)
            for name, subject in (("from_memory", memory), ("from_disk", disk)):
                timing = subject.ask(before)
                seconds[name].append(timing.seconds)
                shares[name].append(timing.num_cached / input_len)
                subject.settle()
            before = prompt
    least = {f"least_share_{name}": min(values) for name, values in shares.items()}
    return {**describe(seconds), **least, "prompt_kv_mb": prompt_bytes / 1e6}


def describe(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, rounds, and each way as a share of computing in the same round."""
    figures: dict[str, Any] = {f"{name}_s": list(values) for name, values in seconds.items()}
    figures |= {f"median_{name}_s": statistics.median(values) for name, values in seconds.items()}
    for name in ("from_memory", "from_disk", "computed"):
        pairs = zip(seconds[name], seconds["without_connector"], strict=True)
        figures[f"{name}_over_without_connector"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=named_shapes(), default="llama-125m")
    parser.add_argument("--input-len", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
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
