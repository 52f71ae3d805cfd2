"""Admission as it is by default: at once where engines have room, in a fair order where they have not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.fault_book import FaultBook
from pagefleet_protocol.tenants import MAX_PRIORITY, Tenant
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pagefleet_router.admission import refusals
from pagefleet_router.admission.admission import Ticket, Waiter
from pagefleet_router.admission.model_gate import ModelGate
from pagefleet_router.admission.rate_limits import RateLimits
from pagefleet_router.admission.room import Engines
from pagefleet_router.errors import Refusal, no_engine
from pagefleet_router.request_view import ANONYMOUS, RequestView
from pagefleet_router.telemetry.faults import REFUSED
from pagefleet_router.telemetry.histogram import SecondsHistogram

MAX_BURST = 128
"""Requests let in in one go, so that the event loop has other turns between; the next end or `check` goes on."""
COLD_RETRY_S = 10.0
"""When to come back to a model that no engine serves yet."""
_ANYBODY = Tenant(ANONYMOUS, max_priority=MAX_PRIORITY)
"""Where no keys are asked for, nobody's word weighs more than another's."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Seconds and bytes; counts are for this process."""

    queue_size: int
    queue_timeout: float
    cold_start_timeout: float
    max_waiting_bytes: int
    num_processes: int = 1
    """Processes that share engines and tenants' limits evenly."""


class Gate:
    """Implements Admission.

    Args:
        engines: tells of rooms.
        limits: how many may wait, and for how long.
        tenant_named: returns a tenant's attributes as of now, None for a tenant without.
        clock: monotonic seconds.
        spread: returns numbers from 0 to 1, for Retry-After.
        faults: where refusals are noted for the console; None: there is none.
    """

    def __init__(
        self, engines: Engines, limits: GateLimits, tenant_named: Callable[[str], Tenant | None],
        clock: Callable[[], float], spread: Callable[[], float], faults: FaultBook | None = None,
    ) -> None:  # fmt: skip
        self.refused: Counter[tuple[str, str]] = Counter()
        """By code and tenant."""
        self.waits = SecondsHistogram()
        self._engines = engines
        self._limits = limits
        self._tenant_named = tenant_named
        self._clock = clock
        self._spread = spread
        self._faults = faults
        self._rates = RateLimits(1.0 / limits.num_processes)
        self._gates: dict[str, ModelGate] = {}
        self._waiting: dict[Waiter, Ticket] = {}
        self._unsettled: dict[Waiter, Ticket] = {}
        """Those in that have waited, or whose tenant has limits: the others' tickets would say nothing."""
        self._num_waiting_bytes = 0
        self._num_arrived = 0

    @property
    def gates(self) -> Mapping[str, ModelGate]:
        """By model."""
        return self._gates

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for any model."""
        return len(self._waiting)

    def waiting_by_tenant(self) -> Counter[str]:
        """Return how many requests of each tenant wait."""
        return Counter(ticket.tenant for ticket in self._waiting.values())

    def refused_by_tenant(self) -> Counter[str]:
        """Return how many requests of each tenant were turned away."""
        found: Counter[str] = Counter()
        for (_, tenant), count in self.refused.items():
            found[tenant] += count
        return found

    def enter(self, waiter: Waiter) -> bool:
        """See Admission."""
        view = waiter.view
        if view.model is None:
            return True
        gate = self._gates.get(view.model)
        if gate is None:
            gate = self._new_gate(view.model)
        if view.tenant == ANONYMOUS and gate.num_free > 0 and not gate.line.num_waiting:
            gate.take()
            return True
        return self._enter_with_care(waiter, view, gate)

    def left(self, waiter: Waiter) -> None:
        """See Admission."""
        ticket = self._waiting.get(waiter)
        if ticket is None:
            return
        self._take_out(ticket)
        self._rates.correct(ticket.tenant, -ticket.num_prompt_tokens, self._clock())

    def ended(self, waiter: Waiter, num_tokens: int) -> None:
        """See Admission."""
        view = waiter.view
        if view.model is None:
            return
        gate, now = self._gates[view.model], self._clock()
        gate.give_back()
        gate.learn(view.num_tokens, num_tokens, now)
        if self._unsettled:
            ticket = self._unsettled.pop(waiter, None)
            if ticket is not None:
                gate.line.correct(ticket, num_tokens - ticket.cost)
                self._rates.correct(ticket.tenant, num_tokens - ticket.num_prompt_tokens, now)
        if gate.line.num_waiting:
            self._let_in(gate, now)

    def engines_changed(self) -> None:
        """See Admission."""
        now = self._clock()
        for model, gate in self._gates.items():
            if gate.set_room(self._engines.room(model), now):
                self._give_time(gate, now)
        for model in [model for model, gate in self._gates.items() if not (gate.num_in or gate.line.num_waiting)]:
            if not self._gates[model].has_engines:
                del self._gates[model]
        for gate in list(self._gates.values()):
            self._let_in(gate, now)

    def check(self, now: float) -> None:
        """See Admission."""
        self._rates.forget_idle(now)
        for model, gate in list(self._gates.items()):
            if gate.set_room(self._engines.room(model), now):  # what engines have of others changes with each poll
                self._give_time(gate, now)
            if not gate.line.num_waiting:
                continue
            self._let_in(gate, now)
            for ticket in [ticket for ticket in gate.line if now >= ticket.deadline]:
                if ticket.waiter not in self._waiting:
                    continue  # another one's turning away took it along
                if gate.has_engines:
                    refusal = refusals.waited_too_long(gate.seconds_ahead(ticket.priority, now), self._spread())
                else:
                    refusal = refusals.none_started(COLD_RETRY_S, self._spread())
                self._turn_away(ticket, refusal)

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        tickets = [ticket for gate in self._gates.values() for ticket in gate.line]
        assert set(map(id, tickets)) == set(map(id, self._waiting.values()))
        assert len(tickets) == len(self._waiting) == sum(gate.line.num_waiting for gate in self._gates.values())
        assert self._num_waiting_bytes == sum(ticket.num_bytes for ticket in tickets)
        assert not self._waiting.keys() & self._unsettled.keys()

    def _new_gate(self, model: str) -> ModelGate:
        gate = self._gates[model] = ModelGate(self._limits.queue_size, self._limits.num_processes)
        gate.set_room(self._engines.room(model), self._clock())
        return gate

    def _enter_with_care(self, waiter: Waiter, view: RequestView, gate: ModelGate) -> bool:
        now = self._clock()
        tenant = _ANYBODY if view.tenant == ANONYMOUS else self._tenant_named(view.tenant) or Tenant(view.tenant)
        is_limited = tenant.rpm is not None or tenant.tpm is not None
        if not is_limited and gate.num_free > 0 and not gate.line.num_waiting:
            gate.take()
            return True
        ticket = self._ticket(waiter, view, gate, tenant, now)
        try:
            if is_limited:
                self._rates.take(tenant, view.num_tokens, now)
            if gate.num_free > 0 and not gate.line.num_waiting:
                gate.take()
                self._unsettled[waiter] = ticket
                return True
            try:
                self._make_way(ticket, gate, now)
            except Refusal:
                self._rates.give_back(ticket.tenant, ticket.num_prompt_tokens, now)
                raise
        except Refusal as refusal:
            self._count(refusal, tenant.name)
            raise
        gate.line.push(ticket, tenant.weight)
        self._waiting[waiter] = ticket
        self._num_waiting_bytes += ticket.num_bytes
        return False

    def _ticket(self, waiter: Waiter, view: RequestView, gate: ModelGate, tenant: Tenant, now: float) -> Ticket:
        self._num_arrived += 1
        timeout = self._limits.queue_timeout if gate.has_engines else self._limits.cold_start_timeout
        return Ticket(
            waiter=waiter,
            tenant=tenant.name,
            priority=min(view.priority, tenant.max_priority),
            num_prompt_tokens=view.num_tokens,
            cost=gate.cost_of(view),
            num_bytes=waiter.num_body_bytes,
            number=self._num_arrived,
            arrived_at=now,
            deadline=now + timeout,
        )

    def _make_way(self, ticket: Ticket, gate: ModelGate, now: float) -> None:
        """Find a place in the line, if need be at the cost of those who may be shed.

        Raises:
            Refusal: there is none.
        """
        if not gate.has_engines and not self._limits.cold_start_timeout:
            raise no_engine()
        while True:
            line_is_full = gate.line.is_full(ticket.priority)
            num_spare_bytes = self._limits.max_waiting_bytes - self._num_waiting_bytes
            if not line_is_full and ticket.num_bytes <= num_spare_bytes:
                return
            # Those below zero stand in the way of others below or at zero, and take memory from everybody.
            shed = None if line_is_full and ticket.priority > 0 else gate.line.sheddable(ticket.priority)
            if shed is None or ticket.num_bytes > self._limits.max_waiting_bytes:
                raise self._full(gate, ticket.priority, now)
            self._turn_away(shed, self._full(gate, shed.priority, now))

    def _full(self, gate: ModelGate, priority: int, now: float) -> Refusal:
        if not gate.has_engines:
            return refusals.none_started(COLD_RETRY_S, self._spread())
        return refusals.queue_full(gate.seconds_ahead(priority, now), self._spread())

    def _let_in(self, gate: ModelGate, now: float) -> None:
        """Let in those whose turn it is. One who goes through in no time comes back here: it is only noted then."""
        if gate.is_letting_in:
            return
        gate.is_letting_in = True
        try:
            num_left = MAX_BURST
            while gate.num_free > 0 and gate.line.num_waiting and num_left:
                num_left -= 1
                ticket = gate.line.pop()
                self._no_longer_waits(ticket)
                gate.take()
                self._unsettled[ticket.waiter] = ticket
                self.waits.observe(now - ticket.arrived_at)
                ticket.waiter.admitted()
        finally:
            gate.is_letting_in = False

    def _give_time(self, gate: ModelGate, now: float) -> None:
        """Let those who were held for the first engine wait for room as long as any other."""
        for ticket in gate.line:
            longest = ticket.arrived_at + self._limits.cold_start_timeout + self._limits.queue_timeout
            ticket.deadline = max(ticket.deadline, min(now + self._limits.queue_timeout, longest))

    def _turn_away(self, ticket: Ticket, refusal: Refusal) -> None:
        self._take_out(ticket)
        self._rates.give_back(ticket.tenant, ticket.num_prompt_tokens, self._clock())
        self._count(refusal, ticket.tenant)
        ticket.waiter.turned_away(refusal)

    def _take_out(self, ticket: Ticket) -> None:
        model = ticket.waiter.view.model
        assert model is not None
        self._gates[model].line.remove(ticket)
        self._no_longer_waits(ticket)

    def _no_longer_waits(self, ticket: Ticket) -> None:
        del self._waiting[ticket.waiter]
        self._num_waiting_bytes -= ticket.num_bytes

    def _count(self, refusal: Refusal, tenant: str) -> None:
        assert refusal.code is not None
        self.refused[refusal.code, tenant] += 1
        if self._faults is not None and refusal.code in REFUSED:
            self._faults.note(REFUSED[refusal.code])


PREFIX = "pagefleet_router_"


def collect_admission(gate: Gate) -> Iterator[Metric]:
    """Yield every family of a gate."""
    held = GaugeMetricFamily(names.ROUTER_HELD, "Requests that wait for a model's first engine.", labels=("model",))
    queued = GaugeMetricFamily(names.ROUTER_QUEUED, "Requests that wait for engines with room.", labels=("model",))
    tokens = GaugeMetricFamily(names.ROUTER_QUEUED_TOKENS, "Prompt tokens of both.", labels=("model",))
    for model, one in gate.gates.items():
        num_waiting = one.line.num_waiting
        held.add_metric((model,), 0 if one.has_engines else num_waiting)
        queued.add_metric((model,), num_waiting if one.has_engines else 0)
        tokens.add_metric((model,), one.line.num_prompt_tokens)
    yield from (held, queued, tokens)
    refused = CounterMetricFamily(PREFIX + "admission_refusals", "Requests not let in.", labels=("code",))
    by_code: Counter[str] = Counter()
    for (code, _), count in gate.refused.items():
        by_code[code] += count
    for code, count in by_code.items():
        refused.add_metric((code,), count)
    yield refused
    waits = HistogramMetricFamily(PREFIX + "admission_wait_seconds", "Wait of requests that had to wait and got in.")
    waits.add_metric((), gate.waits.buckets(), gate.waits.total)
    yield waits
