"""The step loop: plan, execute, update. It owns the scheduler and the executor, and answers every request it is given.

A request that is wrong is answered with an error. A step that fails ends the requests that were in it; a second one in
a row means that the worker itself is broken, and the core gives up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.outputs import RequestUpdate
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import StepPlan, StepResult, TokenLogprobs
from pagefleet_engine.engine_core.admission import to_request
from pagefleet_engine.engine_core.messages import AddRequest, CoreStats, RequestOutput, WireLogprobs
from pagefleet_engine.errors import EngineDead, InvalidRequest, QueueFull
from pagefleet_engine.executor.executor import Executor

INVALID, QUEUE_FULL, FAILED = "invalid", "queue_full", "failed"
_STEP_FAILED = "The engine could not compute this step."

_log = logging.getLogger(__name__)


class EngineCore:
    """One model being served. Not thread-safe: one thread adds, aborts and steps.

    Args:
        scheduler: decides each step.
        executor: computes it.
        limits: of the loaded model; a request beyond them is refused.
        model: name in the scope of cached blocks.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, limits: ModelLimits, model: str) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._limits = limits
        self._model = model
        self._failed_in_a_row = 0

    @property
    def limits(self) -> ModelLimits:
        """What a request is checked against; the context is the KV pool's size where that is smaller."""
        return self._limits

    @property
    def executor(self) -> Executor:
        """Where the steps run."""
        return self._executor

    @property
    def has_work(self) -> bool:
        """True while a request is open."""
        return self._scheduler.has_work

    def add(self, message: AddRequest) -> RequestOutput | None:
        """Queue a request; returns the answer to one that is refused."""
        try:
            self._scheduler.add(to_request(message, self._limits, self._model))
        except InvalidRequest as error:
            return refusal(message.request_id, error.message, INVALID, error.param, error.code)
        except QueueFull as error:
            return RequestOutput(
                message.request_id,
                [],
                "error",
                error=str(error),
                error_kind=QUEUE_FULL,
                retry_after_s=error.retry_after_s,
            )
        return None

    def abort(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """End requests and free their blocks; returns the last output of those that were open."""
        return [RequestOutput(request_id, [], "abort") for request_id in self._scheduler.abort(request_ids)]

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what there is to tell.

        Raises:
            EngineDead: two steps failed in a row.
        """
        plan = self._scheduler.schedule()
        if plan.num_tokens == 0:
            return []
        result = self._execute(plan)
        return [_to_wire(update) for update in self._scheduler.update(plan, result)]

    def stats(self) -> CoreStats:
        """Return the gauges and totals of now."""
        stats = self._scheduler.stats()
        return CoreStats(
            stats.requests_running,
            stats.requests_waiting,
            stats.kv_usage,
            stats.prefix_cache_queries_tokens,
            stats.prefix_cache_hits_tokens,
            stats.preemptions,
            stats.steps,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check that no request and no block is lost.

        Raises:
            IntegrityError: the accounts do not add up.
        """
        self._scheduler.check_integrity()

    def shutdown(self) -> None:
        """Free the device."""
        self._executor.shutdown()

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            result = self._executor.launch(plan).result()
        except Exception as error:  # whatever a device may raise, the other requests must go on
            self._failed_in_a_row += 1
            _log.exception("step %d failed with %d requests", plan.step_id, len(plan.rows))
            if self._failed_in_a_row > 1:
                raise EngineDead(f"two steps in a row failed, the last with {type(error).__name__}") from error
            failed = {row.request_id: _STEP_FAILED for row in plan.rows}
            return StepResult(sampled=[()] * len(plan.rows), failed=failed)
        self._failed_in_a_row = 0
        return result


def refusal(
    request_id: str, message: str, kind: str, param: str | None = None, code: str | None = None
) -> RequestOutput:
    """Return the only output of a request that is not accepted."""
    return RequestOutput(request_id, [], "error", error=message, error_kind=kind, error_param=param, error_code=code)


def _to_wire(update: RequestUpdate) -> RequestOutput:
    reason = update.finish_reason
    return RequestOutput(
        update.request_id,
        list(update.new_token_ids),
        None if reason is None else reason.value,
        update.stop_token_id,
        update.error,
        None if update.error is None else FAILED,
        _wire_logprobs(update.logprobs),
        _wire_logprobs(update.prompt_logprobs),
        update.num_cached_tokens,
    )


def _wire_logprobs(entries: Sequence[TokenLogprobs] | None) -> list[WireLogprobs] | None:
    if entries is None:
        return None
    return [WireLogprobs(list(entry.token_ids), list(entry.logprobs), entry.rank) for entry in entries]
