"""Steps that no request asked for: so that the first request is not slow, and to see how much memory a step takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from pagefleet_kernels.compile_ahead import compile_side_by_side
from pagefleet_kernels.token_mask import num_words
from pagefleet_protocol.sampling_params import SamplingParams

from pagefleet_engine.core.kv_groups import num_blocks_for
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows, StepMasks, StepPlan
from pagefleet_engine.worker.forward import EagerForward
from pagefleet_engine.worker.model_runner import ModelRunner, RunnerLimits
from pagefleet_engine.worker.step_inputs import StepInputBuilder

_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, seed=0)

_EVERY_SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=0),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.01, seed=0),
    SamplingParams(top_k=20, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, seed=0),
    SamplingParams(min_tokens=2, logit_bias={0: 1.0}, bad_words=("a",), bad_words_token_ids=((1,), (2, 3)), seed=0),
    SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2),
    SamplingParams(temperature=0.0, allowed_token_ids=(0, 1)),
)
"""One for each kernel that sampling may launch, in each form: penalties change the type of the logits."""

_BESIDE = 32
"""Tokens of a prompt that is too long for the kernel of short queries: whoever is beside it then has two launches."""
_TALLEST = 512
"""No kernel has another form for longer queries."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """What a step has besides prompts of some lengths."""

    sampling: SamplingParams = _SAMPLING
    num_common_blocks: int = 0
    """The step attends as if all prompts shared so many: what it computes is then meaningless."""
    masked_from: int | None = None
    """The rows from this one on sample under a mask, which allows everything."""


PLAIN = StepKind()
HUNGRIEST = StepKind(
    SamplingParams(
        top_k=20, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=20, prompt_logprobs=20, seed=0
    ),
    masked_from=1,
)
"""Holds the most memory: two copies of the logits, counts of all tokens, and log-probabilities of all rows."""


def rehearse(
    runner: ModelRunner,
    row_lens: Sequence[int],
    limits: RunnerLimits,
    kind: StepKind = PLAIN,
    *,
    and_decode: bool = True,
) -> bool:
    """Compute prompts of these lengths in one step, then (`and_decode`) one token of each in another; leaves nothing
    but used pages.

    The pool needs `blocks_needed`; blocks are taken from 0 on.
    Returns whether every prompt gave a token; False means that the model computes no numbers.
    """
    new, prompts, outputs = [], [], []
    next_block = 0
    for index, length in enumerate(row_lens):
        name = f"rehearsal-{index}"
        num_blocks = num_blocks_for(length + 1, limits.block_size)
        new.append(NewRow(name, [0] * length, length, kind.sampling, ()))
        tables = []
        for _ in range(limits.num_kv_groups):
            tables.append(range(next_block, next_block + num_blocks))
            next_block += num_blocks
        prompts.append(ScheduledRow(name, 0, length, tables, True))
        if and_decode and length + 2 <= limits.max_model_len:
            outputs.append(ScheduledRow(name, length, 1, (), True))
    masked = range(len(prompts) if kind.masked_from is None else kind.masked_from, len(prompts))
    plan = StepPlan(0, (), new, ScheduledRows.of(prompts), sum(row_lens), kind.num_common_blocks, masked)
    first = runner.execute(plan, _allow_all(masked, limits))
    if outputs:  # whatever the prompts gave, of which only the last stage of a pipeline knows
        masked, tokens = range(masked.start, len(outputs)), {row.request_id: (0,) for row in outputs}
        rows = ScheduledRows.of(outputs)
        runner.execute(StepPlan(0, (), (), rows, len(rows), masked=masked, sampled=tokens), _allow_all(masked, limits))
    runner.release([row.request_id for row in new])
    return not first.failed


def _allow_all(rows: Sequence[int], limits: RunnerLimits) -> StepMasks | None:
    return StepMasks(rows, np.full((len(rows), num_words(limits.vocab_size)), -1, dtype=np.int32)) if rows else None


def rehearse_everything(runner: ModelRunner, limits: RunnerLimits, num_blocks: int, *, cascade: bool = False) -> None:
    """Launch each kernel in each form that serving may ask for: one that compiles then would hold up all requests.

    Forms follow from the number of rows and the longest query, in powers of two, and from how rows are sampled;
    `cascade`: also from whether rows share a prefix.
    """
    for row_lens in _every_batch(limits):
        if blocks_needed(row_lens, limits) > num_blocks:
            continue
        for num_common_blocks in (0, 1) if cascade and len(row_lens) > 1 else (0,):
            # prompts of one token are what decodes look like: a second step would show nothing new
            rehearse(runner, row_lens, limits, kind=StepKind(num_common_blocks=num_common_blocks), and_decode=False)
    for sampling in _EVERY_SAMPLING:
        if blocks_needed([4], limits) <= num_blocks and limits.max_model_len > 5:
            rehearse(runner, [4], limits, StepKind(sampling))
            rehearse(runner, [4], limits, StepKind(sampling, masked_from=0))


def compile_ahead(forward: EagerForward, inputs: StepInputBuilder, limits: RunnerLimits, *, cascade: bool) -> None:
    """Compile side by side what the forward pass of any step launches; one after another it takes a minute.

    Nothing is computed that anybody could see: tokens and positions are zeros, and nothing is written to pages. What
    piecewise graphs of a model in eight bits launch besides (attention that is not rounded) is left to their capture.
    """
    with compile_side_by_side(len(os.sched_getaffinity(0))) as is_possible, torch.inference_mode():
        if not is_possible:
            return
        inputs.clear()
        for row_lens in _every_batch(limits):
            if sum(row_lens) > 2 * _TALLEST:
                continue
            view = inputs.view(len(row_lens), sum(row_lens), max(row_lens))
            for num_common_blocks in (0, 1) if cascade and len(row_lens) > 1 else (0,):
                geometry = replace(view.geometry, num_common_blocks=num_common_blocks)
                forward.compute(replace(view, geometry=geometry))


def _every_batch(limits: RunnerLimits) -> Iterator[list[int]]:
    """Prompt lengths of batches of 1, 2, 4, ... rows, alike or with one longer, then of single prompts and of three."""
    longest = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    for num_rows in _powers_of_two(min(limits.max_num_seqs, limits.max_num_batched_tokens)):
        yield [1] * num_rows
        if num_rows > 1 and num_rows - 1 + min(longest, _BESIDE) <= limits.max_num_batched_tokens:
            yield [min(longest, _BESIDE), *[1] * (num_rows - 1)]
    for length in _powers_of_two(longest):
        yield [length]
    tallest = min(longest, limits.max_num_batched_tokens - 2, _TALLEST)
    if limits.max_num_seqs > 2 and tallest > 0:
        yield from ([length, 1, 1] for length in _powers_of_two(tallest))


def _powers_of_two(last: int) -> list[int]:
    """1, 2, 4, ... and `last`."""
    return sorted({1 << exponent for exponent in range(last.bit_length())} | {last})


def blocks_needed(row_lens: Sequence[int], limits: RunnerLimits) -> int:
    """Blocks that a rehearsal of these prompts takes: whole tables in every KV group."""
    return limits.num_kv_groups * sum(num_blocks_for(length + 1, limits.block_size) for length in row_lens)


def fullest_step(limits: RunnerLimits) -> list[int]:
    """Prompt lengths that fill a step with tokens and with rows that sample, as evenly as can be."""
    num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    length = min(limits.max_num_batched_tokens // num_rows, limits.max_model_len - 1)
    return [max(1, length)] * num_rows


def short_step(limits: RunnerLimits, num_blocks: int) -> list[int]:
    """Lengths of two prompts that load every code path a first request needs, within a pool of `num_blocks`."""
    longest = max(1, min(64, limits.max_model_len - 2, limits.max_num_batched_tokens))
    lengths = [longest, max(1, longest // 2)][: limits.max_num_seqs]
    while lengths and (sum(lengths) > limits.max_num_batched_tokens or blocks_needed(lengths, limits) > num_blocks):
        lengths.pop()
    return lengths
