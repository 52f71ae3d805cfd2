"""Records the steps of data ranks that share experts and compute large steps in halves: what rows each had.

    python bench/record_steps.py tests/engine/core/recorded_steps.json

Requests of random lengths come at random times, so that ranks have prompts, decode, and have nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypedDict

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.core.step import StepPlan
from pagefleet_engine.engine_core.process import main as core_main
from pagefleet_engine.executor.executor import PendingStep
from pagefleet_engine.executor.in_process import InProcessExecutor
from pagefleet_engine.executor.processes import ProcessExecutor
from pagefleet_engine.settings import engine_config
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.small_tokenizers import byte_level_backend

RANKS, REQUESTS = 2, 60
SETTINGS = {"dbo_decode_token_threshold": 4, "dbo_prefill_token_threshold": 48}


def recording(folder: Path) -> tuple[str, ...]:
    """The command of a core that records its steps into a file of its own there, a line each."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); from bench import record_steps; record_steps.core()"
    return (sys.executable, "-c", program, str(ROOT), str(folder))


def core() -> None:
    """Run a core that records, at the command's end."""
    file = (Path(sys.argv[2]) / f"{os.getpid()}.jsonl").open("w", buffering=1)
    for executor in (InProcessExecutor, ProcessExecutor):
        executor.launch = _recorded(executor.launch, file)  # type: ignore[method-assign]
    sys.exit(core_main())


def _recorded(launch: Callable[..., PendingStep], file: TextIO) -> Callable[..., PendingStep]:
    def recorded_launch(self: object, plan: StepPlan) -> PendingStep:
        file.write(json.dumps([plan.rows.new.tolist(), plan.in_halves]) + "\n")
        return launch(self, plan)

    return recorded_launch


class Step(TypedDict):
    """Of all ranks."""

    in_halves: bool
    new: list[list[int]]
    """Per rank and row: tokens that it computes."""


def recorded(folder: Path) -> list[Step]:
    """The steps of all ranks. The last one may be in the files of some alone."""
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("*.jsonl"))]
    steps: list[Step] = []
    for of_ranks in zip(*ranks, strict=False):
        (in_halves,) = {in_halves for _, in_halves in of_ranks}
        steps.append(Step(in_halves=in_halves, new=[new for new, _ in of_ranks]))
    return steps


async def ask(client: AsyncEngineClient, number: int, dice: random.Random) -> None:
    """Wait a while, and answer a request."""
    length, max_tokens, delay = dice.choice((3, 20, 90, 200)), dice.randint(2, 40), 8 * dice.random()
    prompt = [dice.randrange(3, 250) for _ in range(length)]
    await asyncio.sleep(delay)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    async for _ in client.generate(Generation(f"r{number}", [prompt], sampling)):
        pass


async def run(model: str, folder: Path) -> None:
    """Serve all requests."""
    given = {"model": model, "device": "cpu", "num_kv_blocks": 512, "num_threads": 1, "max_num_batched_tokens": 128}
    ranks = {"data_parallel_size": RANKS, "enable_expert_parallel": True, "enable_dbo": True}
    config = engine_config({**given, **ranks, "max_num_seqs": 32, **SETTINGS})
    client = await AsyncEngineClient.start(config, Tokenizer(byte_level_backend(), {}), None, recording(folder))
    dice = random.Random(0)
    await asyncio.gather(*(ask(client, number, dice) for number in range(REQUESTS)))
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", required=True, help="Folder of a mixture of experts; a small one will do.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(args.model, Path(folder)))
        steps = recorded(Path(folder))
    lines = ",\n".join(json.dumps(step) for step in steps)
    args.output.write_text(f'{json.dumps(SETTINGS)[:-1]}, "steps": [\n{lines}\n]}}\n')
    print(f"{len(steps)} steps, {sum(step['in_halves'] for step in steps)} in halves")


if __name__ == "__main__":
    main()
