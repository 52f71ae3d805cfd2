"""Who gets in, who waits, and who is turned away, on a clock of our own."""

from __future__ import annotations

import pytest
from pagefleet_protocol.tenants import Tenant
from pagefleet_router.admission.gate import MAX_BURST, GateLimits
from pagefleet_router.admission.model_gate import RAMP_FIRST
from pagefleet_router.admission.room import Room
from pagefleet_router.request_view import ANONYMOUS, RequestView

from tests.fakes.gate_scene import GateScene, Request


def answer_of(request: Request) -> tuple[int, str | None]:
    assert request.refusal is not None
    return request.refusal.status, request.refusal.code


def retry_after(request: Request) -> int:
    assert request.refusal is not None
    return int(request.refusal.headers["retry-after"])


def test_with_room_a_request_passes_at_once_and_otherwise_waits_its_turn() -> None:
    scene = GateScene(capacity=2)
    first, second, third, fourth = (scene.come() for _ in range(4))
    assert [one.is_in for one in (first, second, third, fourth)] == [True, True, False, False]
    scene.end(second)
    assert third.is_in
    assert fourth.is_waiting
    scene.end(first)
    assert fourth.is_in
    scene.gate.check_integrity()


def test_requests_for_no_model_in_particular_always_pass() -> None:
    scene = GateScene(capacity=0, num_engines=0)
    request = Request(scene, RequestView(None))
    assert scene.gate.enter(request)
    scene.gate.ended(request, 0)


def test_a_full_queue_is_429_with_the_time_that_those_ahead_take() -> None:
    scene = GateScene(limits=GateLimits(2, 60.0, 0.0, 10**9))
    running = scene.come(num_tokens=90, max_tokens=10)
    scene.later(10.0)
    scene.end(running, 1000)  # 1000 tokens in the first second of service
    scene.later(4.0)
    scene.come(num_tokens=90, max_tokens=10)
    waiting = [scene.come(num_tokens=900, max_tokens=100) for _ in range(2)]
    refused = scene.come()
    assert answer_of(refused) == (429, "queue_full")
    assert all(one.is_waiting for one in waiting)
    assert retry_after(refused) == 8, "2000 tokens are ahead, 250 a second are done"
    assert scene.gate.refused == {("queue_full", ANONYMOUS): 1}


def test_retry_after_is_never_zero_bounded_and_spread() -> None:
    scene = GateScene(limits=GateLimits(1, 60.0, 0.0, 10**9))
    scene.come()
    scene.come(num_tokens=10**9)
    assert retry_after(scene.come()) == 1, "no rate is known yet"
    scene.next_ends()
    scene.come(num_tokens=10**9)
    assert retry_after(scene.come()) == 50
    scene.gate._spread = lambda: 1.0
    assert retry_after(scene.come()) == 60


def test_a_request_that_finds_no_room_in_time_is_429() -> None:
    scene = GateScene()
    scene.come()
    waiting = scene.come()
    scene.later(59.9)
    assert waiting.is_waiting
    later = scene.come()
    scene.later(0.1)
    assert answer_of(waiting) == (429, "queue_timeout")
    assert later.is_waiting
    scene.gate.check_integrity()


def test_one_whose_client_left_is_forgotten() -> None:
    scene = GateScene()
    running, left, last = scene.come(), scene.come(), scene.come()
    scene.leave(left)
    scene.end(running)
    assert last.is_in
    assert not left.is_in
    scene.gate.check_integrity()


def test_without_engines_and_nothing_to_wait_for_it_is_503() -> None:
    scene = GateScene(capacity=0, num_engines=0)
    refused = scene.come()
    assert answer_of(refused) == (503, "no_engine_ready")
    assert retry_after(refused) == 2


def test_requests_for_a_model_without_engines_are_held_and_let_in_a_few_at_a_time() -> None:
    """F18: a herd after zero is bounded, and reaches the first engine in steps."""
    scene = GateScene(0, limits=GateLimits(100, 60.0, 600.0, 10**9), num_engines=0)
    herd = [scene.come() for _ in range(150)]
    assert {answer_of(one) for one in herd[100:]} == {(503, "no_engine_ready")}
    assert min(map(retry_after, herd[100:])) >= 1
    scene.later(599.0)
    assert all(one.is_waiting for one in herd[:100]), "held for longer than any queue"
    scene.set_room(1, 320)
    assert sum(one.is_in for one in herd) == RAMP_FIRST
    scene.later(1.0)
    assert sum(one.is_in for one in herd) == 2 * RAMP_FIRST
    scene.later(2.0)
    assert sum(one.is_in for one in herd) == 8 * RAMP_FIRST
    scene.later(1.0)
    assert all(one.is_in for one in herd[:100])
    scene.gate.check_integrity()


def test_a_held_request_is_503_when_no_engine_comes_in_time() -> None:
    scene = GateScene(0, limits=GateLimits(100, 60.0, 600.0, 10**9), num_engines=0)
    held = scene.come()
    scene.later(600.0)
    assert answer_of(held) == (503, "no_engine_ready")
    assert retry_after(held) == 10


def test_those_in_line_keep_their_place_while_the_engines_are_gone() -> None:
    scene = GateScene()
    running, waiting = scene.come(), scene.come()
    scene.set_room(0, 0)
    scene.end(running)
    assert waiting.is_waiting
    assert answer_of(scene.come()) == (503, "no_engine_ready")
    scene.set_room(1, 1)
    assert waiting.is_in
    scene.gate.check_integrity()


def test_time_in_line_after_a_cold_start_is_bounded_however_often_engines_come_and_go() -> None:
    scene = GateScene(0, limits=GateLimits(100, 60.0, 600.0, 10**9), num_engines=0)
    held = [scene.come() for _ in range(50)]
    for _ in range(33):
        scene.later(10.0)
        scene.set_room(1, 1)
        scene.later(10.0)
        scene.set_room(0, 0)
    assert held[0].is_in
    assert {answer_of(one)[0] for one in held[1:]} <= {429, 503}, "660 s are over"


def test_requests_below_zero_make_way_for_others_and_the_last_to_come_goes_first() -> None:
    scene = GateScene(limits=GateLimits(3, 60.0, 0.0, 10**9))
    scene.come()
    low = [scene.come(priority=level) for level in (-1, -2, -2)]
    assert answer_of(scene.come(priority=-2)) == (429, "queue_full"), "nobody makes way for an equal"
    middle = scene.come(priority=-1)
    assert answer_of(low[2]) == (429, "queue_full")
    zero = [scene.come() for _ in range(3)]
    assert [one.refusal is not None for one in (*low, middle)] == [True] * 4
    assert all(one.is_waiting for one in zero)
    assert answer_of(scene.come()) == (429, "queue_full"), "those of priority zero do not make way"
    scene.gate.check_integrity()


def test_memory_is_bounded_over_all_lines_and_the_least_urgent_give_theirs() -> None:
    """F7: what waits cannot fill the memory, whatever its size."""
    scene = GateScene(limits=GateLimits(1000, 60.0, 0.0, 100), tenants=(Tenant("vip", max_priority=5),))
    scene.come()
    low = [scene.come(priority=-1, num_bytes=40) for _ in range(2)]
    zero = scene.come(num_bytes=60)
    assert [one.is_waiting for one in (*low, zero)] == [True, False, True]
    assert answer_of(scene.come(num_bytes=41)) == (429, "queue_full"), "not at the cost of those who may stay"
    assert low[0].refusal is not None, "what was below zero had to go first"
    assert answer_of(scene.come("vip", priority=5, num_bytes=101)) == (429, "queue_full")
    assert scene.come("vip", priority=5, num_bytes=40).is_waiting
    scene.gate.check_integrity()


def test_a_request_larger_than_all_memory_sheds_nobody() -> None:
    scene = GateScene(limits=GateLimits(1000, 60.0, 0.0, 100))
    scene.come()
    low = scene.come(priority=-1, num_bytes=40)
    assert answer_of(scene.come(num_bytes=101)) == (429, "queue_full")
    assert low.is_waiting


def test_priority_goes_no_further_than_the_tenant_may() -> None:
    scene = GateScene(tenants=(Tenant("vip", max_priority=5), Tenant("batch", max_priority=-1)))
    running = scene.come()
    waiting = [scene.come("batch", priority=9), scene.come("vip", priority=9), scene.come(priority=6)]
    scene.end(running)
    assert waiting[2].is_in, "without keys everybody may ask for any"
    scene.end(waiting[2])
    assert waiting[1].is_in
    scene.end(waiting[1])
    assert waiting[0].is_in


def test_lower_priorities_get_a_turn_now_and_then() -> None:
    scene = GateScene(tenants=(Tenant("vip", max_priority=1),))
    scene.come()
    low = [scene.come(), scene.come(priority=-1)]
    for _ in range(64):
        scene.come("vip", priority=1)
    for _ in range(32):
        scene.next_ends()
    assert all(one.is_in for one in low)


def test_over_the_limit_of_requests_it_is_429_until_the_very_second() -> None:
    scene = GateScene(capacity=1000, tenants=(Tenant("a", rpm=6), Tenant("b")))
    assert all(scene.come("a").is_in for _ in range(6))
    refused = scene.come("a")
    assert answer_of(refused) == (429, "rate_limit_exceeded")
    assert refused.refusal is not None
    assert refused.refusal.headers["x-ratelimit-limit-requests"] == "6"
    assert refused.refusal.headers["x-ratelimit-remaining-requests"] == "0"
    assert retry_after(refused) == 10
    assert scene.come("b").is_in
    scene.later(9.9)
    assert answer_of(scene.come("a")) == (429, "rate_limit_exceeded")
    scene.later(0.1)
    assert scene.come("a").is_in


def test_tokens_per_minute_count_what_a_request_took_in_the_end() -> None:
    scene = GateScene(capacity=1000, tenants=(Tenant("a", tpm=6000),))
    first = scene.come("a", num_tokens=1000)
    scene.end(first, 7000)  # 1000 tokens over the limit of a minute
    refused = scene.come("a", num_tokens=100)
    assert answer_of(refused) == (429, "rate_limit_exceeded")
    assert retry_after(refused) == 11
    scene.later(11.0)
    assert scene.come("a", num_tokens=100).is_in
    scene.later(60.0)
    assert scene.come("a", num_tokens=10**6).is_in, "a full minute's worth lets the largest in"


def test_a_request_that_is_not_let_in_costs_its_tenant_nothing() -> None:
    scene = GateScene(tenants=(Tenant("a", rpm=2, tpm=1000),), limits=GateLimits(1, 60.0, 0.0, 10**9))
    scene.come()
    waiting = scene.come()
    assert answer_of(scene.come("a", num_tokens=1000)) == (429, "queue_full")
    scene.leave(waiting)
    waiting = scene.come("a", num_tokens=1000)
    assert waiting.is_waiting
    scene.later(60.0)
    assert answer_of(waiting) == (429, "queue_timeout")
    assert scene.come("a", num_tokens=1000).is_waiting


def test_limits_are_shared_between_processes() -> None:
    limits = GateLimits(1000, 60.0, 0.0, 10**9, num_processes=3)
    scene = GateScene(capacity=1000, tenants=(Tenant("a", rpm=6),), limits=limits)
    assert [scene.come("a").is_in for _ in range(3)] == [True, True, False]


def test_a_limit_that_changes_in_the_file_holds_from_then_on() -> None:
    scene = GateScene(capacity=1000, tenants=(Tenant("a", rpm=1),))
    assert [scene.come("a").is_in for _ in range(2)] == [True, False]
    scene.tenants["a"] = Tenant("a", rpm=3)
    assert [scene.come("a").is_in for _ in range(3)] == [True, True, False]
    scene.tenants["a"] = Tenant("a")
    assert scene.come("a").is_in


@pytest.mark.parametrize(("num_foreign", "num_in"), [(0, 100), (30, 70), (90, 50), (1000, 50)])
def test_what_others_have_at_the_engines_counts_down_to_half_a_share(num_foreign: int, num_in: int) -> None:
    scene = GateScene(capacity=100)
    scene.set_room(1, 100, num_foreign)
    assert sum(scene.come().is_in for _ in range(200)) == num_in
    assert Room(1, 100, num_foreign).share(2) == max(100 - num_foreign, 25)


def test_engines_that_leave_take_room_away_without_a_request() -> None:
    scene = GateScene(capacity=4)
    running = [scene.come() for _ in range(4)]
    scene.set_room(1, 2)
    waiting = scene.come()
    for one in running[:2]:
        scene.end(one)
        assert waiting.is_waiting
    scene.end(running[2])
    assert waiting.is_in


def test_a_crowd_is_let_in_without_keeping_the_event_loop() -> None:
    scene = GateScene(capacity=0, limits=GateLimits(1000, 60.0, 0.0, 10**9))
    crowd = [scene.come() for _ in range(MAX_BURST + 5)]
    scene.set_room(1, 1000)
    assert sum(one.is_in for one in crowd) == MAX_BURST
    scene.later(0.25)
    assert all(one.is_in for one in crowd)


def test_requests_that_end_at_once_do_not_pile_up_on_the_stack() -> None:
    scene = GateScene(limits=GateLimits(5000, 60.0, 0.0, 10**9))

    class Doomed(Request):
        def admitted(self) -> None:
            super().admitted()
            scene.end(self)

    running = scene.come()
    doomed = [Doomed(scene, RequestView("m")) for _ in range(4000)]
    assert not any(map(scene.gate.enter, doomed))
    scene.end(running)
    while any(one.is_waiting for one in doomed):
        scene.later(0.25)
    assert scene.order == [running, *doomed]
    scene.gate.check_integrity()


def test_a_model_that_nobody_serves_or_asks_for_is_forgotten() -> None:
    scene = GateScene()
    scene.end(scene.come())
    assert list(scene.gate.gates) == ["m"]
    scene.set_room(0, 0)
    assert not scene.gate.gates
