"""From the scheduler's updates to the messages that leave the core; what a client is told of each kind of failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagefleet_protocol.kv_handoff import KvFault

from pagefleet_engine.core.outputs import RequestUpdate
from pagefleet_engine.core.request import FinishReason
from pagefleet_engine.core.step import FailureKind, TokenLogprobs
from pagefleet_engine.engine_core.messages import RequestOutput, WireLogprobs
from pagefleet_engine.errors import InvalidRequest, QueueFull

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
    FailureKind.FORM_FAILED: Answer(
        FAILED_ALONE, "The form that was asked for could not be followed: it may be too complex.", "form_failed"
    ),
    FailureKind.PROCESSOR_FAILED: Answer(
        FAILED_ALONE, "A logits processor of this engine failed at this request.", "logits_processor_failed"
    ),
}


def to_wire(update: RequestUpdate) -> RequestOutput:
    """Return the message that tells an update."""
    reason = update.finish_reason
    if reason is None and update.logprobs is None and update.prompt_logprobs is None:  # nearly all of them
        return RequestOutput(
            update.request_id,
            update.new_token_ids,
            num_cached_tokens=update.num_cached_tokens,
            waits=update.waits,
        )
    if update.refusal is not None:
        return refusal(update.request_id, update.refusal)
    if update.failure is not None:
        return _failure(update.request_id, update.failure, update.kv_fault)
    return RequestOutput(
        update.request_id,
        update.new_token_ids,
        None if reason is None else reason.value,
        update.stop_token_id,
        logprobs=_wire_logprobs(update.logprobs),
        prompt_logprobs=_wire_logprobs(update.prompt_logprobs),
        num_cached_tokens=update.num_cached_tokens,
        waits=update.waits,
        form_complete=update.form_complete,
    )


def refusal(request_id: str, error: InvalidRequest | QueueFull) -> RequestOutput:
    """Return the last output of a request that is not taken."""
    if isinstance(error, QueueFull):
        return RequestOutput(
            request_id,
            [],
            FinishReason.ERROR.value,
            error=str(error),
            error_kind=QUEUE_FULL,
            retry_after_s=error.retry_after_s,
        )
    return RequestOutput(
        request_id,
        [],
        FinishReason.ERROR.value,
        error=error.message,
        error_kind=INVALID,
        error_param=error.param,
        error_code=error.code,
    )


def _failure(request_id: str, kind: FailureKind, fault: KvFault | None) -> RequestOutput:
    answer = FAILURE_ANSWERS[kind]
    return RequestOutput(
        request_id,
        [],
        FinishReason.ERROR.value,
        error=answer.message,
        error_kind=answer.kind,
        error_code=answer.code,
        kv_fault=fault,
    )


def _wire_logprobs(entries: Sequence[TokenLogprobs] | None) -> list[WireLogprobs] | None:
    if entries is None:
        return None
    return [WireLogprobs(list(entry.token_ids), list(entry.logprobs), entry.rank) for entry in entries]
