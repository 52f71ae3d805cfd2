"""The step loop: plan, launch, update. It owns the scheduler and the executor, and answers every request it is given.

A request that is wrong is answered with an error. Where the executor overlaps steps, the next one is planned and
launched before the results of the last are waited for, so the device never waits for the host.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.dual_batch import DualBatch
from pagefleet_engine.core.outputs import RequestUpdate
from pagefleet_engine.core.request import FinishReason, Request, RequestStatus
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import CommonStep, FailureKind, StepPlan
from pagefleet_engine.engine_core.admission import ArgumentReader, check_extra_args, check_message, to_requests
from pagefleet_engine.engine_core.masks import MaskFiller
from pagefleet_engine.engine_core.messages import AddRequest, CoreStats, RequestOutput
from pagefleet_engine.engine_core.step_queue import StepQueue
from pagefleet_engine.engine_core.waves import Waves
from pagefleet_engine.engine_core.wire import refusal, to_wire
from pagefleet_engine.errors import InvalidRequest, QueueFull
from pagefleet_engine.executor.executor import Executor
from pagefleet_engine.grammars.port import GrammarSource

TRANSFER_STATS_S = 0.25
"""How long the connector's figures are told again before it is asked for newer ones."""
TRANSFER_LOOK_S = 0.1
"""Between two looks at what is owed, where no bell says that it has changed."""

_log = logging.getLogger(__name__)


class EngineCore:
    """One model being served. Not thread-safe: one thread adds, aborts and steps.

    Args:
        scheduler: decides each step.
        executor: computes it.
        limits: of the loaded model; a request beyond them is refused.
        model: name in the scope of cached blocks.
        grammars: that the scheduler has forms from, if any.
        readers: by name, the logits processors that read `SamplingParams.extra_args`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        limits: ModelLimits,
        model: str,
        grammars: GrammarSource | None = None,
        readers: Mapping[str, ArgumentReader] = MappingProxyType({}),
    ) -> None:
        self._waves: Waves | None = None
        self._dual_batch: DualBatch | None = None
        self._readers = readers
        self._scheduler = scheduler
        self._executor = executor
        self._limits = limits
        self._model = model
        self._steps = StepQueue(executor)
        self._grammars = grammars
        self._masks = None if grammars is None else MaskFiller(grammars, limits.vocab_size)
        self._stalled = False
        self._transfer_stats: Mapping[str, float] = {}
        self._transfer_stats_due = 0.0

    def step_together(self, waves: Waves, dual_batch: DualBatch | None = None) -> None:
        """From now on step with other data ranks, which cannot go on without this one; `dual_batch`: says which steps
        this one would divide, where they are divided."""
        self._waves, self._dual_batch = waves, dual_batch
        self._steps = StepQueue(self._executor, fails_alone=False)

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
        """True while a request is open or a step is in flight, or due as other ranks have one."""
        return self._scheduler.has_work or len(self._steps) > 0 or self._waits_for_others

    @property
    def is_due(self) -> bool:
        """True while a step is in flight or due, or a request is open that does not just wait for K/V."""
        return len(self._steps) > 0 or not self._scheduler.only_parked or self._waits_for_others

    @property
    def _waits_for_others(self) -> bool:
        """Whether this rank has to step, as others do."""
        return self._waves is not None and self._waves.is_due

    @property
    def is_stalled(self) -> bool:
        """True when the last step had nothing to compute: only a message or the end of a transfer changes that."""
        return self._stalled

    @property
    def has_connector(self) -> bool:
        """Whether K/V may come and go while no step is due."""
        return self._scheduler.connector.bell is not None

    @property
    def bells(self) -> Sequence[int]:
        """File descriptors that are readable while there is something for `step` or `settle` to take in.

        They tell of transfers that have ended, of forms that are compiled, of ranks that step, and of devices that are
        gone.
        """
        bells = [
            self._scheduler.connector.bell,
            None if self._grammars is None else self._grammars.bell,
            None if self._waves is None else self._waves.bell,
        ]
        return [*self._executor.bells, *(bell for bell in bells if bell is not None)]

    def add(self, message: AddRequest) -> list[RequestOutput]:
        """Queue the outputs of a request; returns the answers to those that are refused, or over already.

        They are queued together or not at all.
        """
        added: list[str] = []
        told: list[RequestOutput] = []
        try:
            check_message(message, self._limits)
            check_extra_args(message.sampling.extra_args, self._readers)
            for request in to_requests(message, self._model):
                ended = self._scheduler.add(request)
                if ended is None:
                    added.append(request.request_id)
                else:
                    told.append(to_wire(ended))
        except (InvalidRequest, QueueFull) as error:
            self._scheduler.abort(added)
            return [refusal(output_id, error) for output_id in message.output_ids]
        return told

    def abort(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """End requests and free their blocks; returns the last output of those that were open."""
        return [
            RequestOutput(request_id, [], FinishReason.ABORT.value) for request_id in self._scheduler.abort(request_ids)
        ]

    def step(self) -> list[RequestOutput]:
        """Take in transfers, launch what can be launched, then wait for the oldest step; returns what there is to tell.

        Raises:
            EngineDead: the worker is broken.
        """
        outputs: list[RequestOutput] = []
        steps = self._steps
        while True:
            outputs += self._sample_masked()
            if not steps.takes_another:
                break
            outputs += self.settle()
            is_due = self._waits_for_others
            plan = self._scheduler.schedule(even_empty=is_due)
            if plan.num_tokens == 0 and not is_due:
                break
            if self._waves is not None:
                plan = replace(plan, common=self._waves.begin(self._asked_of(plan)))
            self._launch(plan)
            if self._waves is not None:
                self._waves.stepped(has_work=not self._scheduler.only_parked)
        self._stalled = not steps and not self._waits_for_others
        return outputs + self._take()

    def _asked_of(self, plan: StepPlan) -> CommonStep:
        """What this rank's own step is."""
        return CommonStep(
            num_tokens=plan.num_tokens,
            is_uniform=plan.num_tokens == len(plan.rows),
            is_cascade=plan.num_common_blocks > 0,
            in_halves=self._dual_batch is not None and self._dual_batch.divides(plan.rows.new),
        )

    def finish_steps(self) -> list[RequestOutput]:
        """Wait for all steps that were launched; returns what there is to tell.

        Raises:
            EngineDead: the worker is broken.
        """
        outputs: list[RequestOutput] = []
        while self._steps:
            outputs += self._sample_masked()
            outputs += self._take()
        return outputs

    def _take(self) -> list[RequestOutput]:
        """Wait for the oldest step, if there is one."""
        steps = self._steps
        if not steps:
            return []
        outputs = [to_wire(update) for update in self._scheduler.update(*steps.take())]
        if steps and not steps.is_sampled:
            self._begin_masks(steps.due)
        return outputs

    def _launch(self, plan: StepPlan) -> None:
        """Launch a step, and begin to fill its masks where all tokens before it are known.

        They are filled beside the launch, but behind it where the launch computes and no row could go on without them,
        as long as they are quick: two threads that take turns at the interpreter's lock lose more than that by it.
        """
        is_known, masks = self._steps.knows_all, self._masks
        waits_for_all = self._executor.max_in_flight == 1 and len(plan.masked) == len(plan.rows)
        is_behind = waits_for_all and masks is not None and masks.is_quick
        if is_known and not is_behind:
            self._begin_masks(plan)
        self._steps.launch(plan)
        if is_known and is_behind:
            self._begin_masks(plan)

    def _begin_masks(self, plan: StepPlan) -> None:
        if plan.masked and self._masks is not None:
            self._masks.begin(self._scheduler.in_flight.to_mask(plan), len(plan.rows))

    def _sample_masked(self) -> list[RequestOutput]:
        """Sample the masked rows of the step that is due, before the next is launched; return what there is to tell."""
        masks, steps, scheduler = self._masks, self._steps, self._scheduler
        if masks is None or not steps or steps.is_sampled:
            return []
        plan = steps.due
        alone = len(plan.masked) == len(plan.rows)
        taken = masks.take(lambda: alone or not steps.is_computed)
        told: list[RequestUpdate | None] = []
        for request in filter(_runs, taken.late):  # what ended meanwhile is dropped with its row
            scheduler.sit_out(plan, request)
        for request, special in taken.unsampled:
            if not _runs(request):
                continue
            if special.failure is not None:
                told.append(scheduler.fail_masked(request, FailureKind.FORM_FAILED))
            else:
                told.append(scheduler.force(plan, request, special.forced))
        if not steps.sample(taken.masks):
            lost, sampled = scheduler.in_flight.to_mask(plan), set(taken.masks.rows)
            rows = zip(lost.rows, lost.requests, strict=True)
            told += [
                scheduler.fail_masked(request, FailureKind.OUT_OF_MEMORY) for row, request in rows if row in sampled
            ]
        return [to_wire(update) for update in told if update is not None]

    def settle(self) -> list[RequestOutput]:
        """Take in the transfers that have ended; returns the ends of requests that wait for one in vain.

        Raises:
            EngineDead: the devices are gone.
        """
        self._executor.check()
        return [to_wire(update) for update in self._scheduler.settle()]

    def stats(self) -> CoreStats:
        """Return the gauges and totals of now."""
        stats = self._scheduler.stats()
        return CoreStats(
            stats.requests_running,
            stats.requests_waiting,
            stats.kv_usage,
            stats.lookups.queried_tokens,
            stats.lookups.hit_tokens,
            stats.preemptions,
            stats.steps,
            gpu_idle_seconds=self._executor.idle_seconds,
            nan_requests=stats.nan_requests,
            out_of_memory_steps=self._steps.num_out_of_memory,
            kv_transfer=self._newest_transfer_stats(),
            transfers_owed=self._scheduler.connector.num_owed,
            forms=self._form_stats(stats.form_requests, stats.forced_tokens),
            prefix_misses_tokens=stats.lookups.missed_tokens,
            step_sizes=stats.step_sizes.counts,
            step_tokens=stats.step_sizes.num_tokens,
            experts={} if (load := self._executor.expert_load) is None else load.stats(),
        )

    def drain(self) -> None:
        """Take nothing on for other engines any more."""
        self._scheduler.connector.drain()

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request holds."""
        self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check that no request and no block is lost.

        Raises:
            IntegrityError: the accounts do not add up.
        """
        self._scheduler.check_integrity()

    def shutdown(self, within_s: float = 0.0) -> None:
        """Free the device.

        Args:
            within_s: wait as long at most for K/V that is on its way to others or to disk; the rest is lost.
        """
        with contextlib.ExitStack() as ends:  # each, whatever became of the others
            ends.callback(self._executor.shutdown)
            ends.callback(self._scheduler.connector.close)
            if self._grammars is not None:
                ends.callback(self._grammars.close)
            if self._masks is not None:
                ends.callback(self._masks.close)
            if within_s:
                self._finish_transfers(within_s)

    def _form_stats(self, num_requests: int, num_forced: int) -> Mapping[str, float]:
        if self._grammars is None or self._masks is None:
            return {}
        return {
            "pagefleet_engine_form_requests_total": num_requests,
            "pagefleet_engine_form_forced_tokens_total": num_forced,
            "pagefleet_engine_form_mask_seconds_total": self._masks.seconds,
            **{f"pagefleet_engine_{name}": value for name, value in self._grammars.stats().items()},
        }

    def _finish_transfers(self, within_s: float) -> None:
        connector, deadline = self._scheduler.connector, time.monotonic() + within_s
        connector.drain()
        ended = select.poll()
        if connector.bell is not None:
            ended.register(connector.bell, select.POLLIN)
        while (num_owed := connector.num_owed) and (left := deadline - time.monotonic()) > 0:
            ended.poll(min(left, TRANSFER_LOOK_S) * 1000)
            self.settle()
        if num_owed:
            _log.warning("%d transfers of K/V did not end within %g s", num_owed, within_s)

    def _newest_transfer_stats(self) -> Mapping[str, float]:
        now = time.monotonic()
        if now >= self._transfer_stats_due:
            stats = self._scheduler.connector.stats()
            self._transfer_stats = {**stats.counters, **stats.gauges}
            self._transfer_stats_due = now + TRANSFER_STATS_S
        return self._transfer_stats


def _runs(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING
