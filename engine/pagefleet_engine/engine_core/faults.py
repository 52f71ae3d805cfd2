"""What a client is told about a request that could not go on: the one table from kinds of failure to answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagefleet_engine.core.step import FailureKind

INVALID, QUEUE_FULL, FAILED, OUT_OF_MEMORY = "invalid", "queue_full", "failed", "out_of_memory"
FAILED_ALONE = "failed_alone"
KV_LOAD_FAILED = "kv_load_failed"
"""Kinds of error on the wire; see `RequestOutput.error_kind`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The error fields of a request's last output."""

    kind: str
    message: str
    code: str | None = None


FAILURE_ANSWERS: Mapping[FailureKind, Answer] = {
    FailureKind.NOT_NUMBERS: Answer(FAILED_ALONE, "The model's output for this request is not a number."),
    FailureKind.NOTHING_LEFT: Answer(
        INVALID,
        "The request's constraints leave no token to sample: loosen 'allowed_token_ids', 'bad_words' or 'min_tokens'.",
        "no_token_left",
    ),
    FailureKind.OUT_OF_MEMORY: Answer(
        OUT_OF_MEMORY,
        "The device ran out of memory in a step that this request was in. Lower --max-num-batched-tokens or "
        "--max-num-seqs for smaller steps, or --gpu-memory-utilization to leave more room beside the KV cache.",
    ),
    FailureKind.STEP_FAILED: Answer(FAILED, "The engine could not compute this step."),
    FailureKind.KV_LOAD_FAILED: Answer(
        KV_LOAD_FAILED, "The prompt's K/V did not come from the prefill engine: try again.", KV_LOAD_FAILED
    ),
    FailureKind.KV_SEND_FAILED: Answer(
        KV_LOAD_FAILED, "The prompt's K/V did not get to the decode engine: try again.", KV_LOAD_FAILED
    ),
}
