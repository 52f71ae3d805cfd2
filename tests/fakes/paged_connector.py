"""A connector for `FakeEngine`: what it brings, when, and how it fails is a script; it checks all that it is told.

While a load runs it writes nonsense to all of its blocks, and once more when it is cancelled; only the leading blocks
that come right hold what they should when it ends. So a block that is used too early, or reused too early, shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet_engine.core.request import Request, RequestStatus
from pagefleet_kv.port import BlockRun, KVConnector, KVRequest, KVTransferStats, LoadDone, TransfersDone

from tests.fakes.paged_worker import FakeEngine, PagedWorker, contents

EVERYTHING = 1_000
_NONSENSE = (0, -1)


@dataclass(frozen=True, slots=True)
class Script:
    """What becomes of the K/V of one request. Numbers of turns pass with `PagedConnector.turn`."""

    has: int = EVERYTHING
    """Leading blocks of its tokens that can be brought; 0: none."""
    unsure_turns: int = 0
    """How long that is not known."""
    turns: int = 1
    """How long its load takes."""
    brings: int = EVERYTHING
    """Leading blocks of the load that come right."""
    failure: str | None = None
    save_turns: int = 0
    """How long its saved blocks are kept; 0: not at all."""


@dataclass(slots=True)
class _Load:
    request: Request
    runs: Sequence[BlockRun]
    turns: int
    cancelled: bool = False

    @property
    def blocks(self) -> list[int]:
        return [block for run in self.runs for block in run.blocks]


@dataclass(slots=True)
class _Save:
    blocks: Sequence[int]
    content: list[list[tuple[int, int] | None]]
    turns: int


@dataclass(slots=True)
class PagedConnector(KVConnector):
    """Implements `KVConnector`; requests without a script of their own follow `default`."""

    default: Script = field(default_factory=lambda: Script(has=0))
    scripts: dict[str, Script] = field(default_factory=dict)
    bell: int | None = 0
    worker: PagedWorker = field(init=False)
    block_size: int = field(init=False)
    now: int = 0
    loads: dict[str, _Load] = field(default_factory=dict)
    saves: dict[int, _Save] = field(default_factory=dict)
    open_requests: set[Request] = field(default_factory=set)
    ended_requests: Counter[Request] = field(default_factory=Counter)
    completed: list[str] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Requests in the order of the questions."""
    offered: dict[str, list[int]] = field(default_factory=dict)
    """First blocks of what was offered of each request."""
    num_loads: int = 0
    num_resets: int = 0
    is_closed: bool = False
    is_draining: bool = False
    _num_saves: int = 0
    _answers: dict[str, int | None] = field(default_factory=dict)
    _num_saved: dict[str, int] = field(default_factory=dict)

    def attach(self, engine: FakeEngine) -> None:
        """Serve this engine."""
        self.worker = engine.worker
        self.block_size = engine.kv_cache.block_size

    def sees_all(self, group: int) -> bool:
        """Whether a KV group has no window."""
        return self.worker.windows[group] is None

    def turn(self) -> None:
        """Let time pass."""
        self.now += 1
        for load in self.loads.values():
            load.turns -= 1
            self._scribble(load)
        for save in self.saves.values():
            save.turns -= 1

    @property
    def is_busy(self) -> bool:
        """Whether a load or a save is under way, or an answer still to come."""
        return bool(self.loads or self.saves or None in self._answers.values())

    def arrived(self, request: KVRequest) -> None:
        assert isinstance(request, Request)
        assert request not in self.open_requests
        self.open_requests.add(request)

    def loadable(self, request: KVRequest, num_cached_tokens: int) -> int | None:
        assert isinstance(request, Request)
        assert request.status is not RequestStatus.FINISHED
        assert num_cached_tokens % self.block_size == 0
        self.asked.append(request.request_id)
        script = self._script(request.request_id)
        answer: int | None = min(script.has, request.num_tokens // self.block_size) * self.block_size
        if answer and self.now < script.unsure_turns:
            answer = None
        self._answers[request.request_id] = answer
        return answer

    def load(self, request: KVRequest, runs: Sequence[BlockRun]) -> None:
        assert isinstance(request, Request)
        assert request.status is RequestStatus.PARKED
        assert request.request_id not in self.loads
        answer = self._answers.pop(request.request_id)
        assert answer is not None
        assert len({run.group for run in runs}) == len(runs) > 0
        for run in runs:
            last = run.first + len(run.blocks)
            assert run.first * self.block_size < answer
            assert last == min(answer, request.num_tokens - 1) // self.block_size
            assert list(run.hashes) == request.block_hashes[run.first : last]
        load = _Load(request, runs, self._script(request.request_id).turns)
        busy = {block for other in self.loads.values() for block in other.blocks}
        assert len(set(load.blocks)) == len(load.blocks)
        assert busy.isdisjoint(load.blocks)
        self.num_loads += 1
        self.loads[request.request_id] = load
        self._scribble(load)

    def cancel(self, request_id: str) -> None:
        self.loads[request_id].cancelled = True

    def save(self, request: KVRequest, runs: Sequence[BlockRun]) -> int | None:
        assert isinstance(request, Request)
        name = request.request_id
        content = []
        (last,) = {run.first + len(run.blocks) for run in runs}
        for run in runs:
            assert len(run.blocks) == len(run.hashes) > 0
            if self.sees_all(run.group):
                assert run.first in (0, self._num_saved.get(name, 0))
                self.offered.setdefault(name, []).append(run.first)
            for index, block in enumerate(run.blocks, run.first):
                content.append(self.worker.read(block))
                assert content[-1] == contents(request.token_ids, request.scope, index, self.block_size, run.group)
        self._num_saved[name] = last
        turns = self._script(name).save_turns
        if not turns:
            return None
        self._num_saves += 1
        self.saves[self._num_saves] = _Save([block for run in runs for block in run.blocks], content, turns)
        return self._num_saves

    def relieve(self, num_blocks: int) -> None:
        assert num_blocks > 0
        assert self.saves, "nothing is kept"

    def discard(self, request: KVRequest) -> None:
        assert isinstance(request, Request)
        assert request in self.open_requests
        self.discarded.append(request.request_id)

    def ended(self, request: KVRequest, completed: bool) -> int | None:
        assert isinstance(request, Request)
        assert request.status is RequestStatus.FINISHED
        self.open_requests.remove(request)
        self.ended_requests[request] += 1
        assert self.ended_requests[request] == 1
        self._answers.pop(request.request_id, None)
        self._num_saved.pop(request.request_id, None)
        if completed:
            self.completed.append(request.request_id)
        return None

    def finished(self) -> TransfersDone:
        loads = [load for load in self.loads.values() if load.turns <= 0]
        saves = [number for number, save in self.saves.items() if save.turns <= 0]
        done = [self._end(load) for load in loads]
        for number in saves:
            save = self.saves.pop(number)
            assert [self.worker.read(block) for block in save.blocks] == save.content, "it was kept as it was"
        return TransfersDone(done, saves)

    def drain(self) -> None:
        self.is_draining = True

    @property
    def num_owed(self) -> int:
        return 0

    def reset(self) -> None:
        self.num_resets += 1

    def stats(self) -> KVTransferStats:
        return KVTransferStats({"loads": float(self.num_loads)}, {"loading": float(len(self.loads))})

    def close(self) -> None:
        self.is_closed = True

    def _script(self, request_id: str) -> Script:
        return self.scripts.get(request_id, self.default)

    def _scribble(self, load: _Load) -> None:
        for block in load.blocks:
            self.worker.write(block, [_NONSENSE] * self.block_size)

    def _end(self, load: _Load) -> LoadDone:
        name = load.request.request_id
        del self.loads[name]
        script = self._script(name)
        if load.cancelled:
            return LoadDone(name, 0)
        count = 0 if script.failure else min(script.brings, len(load.blocks))
        request = load.request
        places = [(run.group, index) for run in load.runs for index in range(run.first, run.first + len(run.blocks))]
        for block, (group, index) in zip(load.blocks[:count], places, strict=False):
            self.worker.write(block, contents(request.token_ids, request.scope, index, self.block_size, group))
        return LoadDone(name, count, script.failure)
