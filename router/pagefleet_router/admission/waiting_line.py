"""All requests that wait for one model: a fair queue for each priority, the larger ones first.

Most turns go to the largest priority that waits; every sixteenth goes to the other one that has been passed over for
longest, so that with B priorities waiting each gets at least one turn in 16 (B - 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pagefleet_router.admission.admission import Ticket

TURNS = 16


class _Band:
    __slots__ = ("cost", "last_turn", "queue")

    def __init__(self, turn: int) -> None:
        self.queue = FairQueue()
        self.cost = 0
        self.last_turn = turn


class WaitingLine:
    """The requests that wait for one model.

    Args:
        size: requests that may wait in each priority above zero, and in those from zero down together.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._bands: dict[int, _Band] = {}
        self._turn = 0
        self.num_waiting = 0
        self.num_prompt_tokens = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Ticket]:
        for band in self._bands.values():
            yield from band.queue

    def is_full(self, priority: int) -> bool:
        """Whether one more request of a priority is too many."""
        if priority > 0:
            band = self._bands.get(priority)
            return (len(band.queue) if band is not None else 0) >= self._size
        return sum(len(band.queue) for level, band in self._bands.items() if level <= 0) >= self._size

    def sheddable(self, priority: int) -> Ticket | None:
        """Return who makes way for a more urgent request: the last to come of the least urgent, if below zero."""
        lowest = min(self._bands, default=0)
        return self._bands[lowest].queue.newest() if lowest < min(0, priority) else None

    def cost_ahead(self, priority: int) -> int:
        """Return the tokens that those take who come before a new request of a priority."""
        return sum(band.cost for level, band in self._bands.items() if level >= priority)

    def push(self, ticket: Ticket, weight: float) -> None:
        """Let a request wait."""
        band = self._bands.get(ticket.priority)
        if band is None:
            band = self._bands[ticket.priority] = _Band(self._turn)
        band.queue.push(ticket, weight)
        band.cost += ticket.cost
        self._count(ticket, 1)

    def pop(self) -> Ticket:
        """Return the request whose turn it is."""
        self._turn += 1
        level = max(self._bands)
        if self._turn % TURNS == 0 and len(self._bands) > 1:
            level = min((other for other in self._bands if other != level), key=self._last_turn)
        band = self._bands[level]
        band.last_turn = self._turn
        ticket = band.queue.pop()
        self._took_out(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Forget a request that waits."""
        self._bands[ticket.priority].queue.remove(ticket)
        self._took_out(ticket)

    def correct(self, ticket: Ticket, num_tokens: float) -> None:
        """Charge the tenant of a request that was let in what it took beyond its cost."""
        band = self._bands.get(ticket.priority)
        if band is not None:
            band.queue.correct(ticket.tenant, num_tokens)

    def _last_turn(self, level: int) -> int:
        return self._bands[level].last_turn

    def _took_out(self, ticket: Ticket) -> None:
        band = self._bands[ticket.priority]
        band.cost -= ticket.cost
        if not band.queue:
            del self._bands[ticket.priority]
        self._count(ticket, -1)

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.num_waiting += sign
        self.num_prompt_tokens += sign * ticket.num_prompt_tokens
        self.num_bytes += sign * ticket.num_bytes


# Requests of one priority that wait: first come, first served within a tenant, fair shares of tokens between tenants.
# Start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant has a virtual time, which its requests move on by
# their tokens over its weight, and the tenant that is furthest behind is next. A tenant that comes starts at the time
# of the queue, not in the past: nobody saves up, and nobody pays for having been alone. Choosing looks at every waiting
# tenant once, of which there are no more than keys in a file.
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
