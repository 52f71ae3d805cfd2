"""Requests of one priority that wait: first come, first served within a tenant, fair shares of tokens between tenants.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time, which its requests move on by
their tokens over its weight, and the tenant that is furthest behind is next. A tenant that comes starts at the time of
the queue, not in the past: nobody saves up, and nobody pays for having been alone. Choosing looks at every waiting
tenant once, of which there are no more than keys in a file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pagefleet_router.admission.ticket import Ticket


class _Flow:
    """One tenant's requests. `start` is the virtual time at which the next of them is due."""

    __slots__ = ("start", "tickets", "weight")

    def __init__(self, start: float) -> None:
        self.start = start
        self.weight = 1.0
        self.tickets: deque[Ticket] = deque()


class FairQueue:
    """The requests of one priority."""

    def __init__(self) -> None:
        self._now = 0.0
        self._flows: dict[str, _Flow] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Ticket]:
        for flow in self._flows.values():
            yield from flow.tickets

    def push(self, ticket: Ticket, weight: float) -> None:
        """Let a request wait. `weight` is its tenant's share as of now."""
        flow = self._flows.get(ticket.tenant)
        if flow is None:
            flow = self._flows[ticket.tenant] = _Flow(self._now)
        elif not flow.tickets:
            flow.start = max(flow.start, self._now)
        flow.weight = weight
        flow.tickets.append(ticket)
        self._length += 1

    def pop(self) -> Ticket:
        """Return the request that is next, and charge its tenant the expected tokens."""
        flow = min((one for one in self._flows.values() if one.tickets), key=_start)
        self._now = max(self._now, flow.start)
        ticket = flow.tickets.popleft()
        flow.start += ticket.cost / flow.weight
        self._shrink()
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Forget a request that waits here."""
        self._flows[ticket.tenant].tickets.remove(ticket)
        self._shrink()

    def correct(self, tenant: str, num_tokens: float) -> None:
        """Charge a tenant the tokens that its requests took beyond what was expected; below zero: give back.

        A queue that has been empty since then has forgotten.
        """
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.start += num_tokens / flow.weight

    def newest(self) -> Ticket:
        """Return the request that came last."""
        return max((flow.tickets[-1] for flow in self._flows.values() if flow.tickets), key=lambda one: one.number)

    def _shrink(self) -> None:
        self._length -= 1
        if not self._length:
            self._flows.clear()
            self._now = 0.0


def _start(flow: _Flow) -> float:
    return flow.start
