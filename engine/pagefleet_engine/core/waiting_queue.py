"""The order in which requests wait: first come first served, or by priority. Every operation is O(log n) or better."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from pagefleet_engine.config import Policy
from pagefleet_engine.core.request import Request


class WaitingQueue(Protocol):
    """Requests that are not running, most urgent first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Visit all, in no particular order."""
        ...

    def push(self, request: Request) -> None:
        """Add a request that has just arrived."""
        ...

    def put_back(self, request: Request) -> None:
        """Add a request that has been out, ahead of all that arrived later with the same right to run."""
        ...

    def peek(self) -> Request:
        """Return the next request; the queue must not be empty."""
        ...

    def pop(self) -> Request:
        """Remove and return the next request; the queue must not be empty."""
        ...

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue, wherever it stands."""
        ...


class FcfsQueue:
    """First come, first served. Preempted requests return to the front, newest first, which restores arrival order."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        """Add at the back."""
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Add at the front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """Return the front."""
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        """Remove the front."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Take out a request in O(1)."""
        del self._requests[request.request_id]


class PriorityQueue:
    """Smaller `priority` first (where that counts), then arrival; a request may come back to any place.

    A heap cannot remove from its middle: what is removed stays in it until it surfaces, or until such entries are the
    larger part and the heap is built anew, which keeps both time and memory in proportion to the live requests.
    """

    def __init__(self, by_priority: bool = True) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[int, int]] = []
        self._live: dict[tuple[int, int], Request] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live.values())

    def push(self, request: Request) -> None:
        """Add in its place."""
        key = self._key(request)
        self._live[key] = request
        heapq.heappush(self._heap, key)

    def put_back(self, request: Request) -> None:
        """Add in its place: its arrival is older than that of its equals."""
        self.push(request)

    def peek(self) -> Request:
        """Return the most urgent."""
        while self._heap[0] not in self._live:
            heapq.heappop(self._heap)
        return self._live[self._heap[0]]

    def pop(self) -> Request:
        """Remove the most urgent."""
        self.peek()
        return self._live.pop(heapq.heappop(self._heap))

    def remove(self, request: Request) -> None:
        """Take out a request in amortized O(1)."""
        del self._live[self._key(request)]
        if len(self._heap) > 2 * len(self._live):
            self._heap = list(self._live)
            heapq.heapify(self._heap)

    def _key(self, request: Request) -> tuple[int, int]:
        return (request.priority if self._by_priority else 0, request.arrival)


def make_waiting_queue(policy: Policy, to_any_place: bool = False) -> WaitingQueue:
    """Return an empty queue of that policy.

    `to_any_place`: what is put back may have to stand behind requests that are in the queue.
    """
    by_priority = policy == "priority"
    return PriorityQueue(by_priority) if by_priority or to_any_place else FcfsQueue()
