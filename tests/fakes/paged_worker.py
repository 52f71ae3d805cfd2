"""An engine without tensors: pages that remember whose prefix they hold, and a model that is a hash.

`PagedWorker` stores for every slot of every block the KV group and the digest of the whole prefix that was computed
there, and checks on every row that its context, read through its block tables as far back as the groups' windows reach,
is the request's own. Any wrong reuse of a block shows. The
next token follows from the digest of all tokens before it, so a disturbed run must give what `complete` gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.kv_groups import KVGroups, group_layers
from pagefleet_engine.core.micro_batches import StepStyle
from pagefleet_engine.core.outputs import RequestUpdate
from pagefleet_engine.core.parking import Suppliers
from pagefleet_engine.core.request import FinishReason, Request
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import (
    FailureKind,
    NewRow,
    ScheduledRow,
    ScheduledRows,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from pagefleet_engine.engine_core.masks import stretch
from pagefleet_kv.port import KVConnector
from pagefleet_protocol.block_hash import BlockHash, PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.trie_forms import TrieMatcher, TrieSource, trie_of

VOCAB_SIZE = 61
EOS = 7
SCOPE = PrefixScope("fake")


def _extend(digest: int, token: int) -> int:
    return (digest * 6364136223846793005 + token + 1442695040888963407) % 2**64


def _next_token(digest: int) -> int:
    return (digest >> 33) % VOCAB_SIZE


def _next_allowed(digest: int, allowed: Sequence[int]) -> int:
    return allowed[_next_token(digest) % len(allowed)]


def _root(scope: PrefixScope) -> int:
    return crc32(repr(scope).encode())


def contents(
    token_ids: Sequence[int], scope: PrefixScope, block: int, block_size: int, group: int = 0
) -> list[tuple[int, int]]:
    """What the slots of a request's full block hold once it is computed."""
    digest, digests = _root(scope), []
    for token in token_ids[: (block + 1) * block_size]:
        digest = _extend(digest, token)
        digests.append((group, digest))
    return digests[block * block_size :]


def complete(prompt: Sequence[int], sampling: SamplingParams, scope: PrefixScope, max_model_len: int) -> list[int]:
    """Return the output of a request that nothing disturbs, by rules written apart from the scheduler's."""
    digest = _root(scope)
    for token in prompt:
        digest = _extend(digest, token)
    output: list[int] = []
    form = None if sampling.structured_outputs is None else trie_of(sampling.structured_outputs)
    while True:
        output.append(_next_token(digest) if form is None else _next_allowed(digest, form.allowed))
        digest = _extend(digest, output[-1])
        may_stop = len(output) >= sampling.min_tokens
        if may_stop and (output[-1] in sampling.stop_token_ids or (output[-1] == EOS and not sampling.ignore_eos)):
            return output
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return output
        if form is not None:
            form = form.children.get(output[-1])
            if form is None or form.is_finished:
                return output


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    digests: list[int]
    tables: list[list[int]]
    """Per KV group; block numbers out of the window stay in it unread."""
    num_computed: int | None = None
    """None before the first step, when the plan says what is cached."""

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.token_ids.append(token)
            self.digests.append(_extend(self.digests[-1], token))


class PagedWorker:
    """Executes plans, and fails the test when a plan breaks the contract of `core/step.py`."""

    def __init__(self, block_size: int, max_model_len: int, groups: KVGroups) -> None:
        self._max_model_len = max_model_len
        self.windows = [group.window for group in groups.groups]
        self._chunked = [group.chunked for group in groups.groups]
        self.scopes: dict[str, PrefixScope] = {}
        """Request id -> scope, which a worker is not told."""
        self.failing: dict[str, FailureKind] = {}
        """Requests that fail when next in a step."""
        self.num_computed_tokens = 0
        self._block_size = block_size
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        """Block and offset -> group and digest of the prefix."""
        self._rows: dict[str, _Row] = {}

    def read(self, block: int) -> list[tuple[int, int] | None]:
        """What the slots of a block hold: group and digest of the prefix."""
        return [self._slots.get((block, offset)) for offset in range(self._block_size)]

    def write(self, block: int, content: Sequence[tuple[int, int]]) -> None:
        """Fill a block from outside of any step."""
        for offset, slot in enumerate(content):
            self._slots[block, offset] = slot

    @property
    def request_ids(self) -> set[str]:
        """Requests that the worker holds."""
        return set(self._rows)

    def execute(self, plan: StepPlan) -> StepResult:
        """Write the step's slots and sample."""
        assert plan.num_tokens == sum(row.num_new_tokens for row in plan.rows) > 0
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        for request_id in plan.removed:
            del self._rows[request_id]
        for new in plan.new:
            self._enter(new)
        for request_id, token_ids in plan.told.items():
            self._rows[request_id].extend(token_ids)
        for scheduled in plan.rows:
            self._check_row(scheduled)
        self._check_common(plan)
        for scheduled in plan.rows:
            self._write(scheduled)
        for scheduled in plan.rows:  # again, as a write of this step may have gone to a shared block
            self._check_context(scheduled, scheduled.num_computed_tokens + scheduled.num_new_tokens)
        self.num_computed_tokens += plan.num_tokens
        failed = {
            row.request_id: self.failing.pop(row.request_id) for row in plan.rows if row.request_id in self.failing
        }
        prompt_logprobs = {row.request_id: entries for row in plan.rows if (entries := self._prompt_logprobs(row))}
        assert all(plan.rows[row].samples for row in plan.masked)
        sampled = [[] if row in plan.masked else self._sample(one) for row, one in enumerate(plan.rows)]
        # A failed row has a token too, which the next step may compute already; it is only not to be told.
        sampled = [[] if row.request_id in failed else tokens for row, tokens in zip(plan.rows, sampled, strict=True)]
        return StepResult(sampled, prompt_logprobs=prompt_logprobs, failed=failed)

    def sample_masked(self, request_id: str, allowed: Sequence[int]) -> int:
        """Sample for a masked row of a step that was executed."""
        row = self._rows[request_id]
        token = _next_allowed(row.digests[-1], allowed)
        row.extend([token])
        return token

    def take_back(self, request_id: str) -> None:
        """The last token that was computed is computed again."""
        row = self._rows[request_id]
        assert row.num_computed is not None
        row.num_computed -= 1

    def _enter(self, new: NewRow) -> None:
        assert new.request_id not in self._rows
        row = _Row(list(new.token_ids), new.num_prompt_tokens, new.sampling, [], [[] for _ in self.windows])
        digest = _root(self.scopes[new.request_id])
        for token in new.token_ids:
            digest = _extend(digest, token)
            row.digests.append(digest)
        self._rows[new.request_id] = row

    def _check_row(self, scheduled: ScheduledRow) -> None:
        row = self._rows[scheduled.request_id]
        if scheduled.new_blocks:
            for table, blocks in zip(row.tables, scheduled.new_blocks, strict=True):
                table.extend(blocks)
        end = scheduled.num_computed_tokens + scheduled.num_new_tokens
        assert scheduled.num_new_tokens > 0
        assert row.num_computed in (None, scheduled.num_computed_tokens)
        assert end <= len(row.token_ids)
        assert end <= min(map(len, row.tables)) * self._block_size
        assert scheduled.samples == (end == len(row.token_ids))
        used = [
            block
            for group, table in enumerate(row.tables)
            for block in table[self._first_visible(group, scheduled) // self._block_size :]
        ]
        assert len(set(used)) == len(used)
        self._check_context(scheduled, scheduled.num_computed_tokens)
        row.num_computed = end

    def _check_common(self, plan: StepPlan) -> None:
        """What all rows share is the same in all tables that see everything, and lies before what the step computes."""
        count = plan.num_common_blocks
        if count == 0:
            return
        group = self.windows.index(None)
        shared = self._rows[plan.rows[0].request_id].tables[group][:count]
        for scheduled in plan.rows:
            assert self._rows[scheduled.request_id].tables[group][:count] == shared
            assert scheduled.num_computed_tokens >= count * self._block_size

    def _first_visible(self, group: int, scheduled: ScheduledRow) -> int:
        """The first position that a token of the step sees in this group."""
        window, start = self.windows[group], scheduled.num_computed_tokens
        if window is None:
            return 0
        return start - start % window if self._chunked[group] else max(0, start - window + 1)

    def _check_context(self, scheduled: ScheduledRow, num_tokens: int) -> None:
        row = self._rows[scheduled.request_id]
        for group in range(len(self.windows)):
            for position in range(self._first_visible(group, scheduled), num_tokens):
                found = self._slots.get(self._slot(row, group, position))
                assert found == (group, row.digests[position]), f"{scheduled.request_id} at {position} in group {group}"

    def _write(self, scheduled: ScheduledRow) -> None:
        row = self._rows[scheduled.request_id]
        start = scheduled.num_computed_tokens
        for group in range(len(self.windows)):
            for position in range(start, start + scheduled.num_new_tokens):
                self._slots[self._slot(row, group, position)] = (group, row.digests[position])

    def _sample(self, scheduled: ScheduledRow) -> list[int]:
        if not scheduled.samples:
            return []
        row = self._rows[scheduled.request_id]
        sampling = row.sampling
        assert sampling.max_tokens is None or len(row.token_ids) < row.num_prompt_tokens + sampling.max_tokens
        assert len(row.token_ids) < self._max_model_len
        token = _next_token(row.digests[-1])
        row.extend([token])
        return [token]

    def _prompt_logprobs(self, scheduled: ScheduledRow) -> list[TokenLogprobs]:
        row = self._rows[scheduled.request_id]
        if row.sampling.prompt_logprobs is None:
            return []
        start = scheduled.num_computed_tokens + 1
        end = min(row.num_prompt_tokens, start + scheduled.num_new_tokens)
        return [TokenLogprobs((row.token_ids[position],), (-float(position),), 1) for position in range(start, end)]

    def _slot(self, row: _Row, group: int, position: int) -> tuple[int, int]:
        return row.tables[group][position // self._block_size], position % self._block_size


class FirstStage:
    """Knows the tokens that plans tell, as it samples none, and fails the test where one is missing."""

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}

    def execute(self, plan: StepPlan) -> None:
        """Take the plan's difference in."""
        for request_id in plan.removed:
            del self._known[request_id]
        for new in plan.new:
            self._known[new.request_id] = list(new.token_ids)
        for told in (plan.sampled, plan.told):
            for request_id, token_ids in told.items():
                self._known[request_id] += token_ids
        for row in plan.rows:
            end = row.num_computed_tokens + row.num_new_tokens
            assert end <= len(self._known[row.request_id])
            assert row.samples == (end == len(self._known[row.request_id]))


class ToldCache:
    """What a listener believes to be cached; fails the test when it is told what it knows already."""

    def __init__(self) -> None:
        self.contents: set[BlockHash] = set()
        self.num_cleared = 0

    def stored(self, contents: Sequence[BlockHash]) -> None:
        assert len(set(contents)) == len(contents) > 0
        assert self.contents.isdisjoint(contents)
        self.contents.update(contents)

    def removed(self, contents: Sequence[BlockHash]) -> None:
        assert len(set(contents)) == len(contents) > 0
        assert self.contents.issuperset(contents)
        self.contents.difference_update(contents)

    def cleared(self) -> None:
        self.contents.clear()
        self.num_cleared += 1


@dataclass(slots=True)
class Outcome:
    """What a client saw of one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int | None = None
    kv_wait_s: float | None = None
    failure: FailureKind | None = None

    def take(self, update: RequestUpdate) -> None:
        """Add one update; nothing may follow the last."""
        assert self.finish_reason is None
        if update.num_cached_tokens is not None:
            assert not self.token_ids
            self.num_cached_tokens = update.num_cached_tokens
            assert update.waits is not None
            self.kv_wait_s = update.waits.kv_s
        else:
            assert update.waits is None
        self.token_ids += update.new_token_ids
        self.prompt_logprobs += update.prompt_logprobs or ()
        self.finish_reason = update.finish_reason
        self.stop_token_id = update.stop_token_id
        self.failure = update.failure


class FakeEngine:
    """Scheduler and worker in a loop, checked after every step. `windows` are those of the model's layers; where they
    are of one size they may be chunks."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        config: SchedulerConfig | None = None,
        max_model_len: int = 1_000,
        enable_prefix_caching: bool = True,
        max_in_flight: int = 1,
        windows: Sequence[int | None] = (None,),
        chunked: bool = False,
        cascade: bool = False,
        num_stages: int = 1,
        connector: KVConnector | None = None,
    ) -> None:
        config = config or SchedulerConfig()
        groups = group_layers(windows, chunked=chunked and len({*windows} - {None}) == 1)
        self.told = ToldCache()
        chunk = config.max_num_batched_tokens
        self.kv_cache = KVCache(num_blocks, block_size, enable_prefix_caching, groups, chunk, self.told)
        self.now = 0.0
        limits = ModelLimits(max_model_len, VOCAB_SIZE)
        self.scheduler = Scheduler(
            config,
            self.kv_cache,
            limits,
            clock=lambda: self.now,
            style=StepStyle(cascade, num_stages),
            suppliers=Suppliers(connector, TrieSource()),
        )
        self.worker = PagedWorker(block_size, self.scheduler.max_model_len, groups)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._max_in_flight = max_in_flight
        self._sampled: set[int] = set()
        """Steps that have no masked rows, or had them sampled."""
        self.outcomes: dict[str, Outcome] = {}
        self.plans: list[StepPlan] = []
        self.first_stage = None if num_stages == 1 else FirstStage()
        self._due = 0 if num_stages == 1 else -1

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        scope: PrefixScope = SCOPE,
        resumed: Sequence[int] = (),
    ) -> Request:
        """Queue a request; by default it asks for four tokens and ignores the end-of-text token."""
        sampling = sampling or SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        request = Request(request_id, prompt, sampling, (EOS,), scope, priority, resumed)
        ended = self.scheduler.add(request)
        self.worker.scopes[request_id] = scope
        self.outcomes[request_id] = Outcome()
        self.take([] if ended is None else [ended])
        return request

    def abort(self, *request_ids: str) -> list[str]:
        """Abort, and note it in the outcomes."""
        aborted = self.scheduler.abort(request_ids)
        for request_id in aborted:
            self.outcomes[request_id].finish_reason = FinishReason.ABORT
        self.scheduler.check_integrity()
        return aborted

    def launch(self) -> StepPlan:
        """Settle transfers, then plan one step and compute it; its result is not told yet."""
        if self.in_flight:
            self.sample_masked()
        if self.in_flight and self.in_flight[-1][0].step_id not in self._sampled:
            return StepPlan(0, (), (), ScheduledRows.of(()), 0)
        self.take(self.scheduler.settle())
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan.num_tokens > 0:
            self.plans.append(plan)
            if self.first_stage is not None:
                self.first_stage.execute(plan)
            self.in_flight.append((plan, self.worker.execute(plan)))
            if not plan.masked:
                self._sampled.add(plan.step_id)
        return plan

    def sample_masked(self) -> None:
        """Sample the masked rows of the oldest step, of a pipeline of the newest.

        Some have no mask in time, and some need none to be known.
        """
        plan, result = self.in_flight[self._due]
        if plan.step_id in self._sampled:
            return
        self._sampled.add(plan.step_id)
        for row, request in zip(*self.scheduler.in_flight.to_mask(plan), strict=True):
            name, matcher = request.request_id, request.matcher
            assert isinstance(matcher, TrieMatcher)
            assert matcher.node is not None
            mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
            matcher.fill(mask)
            if crc32(f"{plan.step_id} {name}".encode()) % 4 == 0:
                self.scheduler.sit_out(plan, request)
                self.worker.take_back(name)
            elif tokens := stretch(request, mask):
                update = self.scheduler.force(plan, request, tokens)
                self.take([] if update is None else [update])
            else:
                token = self.worker.sample_masked(name, matcher.node.allowed)
                sampled = result.sampled[row]
                assert isinstance(sampled, list)
                sampled += [] if name in result.failed else [token]

    def land(self) -> None:
        """Tell the scheduler the result of the oldest step in flight."""
        self.sample_masked()
        self.take(self.scheduler.update(*self.in_flight.popleft()))

    def step(self) -> StepPlan:
        """Launch steps up to `max_in_flight`, land the oldest, and return the plan launched last."""
        plan = self.launch()
        while plan.num_tokens > 0 and len(self.in_flight) < self._max_in_flight:
            plan = self.launch()
        if self.in_flight:
            self.land()
        return plan

    def take(self, updates: Sequence[RequestUpdate]) -> None:
        """Note the updates of one step."""
        for update in updates:
            self.outcomes[update.request_id].take(update)
        self.scheduler.check_integrity()

    def run(self, max_steps: int = 2_000) -> None:
        """Step until all requests have ended and nothing is in flight; every step must compute something."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                return
            assert self.step().num_tokens > 0 or self._max_in_flight > 1
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")
