"""Requests that wait for K/V from elsewhere, off the queue, with the blocks that are kept for it; and what is offered.

    queue, arrival -> asking -> wanting -> loading -> queue, its blocks still held ("ready") -> running
                      the       blocks     the
                      connector            connector

A load becomes a prefix hit: blocks are published when all that was to fill them is known to be right. Memory: loads
leave a free block to each running request, and take half of the pool at most, but for one that is alone. No deadlock:
a load ends by itself, and where nothing runs and the head of the queue does not fit, the least important of those that
are ready lose their hold (what they brought stays cached as long as nobody needs the place).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagefleet_kv.port import KVConnector, LoadDone

from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.outputs import RequestUpdate
from pagefleet_engine.core.parking import NOTHING_SETTLED, Lost, Settled
from pagefleet_engine.core.request import FinishReason, Request, RequestStatus
from pagefleet_engine.core.step import FailureKind
from pagefleet_engine.core.waiting_queue import WaitingQueue

ASKS_PER_TURN = 16
"""Requests that a connector is asked about between two steps, so that a long queue delays no step."""

Importance = Callable[[Request], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request whose load has no blocks yet."""

    request: Request
    num_blocks: int
    """Of its prompt in each group that sees all of it, those that are cached here included."""


class KVLoads:
    """Owns a request from `park` until it is back in the queue, fails, or is dropped. Implements `parking.Wait`.

    Args:
        connector: brings K/V.
        kv_cache: takes it.
        waiting: the queue.
        importance: smaller is served first.
        clock: monotonic seconds.
    """

    def __init__(
        self, connector: KVConnector, kv_cache: KVCache, waiting: WaitingQueue, importance: Importance,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.enabled = connector.bell is not None
        """Whether there is anything to ask for at all."""
        self._connector = connector
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._importance = importance
        self._clock = clock
        self._asking: dict[str, Request] = {}
        self._wanting: list[_Wanted] = []
        """Most important first."""
        self._loading: dict[str, Request | None] = {}
        """None for a request that is gone: its blocks are kept until nothing writes to them any more."""
        self._ready: dict[str, Request] = {}
        self._tried: set[str] = set()
        """Requests that had a load since they were last in: they take what came and ask no more."""
        self._ended: list[LoadDone] = []

    @property
    def num_parked(self) -> int:
        """See Wait."""
        return len(self._asking) + len(self._wanting) + sum(request is not None for request in self._loading.values())

    @property
    def parked(self) -> list[Request]:
        """See Wait."""
        loading = [request for request in self._loading.values() if request is not None]
        return [*self._asking.values(), *(wanted.request for wanted in self._wanting), *loading]

    def park(self, request: Request) -> bool:
        """Take a request for which K/V may come that is not here; see Wait."""
        num_blocks = self._ask(request)
        if num_blocks == 0:
            return False
        request.park(self._clock())
        if num_blocks is None:
            self._asking[request.request_id] = request
        else:
            wanted = _Wanted(request, num_blocks)
            bisect.insort(self._wanting, wanted, key=lambda wanted: self._importance(wanted.request))
        return True

    def ended(self, done: Iterable[LoadDone]) -> None:
        """These loads are over, as the next `settle` takes in."""
        self._ended.extend(done)

    def settle(self, num_running: int) -> Settled:
        """Take in the loads that ended and begin those that can; see Wait. Puts requests into the queue itself."""
        if not self.enabled:
            return NOTHING_SETTLED
        done, self._ended = self._ended, []
        lost = [_lost(request, load) for load in done if (request := self._finish(load)) is not None]
        self._ask_again()
        self._give_up_holds(num_running)
        self._begin(num_running)
        return Settled(lost=lost)

    def claim_before(self, request: Request) -> int:
        """Blocks per group that must stay available when this request is admitted, for a more important load."""
        if not self._wanting:
            return 0
        first = self._wanting[0]
        return first.num_blocks if self._importance(first.request) < self._importance(request) else 0

    def lacks(self, request: Request) -> bool:
        """True if K/V may come for the head of the queue that is not here any more, as those before it took its place.

        It is better off with a load, which begins with the next `settle`, than let in.
        """
        return self._ask(request) != 0

    def admitted(self, request: Request) -> None:
        """The request is in, with blocks of its own."""
        if self.enabled:
            self._forget(request.request_id)

    def drop(self, request: Request) -> None:
        """See Wait. A load of the request goes on until the connector says that it ended."""
        if not self.enabled:
            return
        request_id = request.request_id
        if request.status is RequestStatus.PARKED:
            if self._loading.get(request_id) is request:
                self._loading[request_id] = None
                self._connector.cancel(request_id)
            elif self._asking.pop(request_id, None) is None:
                self._wanting = [wanted for wanted in self._wanting if wanted.request is not request]
        self._forget(request_id)

    def check_integrity(self) -> None:
        """Check that those requests have blocks that should.

        Raises:
            IntegrityError: the accounts do not add up.
        """
        if any(request.status is RequestStatus.PARKED for request in self._ready.values()):
            raise IntegrityError("a request in the queue waits for K/V")
        if self._kv_cache.holds.reserved_for != self._loading.keys() | self._ready.keys():
            raise IntegrityError("the requests with reservations are not those whose loads run or are ready")

    # --- the steps of settle()

    def _finish(self, load: LoadDone) -> Request | None:
        """Take in the end of a load; returns its request if that must not go on.

        One that has run before goes on in any case: its client has had tokens, so nobody else can take it over.
        """
        request_id, holds = load.request_id, self._kv_cache.holds
        if request_id not in self._loading:
            raise IntegrityError(f"a load ended that {request_id} did not begin")
        request = self._loading.pop(request_id)
        if request is None or (load.failure is not None and not request.num_preemptions):
            holds.unreserve(request_id)
            return request
        is_whole = holds.publish(request_id, load.num_blocks)
        if not is_whole:  # a window may have no use for a part: nothing is held that its request does not find
            holds.unreserve(request_id)
        self._requeue(request, holds=is_whole)
        return None

    def _ask_again(self) -> None:
        """Ask about the head of the queue, as what it had here may be gone, and about those who were to ask again."""
        for _ in range(ASKS_PER_TURN):
            if not self._waiting or not self.park(self._waiting.peek()):
                break
            self._waiting.pop()
        for request_id in list(itertools.islice(self._asking, ASKS_PER_TURN)):
            request = self._asking.pop(request_id)
            if not self.park(request):
                self._unpark(request)

    def _give_up_holds(self, num_running: int) -> None:
        """Let ready requests lose their blocks, least important first, while others cannot get on without.

        That may come to the head of the queue itself: its blocks are of no use to it when they are not found any more.
        """
        while self._ready and self._is_short(num_running):
            self._forget(max(self._ready.values(), key=self._importance).request_id)

    def _is_short(self, num_running: int) -> bool:
        num_available = self._kv_cache.num_available_blocks
        num_groups = self._kv_cache.num_groups
        if num_running:
            return num_available < num_running * num_groups
        head = self._waiting.peek()
        return num_available < self._kv_cache.taken_by_admission(head) + self.claim_before(head) * num_groups

    def _begin(self, num_running: int) -> None:
        """Give blocks to the most important loads, as far as they reach; nobody overtakes."""
        while self._wanting:
            request, num_blocks = self._wanting[0].request, self._wanting[0].num_blocks
            if request.request_id in self._loading:  # of an earlier request by that name, which was aborted
                return
            num_held = self._kv_cache.num_blocks_of(num_blocks)
            if not self._may_reserve(num_held):
                return
            spare = num_running * self._kv_cache.num_groups + self._needed_before(request)
            runs = self._kv_cache.reserve(request, num_blocks, spare)
            if runs is None:
                if self._kv_cache.holds.num_pins:
                    self._connector.relieve(num_held + spare - self._kv_cache.num_available_blocks)
                return
            del self._wanting[0]
            if not runs:  # others have computed it meanwhile
                self._requeue(request, holds=True)
                continue
            self._loading[request.request_id] = request
            self._connector.load(request, runs)

    def _may_reserve(self, num_blocks: int) -> bool:
        num_reserved = self._kv_cache.holds.num_reserved
        return num_reserved == 0 or num_reserved + num_blocks <= self._kv_cache.num_blocks // 2

    def _needed_before(self, request: Request) -> int:
        """Blocks that the head of the queue needs, if it is more important."""
        if not self._waiting:
            return 0
        head = self._waiting.peek()
        return self._kv_cache.taken_by_admission(head) if self._importance(head) < self._importance(request) else 0

    # --- parts

    def _ask(self, request: Request) -> int | None:
        """Return how many leading blocks the request could have by a load: 0 for no more than now; None: ask again."""
        if not self.enabled or not request.reads_prefix_cache or request.request_id in self._tried:
            return 0
        if request.request_id in self._loading:  # of an earlier request by that name, which was aborted
            return None
        num_cached = self._kv_cache.num_cached_tokens(request)
        num_tokens = self._connector.loadable(request, num_cached)
        if num_tokens is None:
            return None
        # The last token is computed, for its logits.
        num_blocks = min(num_tokens, request.num_tokens - 1) // self._kv_cache.block_size
        return num_blocks if num_blocks * self._kv_cache.block_size > num_cached else 0

    def _requeue(self, request: Request, *, holds: bool) -> None:
        """Put a request back into the queue, with its reservation if it `holds` one."""
        if holds:
            self._ready[request.request_id] = request
        self._tried.add(request.request_id)
        self._unpark(request)

    def _unpark(self, request: Request) -> None:
        request.kv_wait_s += self._clock() - request.parked_at
        request.unpark()
        self._waiting.push(request)

    def _forget(self, request_id: str) -> None:
        self._tried.discard(request_id)
        if self._ready.pop(request_id, None) is not None:
            self._kv_cache.holds.unreserve(request_id)


def _lost(request: Request, load: LoadDone) -> Lost:
    kind = FailureKind.KV_LOAD_FAILED
    update = RequestUpdate(request.request_id, (), FinishReason.ERROR, failure=kind, kv_fault=load.fault)
    return Lost(request, update)


class KVSaves:
    """Every full block of a running request is offered once per admission, in order, after the step that filled it.

    A full block is never written again, so the connector may read what it was offered until the block is given back;
    a pin keeps that from happening.
    """

    def __init__(self, connector: KVConnector, kv_cache: KVCache) -> None:
        self._enabled = connector.bell is not None
        self._connector = connector
        self._kv_cache = kv_cache
        self._block_size = kv_cache.block_size

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """Offer what was found in the cache."""
        if self._enabled and num_cached_tokens:
            self._offer(request, 0, num_cached_tokens // self._block_size)

    def computed(self, request: Request, num_before: int, num_computed_tokens: int) -> None:
        """Offer the blocks that a step, which is done, has filled beyond the first `num_before` tokens."""
        if self._enabled:
            self._offer(request, num_before // self._block_size, num_computed_tokens // self._block_size)

    def relieve(self, num_blocks: int) -> None:
        """The pool lacks so many blocks: where pins hold some, the connector is asked to do without."""
        if num_blocks > 0 and self._kv_cache.holds.num_pins:
            self._connector.relieve(num_blocks)

    def relieve_for(self, request: Request, spare_blocks: int) -> None:
        """A request is not admitted for want of blocks, of which `spare_blocks` per group are to stay."""
        if self._kv_cache.holds.num_pins:
            wanted = self._kv_cache.taken_by_admission(request) + spare_blocks * self._kv_cache.num_groups
            self.relieve(wanted - self._kv_cache.num_available_blocks)

    def settle(self, numbers: Iterable[int]) -> None:
        """Let blocks go whose saves have ended."""
        for number in numbers:
            self._kv_cache.holds.unpin(number)

    def check_integrity(self) -> None:
        """Check that nothing is pinned where there is no connector.

        Raises:
            IntegrityError: something is.
        """
        if not self._enabled and self._kv_cache.holds.num_pins:
            raise IntegrityError("blocks are pinned and there is no connector")

    def _offer(self, request: Request, first: int, last: int) -> None:
        runs = self._connector.wanted(request, self._kv_cache.block_runs(request, first, last))
        runs, staying = self._kv_cache.pinnable(request, runs)
        number = self._connector.save(request, runs) if runs else None
        if number is not None:
            self._kv_cache.holds.pin(number, [block for run in runs for block in run.blocks], staying)
