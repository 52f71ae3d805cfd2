"""Properties of the gate under any sequence of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pagefleet_protocol.tenants import Tenant
from pagefleet_router.admission.gate import GateLimits
from pagefleet_router.request_view import ANONYMOUS

from tests.example_counts import examples
from tests.fakes.gate_scene import GateScene, Request

TENANTS = (Tenant("a", weight=2.0, max_priority=3), Tenant("b", rpm=30), Tenant("c", weight=0.5, tpm=5000))
NAMES = st.sampled_from(["a", "b", "c", ANONYMOUS])


class AnyOrder(RuleBasedStateMachine):
    """Requests come, end and leave while engines and time do as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = GateScene(3, TENANTS, GateLimits(6, 20.0, 40.0, 500))
        self.requests: list[Request] = []
        self.capacity = 3

    @rule(tenant=NAMES, size=st.integers(0, 300), priority=st.integers(-3, 5))
    def come(self, tenant: str, size: int, priority: int) -> None:
        had_room = self.running < self.capacity and not self.scene.gate.num_waiting
        request = self.scene.come(tenant, size, size, priority, num_bytes=size)
        self.requests.append(request)
        if request.is_waiting:
            assert not had_room

    def level(self, request: Request) -> int:
        tenant = self.scene.tenants.get(request.view.tenant)
        return request.view.priority if tenant is None else min(request.view.priority, tenant.max_priority)

    @property
    def running(self) -> int:
        return sum(one.is_in and not one.is_over for one in self.requests)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(0, 1000))
    def end(self, data: st.DataObject, num_tokens: int) -> None:
        running = [one for one in self.requests if one.is_in and not one.is_over]
        self.scene.end(data.draw(st.sampled_from(running)), num_tokens)

    @precondition(lambda self: any(one.is_waiting for one in self.requests))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.scene.leave(data.draw(st.sampled_from([one for one in self.requests if one.is_waiting])))

    @rule(seconds=st.floats(0.0, 30.0))
    def later(self, seconds: float) -> None:
        self.scene.later(seconds)

    @rule(capacity=st.integers(0, 5))
    def engines(self, capacity: int) -> None:
        self.capacity = capacity
        self.scene.set_room(1 if capacity else 0, capacity)

    @invariant()
    def nobody_is_lost(self) -> None:
        self.scene.gate.check_integrity()
        waiting = [one for one in self.requests if one.is_waiting]
        assert len(waiting) == self.scene.gate.num_waiting
        for gate in self.scene.gate.gates.values():
            assert gate.num_in == self.running
        assert sum(one.num_body_bytes for one in waiting) <= 500
        levels = Counter(max(0, self.level(one)) for one in waiting)
        assert max(levels.values(), default=0) <= 6, "one band for each level above zero, one for all others"

    @invariant()
    def nobody_waits_past_the_deadline(self) -> None:
        for gate in self.scene.gate.gates.values():
            for ticket in gate.line:
                assert self.scene.now <= ticket.arrived_at + 60.0

    @invariant()
    def nobody_more_gets_in_than_there_is_room(self) -> None:
        if self.scene.order and self.scene.order[-1] is not getattr(self, "last", None):
            self.last = self.scene.order[-1]
            assert self.running <= max(self.capacity, 0)

    def teardown(self) -> None:
        self.engines(5)
        for _ in range(200):
            self.scene.later(0.25)
            for one in self.requests:
                if one.is_in and not one.is_over:
                    self.scene.end(one)
        assert not any(one.is_waiting for one in self.requests)
        assert all(gate.num_in == 0 for gate in self.scene.gate.gates.values())
        assert not self.scene.gate._unsettled


AnyOrder.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
test_any_order = AnyOrder.TestCase


@dataclass
class Backlog:
    """Two tenants that always have something waiting."""

    scene: GateScene
    size: int

    def keep(self, name: str) -> None:
        waiting = sum(1 for gate in self.scene.gate.gates.values() for one in gate.line if one.tenant == name)
        for _ in range(3 - waiting):
            self.scene.come(name, self.size, 0)


@settings(max_examples=examples(40), deadline=None)
@given(size_a=st.integers(1, 2000), size_b=st.integers(1, 2000), weight=st.sampled_from([0.5, 1.0, 2.0, 5.0]))
def test_two_backlogged_tenants_share_tokens_by_their_weights(size_a: int, size_b: int, weight: float) -> None:
    scene = GateScene(1, (Tenant("a", weight=weight), Tenant("b")))
    scene.come(ANONYMOUS, 1, 0)
    a, b = Backlog(scene, size_a), Backlog(scene, size_b)
    served: Counter[str] = Counter()
    for _ in range(60):
        a.keep("a")
        b.keep("b")
        scene.next_ends()
        got_in = scene.order[-1].view
        served[got_in.tenant] += got_in.num_tokens
        assert abs(served["a"] / weight - served["b"]) <= size_a / weight + size_b, "within one request of each"


def test_what_a_request_took_in_the_end_decides_who_is_next() -> None:
    scene = GateScene(1, (Tenant("a"), Tenant("b")))
    first = scene.come(ANONYMOUS, 1, 0)
    long = [scene.come("a", 100, 0) for _ in range(10)]
    short = [scene.come("b", 100, 0) for _ in range(10)]
    scene.end(first)
    assert long[0].is_in
    scene.end(long[0], 500)
    assert [short[n].is_in for n in range(2)] == [True, False]
    for expected in (*short[1:5], long[1]):
        scene.next_ends()
        assert scene.order[-1] is expected


def test_a_tenant_that_leaves_early_gets_back_what_it_did_not_take() -> None:
    scene = GateScene(1, (Tenant("a"), Tenant("b")))
    first = scene.come(ANONYMOUS, 1, 0)
    a = [scene.come("a", 1000, 0) for _ in range(3)]
    b = [scene.come("b", 100, 0) for _ in range(3)]
    scene.end(first)
    assert a[0].is_in
    scene.end(a[0], 10)
    assert b[0].is_in
    scene.end(b[0])
    assert a[1].is_in, "10 tokens are less than 100"


@pytest.mark.parametrize("num_flooding", [1, 3])
def test_a_flood_does_not_delay_another_tenants_first_request_by_more_than_a_round(num_flooding: int) -> None:
    flooders = tuple(Tenant(f"flood{n}") for n in range(num_flooding))
    scene = GateScene(1, (*flooders, Tenant("quiet")))
    for _ in range(100):
        for flooder in flooders:
            scene.come(flooder.name, 500, 0)
    for _ in range(30):
        scene.next_ends()
    first = scene.come("quiet", 500, 0)
    for _ in range(num_flooding + 1):
        if first.is_waiting:
            scene.next_ends()
    assert first.is_in


def test_nobody_pays_for_having_been_alone() -> None:
    scene = GateScene(1, (Tenant("early"), Tenant("late")))
    for _ in range(50):
        scene.come("early", 1000, 0)
    for _ in range(20):
        scene.next_ends()
    for _ in range(50):
        scene.come("late", 1000, 0)
    before = len(scene.order)
    for _ in range(20):
        scene.next_ends()
    turns = Counter(one.view.tenant for one in scene.order[before:])
    assert abs(turns["early"] - turns["late"]) <= 1
