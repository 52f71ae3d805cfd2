"""Decides what each step computes. One rule: every request catches up from `num_computed_tokens` to `num_tokens`.

Chunked prefill, decoding, prefix caching and recovery from preemption are all that rule. Steps may overlap: `schedule`
can be called again before `update` of the step before. A token that such a step will sample counts as pending, so that
the next step can compute it unseen. When `update` then finds that the request has ended, its later rows are surplus:
what they give is dropped, and nothing of it was ever told, counted or published.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Sequence

from pagefleet_kv.port import AnswerDone, KVConnector

from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.admission import ModelLimits, QueueGate
from pagefleet_engine.core.advance import advance, new_prompt_logprobs
from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.core.forms import Forms
from pagefleet_engine.core.in_flight import InFlight
from pagefleet_engine.core.kv_cache import NO_BLOCKS, KVCache
from pagefleet_engine.core.kv_loads import KVLoads, KVSaves
from pagefleet_engine.core.micro_batches import PLAIN, StepStyle, share_out
from pagefleet_engine.core.outputs import HeldAnswers, RequestUpdate, SchedulerStats, StepSizes
from pagefleet_engine.core.parking import NOTHING_SUPPLIED, Parking, Suppliers
from pagefleet_engine.core.request import FinishReason, Request, RequestStatus
from pagefleet_engine.core.step import FailureKind, NewRow, StepPlan, StepResult
from pagefleet_engine.core.step_draft import StepDraft
from pagefleet_engine.core.stop import check_resumed
from pagefleet_engine.core.waiting_queue import WaitingQueue
from pagefleet_engine.errors import ContextTooLong, InvalidRequest

MIN_LONG_PREFILL_TOKENS = 512


class Scheduler:
    """Owns all requests from `add` until they end.

    `running` is kept in order of importance: under `fcfs` that is arrival, under `priority` smaller priority and then
    arrival. The most important is served first and the last is the one to preempt, so a victim has never been given
    a share of the same step. A request alone in the pool always fits (`add` refuses others), so the first of the list
    always gets on, whatever happens to the rest: there is no livelock.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCache,
        limits: ModelLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        style: StepStyle = PLAIN,
        suppliers: Suppliers = NOTHING_SUPPLIED,
    ) -> None:
        self.max_model_len = min(limits.max_model_len, kv_cache.capacity_tokens)
        """Tokens at which a request ends with `length`: the model's context, or the KV pool where that is smaller."""
        self.config = config
        self._style = style
        self._is_piped = style.num_stages > 1
        self._long_prefill_tokens = _long_prefill_tokens(config)
        self._kv_cache = kv_cache
        self._block_size = kv_cache.block_size
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self.connector = suppliers.connector or KVConnector()
        """Where K/V comes from and goes to, beside the pool."""
        self._waiting = WaitingQueue(by_priority=config.policy == "priority")
        self._loads = KVLoads(self.connector, kv_cache, self._waiting, self._importance, clock)
        self._saves = KVSaves(self.connector, kv_cache)
        self._forms = Forms(suppliers.grammars, clock)
        self._parking = Parking((self._forms, self._loads), self._waiting)
        self._held = HeldAnswers()
        self._gate = QueueGate(config, clock)
        self.in_flight = InFlight()
        """Steps that were planned and not taken in."""
        self._removed: list[str] = []
        """Requests that the worker holds and should not; told with the next plan that is executed."""
        self._num_arrivals = 0
        self._num_steps = 0
        self._step_sizes = StepSizes()
        self._num_preemptions = 0
        self._num_nan_requests = 0
        self._num_forced_tokens = 0

    @property
    def has_work(self) -> bool:
        """True while a request has not been answered to its end."""
        return bool(self._requests) or len(self._held) > 0

    @property
    def only_parked(self) -> bool:
        """True while all open requests are parked, or wait for their K/V to get elsewhere, so that no step is due."""
        return len(self._requests) == self._parking.num_parked

    def add(self, request: Request) -> RequestUpdate | None:
        """Queue a request; returns the end of one that the output it came with has ended already.

        Raises:
            ContextTooLong: the prompt does not fit the KV pool.
            InvalidRequest: its id is taken, or the output that it came with goes on after its end.
            QueueFull: too much is waiting.
        """
        if request.request_id in self._requests or request.request_id in self._held:
            raise InvalidRequest(
                f"A request with id {request.request_id!r} is not finished yet: use another id.",
                "request_id",
                "invalid_value",
            )
        self._check_capacity(request)
        request.limit(self.max_model_len)
        if (stop := check_resumed(request)) is not None:
            return RequestUpdate(request.request_id, (), stop.reason, stop.token_id)
        self._gate.check(request)
        self._forms.submit(request)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._gate.arrive(request)
        self.connector.arrived(request)
        self._parking.enter(request)
        return None

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End these requests now, also amid a step (whose tokens for them are dropped); returns those that were open.

        Their blocks are free at once. The next plan may hand them out: it runs after the steps that still write them.
        Only those that a load is filling are kept until it has ended.
        """
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                if request_id in self._held:  # its transfer goes on, as it would without an answer
                    self._held.drop(request_id)
                    aborted.append(request_id)
                continue
            if request.status is RequestStatus.RUNNING:
                self._running.remove(request)
                self._release(request)
            else:
                self._gate.leave(request)
                self._parking.drop(request)
            self._forget(request, completed=False)
            aborted.append(request_id)
        return aborted

    def settle(self) -> list[RequestUpdate]:
        """Let parked requests go on that can, and take in transfers that ended; to be called before each `schedule`.

        Returns the ends of requests that must not go on, and of those that waited for their K/V to get away.
        """
        answers: Sequence[AnswerDone] = ()
        if self._loads.enabled:
            done = self.connector.finished()
            self._saves.settle(done.saves)
            self._loads.ended(done.loads)
            answers = done.answers
        updates = []
        for request, update in self._parking.settle(len(self._running)):
            self._gate.leave(request)
            self._forget(request, completed=False)
            updates.append(update)
        return updates + self._held.settle(answers)

    def schedule(self, *, even_empty: bool = False) -> StepPlan:
        """Plan the next step; `num_tokens` is 0 when there is nothing to do. Such a plan needs no `update`, unless it
        is to be executed all the same (`even_empty`), as other copies of the model have tokens.

        With steps in flight an empty plan may mean that all depends on their results.
        """
        draft = self._begin_step()
        self._continue_running(draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        return self._close_step(draft, even_empty)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in what the oldest step in flight computed; returns what there is to tell, and ends what is done."""
        updates = []
        running = RequestStatus.RUNNING
        failed = result.failed
        any_ended = False
        requests = self.in_flight.land(plan.step_id)
        for request, row, sampled in zip(requests, plan.rows.numbers(), result.sampled, strict=True):
            if request is None or request.status is not running:  # preempted or ended since the step was launched
                continue
            if failed and request.request_id in failed:
                update: RequestUpdate | None = self._fail(request, failed[request.request_id])
            else:
                update = self._advance(plan.step_id, request, row, sampled, result)
            if update is not None:
                updates.append(update)
            any_ended |= request.status is not running
        if any_ended:
            self._drop_ended()
        return updates

    def sit_out(self, plan: StepPlan, request: Request) -> None:
        """No mask came in time for the request's row of a step, which is not sampled: its last token comes again."""
        self.in_flight.sit_out(plan, request, num_again=1)

    def force(self, plan: StepPlan, request: Request, token_ids: Sequence[int]) -> RequestUpdate | None:
        """Append what the request's row of a step would sample, and what follows that, as its form leaves no other.

        The row is not sampled.
        """
        self.in_flight.sit_out(plan, request, num_again=0)
        num_before = request.num_tokens
        update = advance(request, token_ids)
        self._num_forced_tokens += request.num_tokens - num_before
        request.untold += request.token_ids[num_before:]
        told = self._tell(request, update)
        if update.finish_reason is not None:
            self._drop_ended()
        return told

    def fail_masked(self, request: Request, kind: FailureKind) -> RequestUpdate:
        """End a request that runs, as its row cannot be sampled under a mask. What was computed for it is right."""
        self._running.remove(request)
        self._release(request)
        self._forget(request, completed=False)
        return RequestUpdate(request.request_id, (), FinishReason.ERROR, failure=kind)

    def _check_capacity(self, request: Request) -> None:
        capacity = self._kv_cache.capacity_tokens
        if request.num_prompt_tokens >= capacity:
            raise ContextTooLong(
                f"The KV cache holds {capacity} tokens, prompt and output together; the prompt has "
                f"{request.num_prompt_tokens}. Shorten it, or give the engine more with num_kv_blocks or "
                "kv_cache_memory.",
                "prompt",
            )

    def stats(self) -> SchedulerStats:
        """Return the gauges and totals of now."""
        return SchedulerStats(
            requests_running=len(self._running),
            requests_waiting=self._gate.num_requests,
            kv_usage=self._kv_cache.usage,
            lookups=self._kv_cache.lookups,
            step_sizes=self._step_sizes,
            preemptions=self._num_preemptions,
            steps=sum(self._step_sizes.counts),
            nan_requests=self._num_nan_requests,
            form_requests=self._forms.num_requests,
            forced_tokens=self._num_forced_tokens,
        )

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no request holds, and what the connector keeps; returns the first number."""
        self.connector.reset()
        return self._kv_cache.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check that no request is lost and that all blocks are accounted for; meant for whenever the engine is idle.

        Raises:
            IntegrityError: the accounts do not add up.
        """
        self._parking.check_integrity()
        self._saves.check_integrity()
        queued, parked = list(self._waiting), self._parking.parked
        waiting = queued + parked
        if len(self._running) + len(waiting) != len(self._requests):
            raise IntegrityError(f"{len(self._requests)} requests, {len(self._running)} run, {len(waiting)} wait")
        for request in [*self._running, *waiting]:
            if self._requests.get(request.request_id) is not request:
                raise IntegrityError(f"{request.request_id} is queued but not known")
        if any(request.status is not RequestStatus.RUNNING for request in self._running):
            raise IntegrityError("a request in the running list does not run")
        if any(request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for request in queued):
            raise IntegrityError("a request in the queue does not wait")
        if (self._gate.num_requests, self._gate.num_tokens) != (len(waiting), sum(r.num_tokens for r in waiting)):
            raise IntegrityError("the queue's totals are wrong")
        if self._running != sorted(self._running, key=self._importance):
            raise IntegrityError("the running list is out of order")
        self.in_flight.check_integrity(self._running, waiting)
        self._kv_cache.check_integrity(self._running)

    # --- the steps of schedule()

    def _begin_step(self) -> StepDraft:
        budget = self.config.max_num_batched_tokens
        chunk = self._long_prefill_tokens if len(self._requests) > 1 else budget
        if not self._is_piped:
            return StepDraft(budget, chunk)
        share = share_out(self._running, self._gate.num_tokens, self._style.num_stages, budget)
        return StepDraft(share.num_tokens, chunk, decoding_left=share.num_decoding)

    def _continue_running(self, draft: StepDraft) -> None:
        """Give each running request its next tokens, leaving one for every request after it."""
        running = self._running
        put, is_piped = draft.put, self._is_piped
        index = 0
        while index < len(running):
            request = running[index]
            num_tokens = len(request.token_ids) + request.num_pending
            num_new = num_tokens - request.num_computed_tokens
            # Its last token is on its way, or its next.
            if num_tokens >= request.ends_at or (is_piped and draft.leaves_out(request, num_new)):
                index += 1
                continue
            if num_new > 1:
                num_later = len(running) - index - 1
                num_new = min(num_new, draft.chunk, draft.budget - num_later)
            blocks = NO_BLOCKS
            if request.num_computed_tokens + num_new > request.room:
                grown = self._kv_cache.grow(request, num_new)
                if grown is None:
                    self._saves.relieve(len(running))
                    # The victim is the last of the list: one that comes later, or this request itself.
                    self._preempt(running.pop(), draft)
                    continue
                blocks = grown
            index += 1
            put(request, num_new, blocks, num_tokens)

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Let the head of the queue in, as long as there are seats, tokens and blocks; nobody overtakes it.

        A newcomer must leave a free block for each running request, so that all can grow before anyone is preempted.
        """
        while self._waiting and draft.budget > 0 and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.peek()
            if self._loads.lacks(request):
                break
            most_new = min(draft.chunk, draft.budget)
            spare = len(self._running) + self._loads.claim_before(request)
            grant = self._kv_cache.admit(request, spare, most_new)
            if grant is None:
                self._saves.relieve_for(request, spare)
                break
            self._waiting.pop()
            self._gate.leave(request)
            self._loads.admitted(request)
            self._saves.admitted(request, grant.num_cached_tokens)
            if request.status is RequestStatus.WAITING:
                self._note_first_admission(request, grant.num_cached_tokens)
            request.start()
            request.num_computed_tokens = grant.num_cached_tokens
            bisect.insort(self._running, request, key=self._importance)
            draft.new.append(_describe(request))
            num_new = min(request.num_tokens - request.num_computed_tokens, most_new)
            draft.put(request, num_new, grant.blocks, request.num_tokens)

    def _close_step(self, draft: StepDraft, even_empty: bool) -> StepPlan:
        num_tokens = draft.num_tokens
        removed: Sequence[str] = ()
        if num_tokens > 0 or even_empty:
            self._num_steps += 1
            self._step_sizes.count(num_tokens)
            self.in_flight.launch(self._num_steps, draft.requests)
            removed, self._removed = self._removed, []
        num_common_blocks = self._kv_cache.num_common_blocks() if self._style.cascade else 0
        return draft.plan(self._num_steps, removed, num_common_blocks)

    def _preempt(self, request: Request, draft: StepDraft) -> None:
        """Take the blocks of a request that is off the running list; it computes its tokens again later.

        What steps in flight give it is dropped: they have sampled tokens, which will be sampled again.
        """
        self.in_flight.preempt(request)
        self._release(request)
        request.preempt()
        self._waiting.push(request)
        self._gate.enter(request)
        self._num_preemptions += 1
        draft.preempted = True

    def _note_first_admission(self, request: Request, num_cached_tokens: int) -> None:
        self._gate.observe_wait(request)
        request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
        self._kv_cache.note_lookup(request, num_cached_tokens)

    def _importance(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.config.policy == "priority" else 0, request.arrival)

    # --- the parts of update()

    def _advance(
        self, step_id: int, request: Request, row: tuple[int, int, int], sampled: Sequence[int], result: StepResult
    ) -> RequestUpdate | None:
        """Move one request on by its row and its sampled tokens; what comes after a stop is dropped."""
        num_again = None if sampled else self.in_flight.sat_out(step_id, request)
        before, num_new, samples = row
        computed = before + num_new - (num_again or 0)
        if computed // self._block_size > before // self._block_size:
            self._kv_cache.publish_computed(request, computed)
            self._saves.computed(request, before, computed)
        prompt_logprobs = new_prompt_logprobs(request, result) if result.prompt_logprobs else None
        if not samples or num_again is not None:
            return RequestUpdate(request.request_id, (), prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        if not sampled:
            return self._fail(request, FailureKind.STEP_FAILED)
        request.num_pending -= 1
        logprobs = result.logprobs.get(request.request_id) if result.logprobs else None
        update = advance(request, sampled, logprobs, prompt_logprobs)
        if self._is_piped:
            request.unshared = sampled
        return update if update.finish_reason is None else self._tell(request, update)

    def _tell(self, request: Request, update: RequestUpdate) -> RequestUpdate | None:
        """End a request if its update says so; returns the update, unless that waits for a transfer."""
        if update.finish_reason is None:
            return update
        self._release(request)
        number = self._forget(request, completed=update.failure is None)
        if number is not None:
            self._held.hold(number, update)
        return update if number is None else None

    def _fail(self, request: Request, kind: FailureKind) -> RequestUpdate:
        """End one request with an error. Its K/V may be wrong, so nothing of it is found again, here or behind."""
        if kind is FailureKind.NOTHING_LEFT and not request.sampling.forbids_tokens:
            kind = FailureKind.NOT_NUMBERS  # the client left all tokens, so it was the model that ruled them out
        self._num_nan_requests += kind is FailureKind.NOT_NUMBERS
        self.in_flight.forget(request)
        self._kv_cache.discard(request)
        self.connector.discard(request)
        self._removed.append(request.request_id)
        self._forget(request, completed=False)
        return RequestUpdate(request.request_id, (), FinishReason.ERROR, failure=kind)

    def _release(self, request: Request) -> None:
        """Take a running request's blocks, here and with the worker."""
        self.in_flight.forget(request)
        self._kv_cache.free(request.request_id)
        self._removed.append(request.request_id)

    def _drop_ended(self) -> None:
        self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]

    def _forget(self, request: Request, completed: bool) -> int | None:
        request.finish()
        del self._requests[request.request_id]
        return self.connector.ended(request, completed)


def _describe(request: Request) -> NewRow:
    # A copy of the tokens: the worker appends to its own, the scheduler to the request's.
    tokens = tuple(request.token_ids)
    return NewRow(request.request_id, tokens, request.num_prompt_tokens, request.sampling, request.eos_token_ids)


def _long_prefill_tokens(config: SchedulerConfig) -> int:
    budget = config.max_num_batched_tokens
    wanted = config.long_prefill_token_threshold or max(budget // 4, MIN_LONG_PREFILL_TOKENS)
    return min(wanted, budget)
