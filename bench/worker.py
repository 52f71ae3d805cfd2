"""Host time of the worker without a model: inputs of a decoding step, and sampling of each kind.

Ratios are against what torch offers for the same: softmax, exponential noise, argmax (and a full sort for top-p).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows
from pagefleet_engine.worker.request_table import RequestTable
from pagefleet_engine.worker.sampler import Sampler, SampleRows
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepRows
from pagefleet_engine.worker.transfer import make_upload
from pagefleet_protocol.sampling_params import SamplingParams
from torch import Tensor

from bench.report import write_report

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PROMPT_TOKENS = 1_024
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "penalties": SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.1),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "temperature": SamplingParams(seed=1),
    "top_k": SamplingParams(seed=1, top_k=50),
    "top_p": SamplingParams(seed=1, top_p=0.95),
    "top_k_top_p": SamplingParams(seed=1, top_k=50, top_p=0.95),
    "min_p": SamplingParams(seed=1, min_p=0.05),
}


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call, after two to warm up."""
    times = []
    for index in range(repeats + 2):
        start = time.perf_counter()
        run()
        if index >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def time_inputs(num_rows: int, repeats: int) -> float:
    """Milliseconds to apply a decoding plan and to build its inputs."""
    table = RequestTable(num_rows, 2 * PROMPT_TOKENS, BLOCK_SIZE, 1, CPU)
    builder = StepInputBuilder(table, num_rows, num_rows)
    upload = make_upload(CPU, 1)
    blocks = PROMPT_TOKENS // BLOCK_SIZE
    prompt = list(range(PROMPT_TOKENS))
    for row in range(num_rows):
        table.add(NewRow(f"r{row}", prompt, PROMPT_TOKENS, KINDS["greedy"], ()))
        table.extend(
            ScheduledRows.of([ScheduledRow(f"r{row}", 0, 1, (range(row * blocks, (row + 1) * blocks),), False)])
        )
    plan = ScheduledRows.of([ScheduledRow(f"r{row}", PROMPT_TOKENS - 1, 1, (), True) for row in range(num_rows)])

    def build() -> None:
        rows = StepRows.of_plan(plan, table.extend(plan))
        rows.check(table)
        builder.prepare(upload.send([rows.row_table(num_rows, num_rows)])[0], num_rows)
        builder.inputs(rows)

    return median_ms(build, repeats)


def time_sampling(logits: Tensor, sampling: SamplingParams, repeats: int) -> float:
    """Milliseconds to sample every row with these parameters."""
    num_rows, vocab_size = logits.shape
    prompt = list(range(min(PROMPT_TOKENS, vocab_size)))
    tokens = torch.zeros((num_rows, len(prompt) + 1), dtype=torch.int32)
    tokens[:, :-1] = torch.tensor(prompt)
    sampler = Sampler(vocab_size, 0, tokens)
    for row in range(num_rows):
        sampler.add(row, NewRow(f"r{row}", prompt, len(prompt) // 2, sampling, (2,)))
    slots, lens = np.arange(num_rows), np.full(num_rows, len(prompt))
    on_device = torch.from_numpy(lens.astype(np.int32))
    rows = SampleRows(slots=slots, slots_R=torch.from_numpy(slots), lens=lens, lens_R=on_device)
    return median_ms(lambda: sampler.sample(logits.clone(), rows), repeats)


def torch_temperature(logits: Tensor) -> Tensor:
    """A draw from softmax as torch programs usually write it."""
    probs = logits.float().softmax(1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(1)


def torch_top_p(logits: Tensor, top_p: float) -> Tensor:
    """The same with top-p by a sort of the vocabulary."""
    falling, ids = logits.float().sort(1, descending=True)
    probs = falling.softmax(1)
    falling[probs.cumsum(1) - probs >= top_p] = float("-inf")
    return ids.gather(1, torch_temperature(falling).unsqueeze(1))


def main() -> None:
    """Print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--spread", type=float, default=4.0, help="standard deviation of the logits")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    figures = {f"inputs_of_{rows}_rows_ms": time_inputs(rows, 10 * args.repeats) for rows in (1, 32, 256)}
    logits = torch.randn(args.rows, args.vocab_size, generator=torch.Generator().manual_seed(0)) * args.spread
    logits = logits.bfloat16()
    with torch.inference_mode():
        for name, sampling in KINDS.items():
            figures[f"{name}_ms"] = time_sampling(logits, sampling, args.repeats)
        figures["torch_argmax_ms"] = median_ms(lambda: logits.argmax(1), args.repeats)
        figures["torch_temperature_ms"] = median_ms(lambda: torch_temperature(logits), args.repeats)
        figures["torch_top_p_ms"] = median_ms(lambda: torch_top_p(logits, 0.95), max(2, args.repeats // 4))
    for ours, theirs in (("greedy", "argmax"), ("temperature", "temperature"), ("top_p", "top_p")):
        figures[f"{ours}_times_torch_speed"] = figures[f"torch_{theirs}_ms"] / figures[f"{ours}_ms"]
    for name, value in figures.items():
        print(f"{name:32} {value:9.3f}")
    if args.json:
        write_report(args.json, "worker", {"rows": args.rows, "vocab_size": args.vocab_size, **figures})


if __name__ == "__main__":
    main()
