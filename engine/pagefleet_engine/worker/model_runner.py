"""Runs step plans on one device: apply the difference, prepare inputs, forward, sample. Only a result is waited for.

`launch` gives the device all of a step's work; the tokens it samples go straight into the request table, where the next
step finds them. Only `LaunchedStep.result` waits, for the few numbers that the scheduler needs. Of several stages of a
pipeline the last one samples; the others are told the tokens with the next plan.

Shapes: T tokens of the step, S rows, R rows that sample, F of them without a mask, D hidden size, V vocabulary, G KV
groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.nonfinite import flag_nonfinite, scrub_slots
from torch import Tensor

from pagefleet_engine.core.step import FailureKind, Int64Array, StepMasks, StepPlan, StepResult, TokenLogprobs
from pagefleet_engine.layers.embedding import LMHead
from pagefleet_engine.ranks.stages import Stage
from pagefleet_engine.worker.device_timer import make_idle_timer
from pagefleet_engine.worker.forward import CausalModel, Forward, StepShape
from pagefleet_engine.worker.logits_processors import LogitsProcessor
from pagefleet_engine.worker.masked_rows import Drawn, MaskedRows, MaskedSampling
from pagefleet_engine.worker.prompt_logprobs import PendingPromptLogprobs, PromptLogprobs
from pagefleet_engine.worker.request_table import RequestTable
from pagefleet_engine.worker.sampler import NOT_NUMBERS, NOTHING_LEFT, DeviceSamples, Sampler, SampleRows
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepRows
from pagefleet_engine.worker.transfer import Array, Download, make_upload, start_download

_FAILURES = {NOT_NUMBERS: FailureKind.NOT_NUMBERS, NOTHING_LEFT: FailureKind.NOTHING_LEFT}

_UPLOADS_PER_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """Sizes that the buffers are made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int
    num_kv_groups: int = 1
    max_in_flight: int = 1


class RequestState:
    """What the device keeps of each request between steps: the request table, input buffers and sampling state."""

    def __init__(
        self,
        limits: RunnerLimits,
        seed: int,
        device: torch.device,
        kernels: Backend | Library | None = None,
        processors: Mapping[str, LogitsProcessor] = MappingProxyType({}),
        stage: Stage | None = None,
    ) -> None:
        """`seed` is that of requests that bring none; `kernels` forces Triton or the twins, or are the compiled ones of
        a CPU; `processors` by name; `stage`: which it is, where there are several."""
        rows, block_size = limits.max_num_seqs, limits.block_size
        self.kernels: Backend | None = None if isinstance(kernels, Library) else kernels
        self.stage = stage or Stage()
        entering_TD = None if self.stage.is_first else self.stage.hidden
        self.table = RequestTable(rows, limits.max_model_len, block_size, limits.num_kv_groups, device, self.kernels)
        self.inputs = StepInputBuilder(self.table, rows, limits.max_num_batched_tokens, self.kernels, entering_TD)
        self.sampler = Sampler(limits.vocab_size, seed, self.table.tokens_SL, kernels, processors)
        self.upload = make_upload(device, _UPLOADS_PER_STEP * (limits.max_in_flight + 1))


class ModelRunner:
    """One model, the pages it attends to, and the requests it works on."""

    def __init__(
        self,
        model: CausalModel,
        forward: Forward,
        pool: Tensor,
        state: RequestState,
        vocab_size: int,
        divided_head: LMHead | None = None,
    ) -> None:
        """`forward` runs `model` over `state.inputs`; `pool` is its KV pool; `divided_head`: see Model."""
        self._model = model
        self._forward = forward
        self._pool = pool
        self._table = state.table
        self._inputs = state.inputs
        self._sampler = state.sampler
        self._upload = state.upload
        self._divided_head = divided_head
        self._stage = state.stage
        self._kernels = state.kernels
        self._device = pool.device
        self._prompts = PromptLogprobs(model.logits, vocab_size)
        self._timer = make_idle_timer(pool.device)
        self._sampling = MaskedSampling(state.sampler, state.table, state.upload, self._timer, pool.device)

    @property
    def idle_seconds(self) -> float:
        """How long the device waited between steps that followed each other."""
        return self._timer.idle_seconds

    def execute(self, plan: StepPlan, masks: StepMasks | None = None) -> StepResult:
        """Launch a plan, sample its masked rows, and wait for it."""
        launched = self.launch(plan)
        if masks is not None:
            launched.sample(masks)
        return launched.result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep | PassedOn:
        """Give the device one plan's work. A request whose numbers are unusable is named in the result's `failed`."""
        if not plan.num_tokens:
            return self._launch_nothing(plan)
        stage = self._stage
        stage.begin(plan.step_id)  # before all that may fail
        slots, slots_S = self._apply(plan)
        rows = StepRows.of_plan(plan.rows, slots_S, plan.common)
        rows.check(self._table)
        follows = len(plan.rows) > len(plan.new)
        if stage.is_first:
            self._timer.begin(follows=follows)
        self._table.flush(self._upload)
        if stage.is_last:
            for slot, new in zip(slots, plan.new, strict=True):
                self._sampler.add(slot, new)
        shape = self._forward.shape(rows, plan.num_common_blocks)
        sampled = self._send(rows, plan.masked, shape)
        if not stage.is_first:
            stage.receive(rows.num_tokens, shape.num_tokens)
            self._timer.begin(follows=follows)
        hidden_TD = self._forward.run(rows, plan.num_common_blocks, self._inputs)
        stage.send(hidden_TD)
        bad_T = self._contain(hidden_TD)
        if not stage.is_last:
            download = start_download([bad_T], self._device)
            self._timer.end()
            return PassedOn(plan, download)
        prompts = self._prompts.launch(plan.rows, rows.first_S1, hidden_TD)
        samples = masked = None
        if sampled is not None:
            last_R = sampled.last_token_R
            hidden_RD = hidden_TD if last_R is None else hidden_TD.index_select(0, last_R)
            samples = self._sample_part(hidden_RD, sampled)
            if samples is None:
                logits_RV = self._model.logits(hidden_RD)
                samples = self._sample(logits_RV, sampled)
                if plan.masked:
                    masked = MaskedRows(plan.masked, rows, logits_RV, self._sampling)
        download = start_download([bad_T] if samples is None else [bad_T, samples.token_ids_R], self._device)
        self._timer.end()
        return LaunchedStep(plan, rows, download, samples, masked, prompts)

    @torch.inference_mode()
    def give_up(self, plan: StepPlan) -> None:
        """End a plan that could not be launched for the other stages, too."""
        self._stage.give_up(plan.num_tokens)

    def release(self, request_ids: Iterable[str]) -> None:
        """Let requests go; one that a failed launch did not come to take in is none."""
        for request_id in request_ids:
            if request_id in self._table:
                slot = self._table.remove(request_id)
                if self._stage.is_last:
                    self._sampler.remove(slot)
                self._prompts.remove(request_id)

    def _launch_nothing(self, plan: StepPlan) -> PassedOn:
        """Take part in what layers exchange. Stages give each other nothing: all know the plan."""
        self.release(plan.removed)
        self._forward.run_empty(self._inputs, plan.common)
        return PassedOn(plan, start_download([], self._device))

    def _apply(self, plan: StepPlan) -> tuple[list[int], Int64Array]:
        """Take the plan's difference into the table; returns the slots of its new requests and of its rows.

        Samplers get requests only once the table is flushed: where one finds no memory, what is staged must not wait
        until another request writes to the same slot.
        """
        self.release(plan.removed)
        slots = [self._table.add(new) for new in plan.new]
        if self._stage.is_last:
            for new in plan.new:
                self._prompts.add(new)
        else:
            for request_id, token_ids in plan.sampled.items():
                self._table.append(request_id, token_ids)
        for request_id, token_ids in plan.told.items():
            slot = self._table.append(request_id, token_ids)
            if self._stage.is_last:
                self._sampler.put_out(slot, token_ids)
        return slots, self._table.extend(plan.rows)

    def _send(self, rows: StepRows, masked: Sequence[int], shape: StepShape) -> _Sampled | None:
        """Prepare the input buffers; returns what sampling needs on the device, or None when no row samples here.

        `masked`: rows of the step that are sampled later.
        """
        table_R4 = rows.row_table(shape.num_rows, shape.num_tokens)
        at = rows.sampling_R
        if not (len(at) and self._stage.is_last):
            self._inputs.prepare(self._upload.send([table_R4])[0], shape.num_tokens)
            return None
        slots, lens, last = rows.slots_S[at], rows.seq_lens[at], rows.first_S1[at + 1] - 1
        self._table.grow(slots)
        sent: list[Array] = [table_R4, last]
        if len(masked) < len(at):
            if masked:
                free_F = np.delete(np.arange(len(at)), at.searchsorted(masked))
                slots, lens = slots[free_F], lens[free_F]
                sent.append(free_F)
            sent += [slots, lens.astype(np.int32)]
        rows_R4, last_R, *more = self._upload.send(sent)
        self._inputs.prepare(rows_R4, shape.num_tokens)
        last_token_R = None if len(at) == rows.num_tokens else last_R
        if not more:
            return _Sampled(None, last_token_R, None)
        *places, slots_F, lens_F = more
        free = SampleRows(slots=slots, slots_R=slots_F, lens=lens, lens_R=lens_F)
        return _Sampled(free, last_token_R, places[0] if places else None)

    def _contain(self, hidden_TD: Tensor) -> Tensor:
        """Flag tokens whose hidden states are not numbers, and clean what they wrote to their pages; bool [T].

        Attention reads the unused places of a page too, with weight zero; but zero times NaN is NaN, for whoever gets
        the page next. Cleaned in the step that writes them, such values never reach another request.
        """
        bad_T = flag_nonfinite(hidden_TD, backend=self._kernels)
        scrub_slots(self._pool, self._inputs.slot_mappings(len(hidden_TD)), bad_T, backend=self._kernels)
        return bad_T

    def _sample_part(self, hidden_RD: Tensor, sampled: _Sampled) -> DeviceSamples | None:
        """Sample from this rank's logits alone; None where a row needs those of all tokens."""
        head, rows = self._divided_head, sampled.rows
        if head is None or rows is None or sampled.places_F is not None or not self._sampler.needs_part(rows):
            return None
        return self._sampler.sample(head.own(hidden_RD), rows, part=head.part)

    def _sample(self, logits_RV: Tensor, sampled: _Sampled) -> DeviceSamples | None:
        if sampled.rows is None:
            return None
        places_F = sampled.places_F
        logits_FV = logits_RV if places_F is None else logits_RV.index_select(0, places_F)
        return self._sampler.sample(logits_FV, sampled.rows)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The rows that sample."""

    rows: SampleRows | None
    """Those without a mask, if there are any."""
    last_token_R: Tensor | None
    """int64 [R], where the last token of each stands among the T; None when these are all tokens in order."""
    places_F: Tensor | None
    """int64 [F], rows without a mask among the R; None when these are all."""


@dataclass(frozen=True, slots=True)
class PassedOn:
    """A step that gives no tokens here: the rest is the next stage's, or it had none; implements `PendingStep`."""

    plan: StepPlan
    download: Download

    @property
    def is_computed(self) -> bool:
        """See PendingStep."""
        return self.download.is_done

    def sample(self, masks: StepMasks) -> None:
        """See PendingStep; it is done elsewhere."""

    def result(self) -> StepResult:
        """Wait for the step, which gives nothing here."""
        self.download.wait()
        return StepResult([()] * len(self.plan.rows))


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device is working on; implements `PendingStep`."""

    plan: StepPlan
    rows: StepRows
    download: Download
    samples: DeviceSamples | None
    masked: MaskedRows | None
    prompts: PendingPromptLogprobs | None

    @property
    def is_computed(self) -> bool:
        """See PendingStep."""
        return self.download.is_done

    def sample(self, masks: StepMasks) -> None:
        """See PendingStep."""
        assert self.masked is not None, "the step has no masked row"
        self.masked.sample(masks)

    def result(self) -> StepResult:
        """Wait for the step and bring its numbers into the plan's terms."""
        bad_T, *more = self.download.wait()
        failed = self._bad_rows(bad_T) if bad_T.any() else {}
        ids = self.plan.rows.request_ids
        sampled: list[Sequence[int]] = [()] * len(ids)
        logprobs: dict[str, Sequence[TokenLogprobs]] = {}
        for drawn in self._drawn(more):
            for index in drawn.failed:
                failed[ids[drawn.rows[index]]] = FailureKind.PROCESSOR_FAILED
            for row, token in zip(drawn.rows, drawn.token_ids, strict=True):
                if token >= 0:
                    sampled[row] = (token,)
                else:
                    failed.setdefault(ids[row], _FAILURES[token])
            if drawn.logprobs is not None:
                for index, entry in drawn.logprobs.collect().items():
                    logprobs[ids[drawn.rows[index]]] = (entry,)
        prompt_logprobs: dict[str, Sequence[TokenLogprobs]] = {}
        if self.prompts is not None:
            for request_id, entries in self.prompts.collect().items():
                if entries is None:
                    failed[request_id] = FailureKind.NOT_NUMBERS
                else:
                    prompt_logprobs[request_id] = entries
        return StepResult(sampled, logprobs, prompt_logprobs, failed)

    def _drawn(self, token_ids: Sequence[Array]) -> list[Drawn]:
        """`token_ids`: of the rows without a mask, if there are any."""
        drawn = []
        if self.samples is not None:
            rows = self.rows.sampling_R.tolist()
            if self.plan.masked:
                masked = set(self.plan.masked)
                rows = [row for row in rows if row not in masked]
            samples = self.samples
            drawn.append(Drawn(rows, token_ids[0].tolist(), samples.logprobs, samples.failed))
        if self.masked is not None and (late := self.masked.collect()) is not None:
            drawn.append(late)
        return drawn

    def _bad_rows(self, bad_T: np.ndarray[tuple[int], np.dtype[np.generic]]) -> dict[str, FailureKind]:
        rows = np.searchsorted(self.rows.first_S1, np.flatnonzero(bad_T), side="right") - 1
        return {self.plan.rows.request_ids[row]: FailureKind.NOT_NUMBERS for row in rows}
