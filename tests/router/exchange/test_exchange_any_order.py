"""Exchanges under any sequence of events: each is answered once, whole or with an error, and gives everything back."""

from __future__ import annotations

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pagefleet_protocol.handoff import StreamState
from pagefleet_router.errors import Failure, shutting_down
from pagefleet_router.exchange.prefill_leg import PrefillLeg
from pagefleet_router.wire.upstream import AnswerHead

from tests.example_counts import examples
from tests.fakes.exchange_scene import SSE, Asked, Call, ExchangeScene
from tests.fakes.noting_engine import DEAD, STOPPING, whole_answer

JSON_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"2")]
DONE = b"data: [DONE]\n\n"
GARBAGE = b":pf !!!! 5\ndata: x\n\n"


class AnyOrder(RuleBasedStateMachine):
    """Clients, engines, connections and time do as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = self.make_scene()

    def make_scene(self) -> ExchangeScene:
        return ExchangeScene()

    def one_of_calls(self, data: st.DataObject) -> Call:
        return data.draw(st.sampled_from(self.scene.calls))

    @rule(stream=st.booleans(), num_tokens=st.integers(0, 5000))
    def come(self, stream: bool, num_tokens: int) -> None:
        self.scene.come(stream, num_tokens)

    @rule()
    def stream_begins(self) -> None:
        """Come as far as that matters most in one step."""
        asked = self.scene.come()
        while self.scene.prompts.reading:
            self.scene.read_prompt()
        for dial in self.scene.dials:
            self.scene.connect(dial)
        for call in self.scene.calls:
            if call.listener is asked.exchange.attempt and not call.has_head:
                call.answer(SSE, call.next_events(2), False)

    @precondition(lambda self: self.scene.prompts.reading)
    @rule(data=st.data())
    def read_prompt(self, data: st.DataObject) -> None:
        self.scene.read_prompt(data.draw(st.integers(0, len(self.scene.prompts.reading) - 1)))

    @precondition(lambda self: self.scene.dials)
    @rule(data=st.data(), result=st.sampled_from([None, None, None, Failure.REFUSED, Failure.UNREACHABLE]))
    def dial_ends(self, data: st.DataObject, result: Failure | None) -> None:
        dial = data.draw(st.sampled_from(self.scene.dials))
        if result is None:
            self.scene.connect(dial)
        else:
            dial.end(result)

    @precondition(lambda self: self.scene.calls)
    @rule(data=st.data(), num=st.integers(0, 20), end=st.sampled_from(["", "", "whole", "dead", "stopping", "garbage"]))
    def engine_streams(self, data: st.DataObject, num: int, end: str) -> None:
        call = self.one_of_calls(data)
        head = None if call.has_head else SSE
        body = call.next_events(num)
        body += {"dead": DEAD, "stopping": STOPPING, "garbage": GARBAGE if call.is_noted else b""}.get(end, b"")
        complete = end in ("dead", "stopping") or (end == "whole" and not call.given)
        if head is not None or body or complete:
            call.answer(head, body, complete)

    @precondition(lambda self: any(not call.has_head for call in self.scene.calls))
    @rule(
        data=st.data(),
        status=st.sampled_from([200, 400, 409, 500, 502, 503]),
        own=st.sampled_from([(), (), ((b"connection", b"close"),), ((b"x-pagefleet-model", b"other"),)]),
        at_once=st.booleans(),
    )
    def engine_answers(
        self, data: st.DataObject, status: int, own: tuple[tuple[bytes, bytes], ...], at_once: bool
    ) -> None:
        call = data.draw(st.sampled_from([call for call in self.scene.calls if not call.has_head]))
        call.answer(AnswerHead(status, [*JSON_HEADERS, *own]), b"{}" if at_once else b"", at_once)

    @precondition(lambda self: self.scene.calls)
    @rule(data=st.data(), failure=st.sampled_from([Failure.RESET, Failure.GARBAGE]))
    def connection_breaks(self, data: st.DataObject, failure: Failure) -> None:
        self.one_of_calls(data).lose(failure)

    @precondition(lambda self: any(not one.is_over for one in self.scene.asked))
    @rule(data=st.data(), what=st.sampled_from(["leaves", "pauses", "resumes", "is cut"]))
    def client(self, data: st.DataObject, what: str) -> None:
        asked = data.draw(st.sampled_from([one for one in self.scene.asked if not one.is_over]))
        if what == "leaves":
            asked.left = True
            asked.exchange.client_lost()
        elif what == "is cut":
            asked.exchange.cut(shutting_down())
        else:
            self.flow(asked, what == "pauses")

    def flow(self, asked: Asked, paused: bool) -> None:
        if paused:
            asked.exchange.client_paused()
        else:
            asked.exchange.client_resumed()

    @rule(seconds=st.floats(0.0, 40.0))
    def later(self, seconds: float) -> None:
        self.scene.later(seconds)

    @rule(data=st.data(), ready=st.sampled_from([True, True, False]))
    def readiness(self, data: st.DataObject, ready: bool) -> None:
        self.scene.set_ready(data.draw(st.sampled_from(self.scene.names)), ready)

    @invariant()
    def everything_is_counted(self) -> None:
        self.scene.check()

    @invariant()
    def clients_get_what_fits_together(self) -> None:
        for asked in self.scene.asked:
            if asked.client.data:
                check_answer(asked)

    def teardown(self) -> None:
        for asked in self.scene.asked:
            asked.exchange.cut(shutting_down())
        self.scene.check()
        assert not self.scene.calls
        assert not self.scene.dials
        assert all(one.left or len(one.client.ends) == 1 for one in self.scene.asked)
        assert not any(one.tally.num_tokens for one in self.scene.table.snapshot.engines)


class PairsInAnyOrder(AnyOrder):
    """The same where two engines work on a request, and either of them may say that it cannot."""

    def make_scene(self) -> ExchangeScene:
        return ExchangeScene(4, roles=("decode", "decode", "prefill", "prefill"))

    @precondition(lambda self: any(not call.has_head for call in self.scene.calls))
    @rule(data=st.data(), code=st.sampled_from([(503, "kv_load_failed"), (400, "invalid_handoff")]), cut=st.booleans())
    def kv_is_lost(self, data: st.DataObject, code: tuple[int, str], cut: bool) -> None:
        call = data.draw(st.sampled_from([call for call in self.scene.calls if not call.has_head]))
        status, name = code
        body = json.dumps({"error": {"code": name}}).encode()
        head = AnswerHead(status, [(b"content-length", b"%d" % len(body))])
        call.answer(head, body[:9] if cut else body, not cut)

    @precondition(lambda self: any(call.has_head for call in self.scene.calls))
    @rule(data=st.data())
    def leg_ends(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from([call for call in self.scene.calls if call.has_head]))
        if isinstance(call.listener, PrefillLeg):
            call.answer(None, b"{}", True)


def check_answer(asked: Asked) -> None:
    """Assert that a stream is the one answer, as far as it goes, then at most one error."""
    head, _, body = asked.client.data.partition(b"\r\n\r\n")
    if b"text/event-stream" not in head:
        return
    text = unchunked(body) if b"chunked" in head else body
    events = [one + b"\n\n" for one in text.split(b"\n\n") if one and not one.startswith(b": waiting")]
    assert not any(event.startswith(b":pf") for event in events), "a note is none of the client's"
    errors = [event for event in events if b'"error"' in event or event == b"data: {}\n\n"]
    assert errors in ([], events[-1:]), "an error is the last event"
    told = events[: len(events) - len(errors)]
    if told and told[0].startswith(b'data: {"id"'):
        first = json.loads(told[0][6:])
        state = StreamState(first["id"].removeprefix("chatcmpl-"), first["created"])
        assert told == [one.event for one in whole_answer(state)][: len(told)], "not one answer"
    if asked.client.ends == ["whole"] and not errors:
        assert told[-1] == DONE or not asked.exchange.delivery.relayed


def unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        assert body[int(size, 16) : int(size, 16) + 2] == b"\r\n"
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


ENDING = AnswerHead(503, [*JSON_HEADERS, (b"connection", b"close")])


def reach(scene: ExchangeScene) -> Call:
    """Let the next request reach an engine."""
    scene.read_prompt()
    for dial in scene.dials:
        scene.connect(dial)
    return scene.calls[-1]


def test_a_request_that_meets_the_last_engine_s_end_waits_for_the_next_one() -> None:
    scene = ExchangeScene(num_engines=1)
    asked = scene.come()
    reach(scene).answer(ENDING, b"{}", True)
    scene.check()
    assert (asked.is_over, scene.gate.num_waiting) == (False, 1)
    scene.later(5.0)
    assert asked.client.data.endswith(b": waiting\n\n\r\n")
    scene.set_ready("e0", True)
    call = reach(scene)
    call.answer(SSE, call.next_events(99), True)
    assert asked.client.ends == ["whole"]
    assert DONE in asked.client.data
    check_answer(asked)
    scene.check()


def test_a_stream_whose_prompt_takes_long_is_kept_alive() -> None:
    scene = ExchangeScene()
    asked, other = scene.come(), scene.come(stream=False)
    call = reach(scene)
    while call.listener is not asked.exchange.attempt:
        call = reach(scene)
    scene.later(14.0)
    assert not asked.client.data
    scene.later(1.0)
    scene.later(10.0)
    assert asked.client.data.count(b": waiting\n\n") == 2
    assert not other.client.data
    call.answer(SSE, call.next_events(99), True)
    assert asked.client.ends == ["whole"]
    check_answer(asked)
    assert asked.client.data.count(b"HTTP/1.1") == 1


def test_it_waits_once() -> None:
    scene = ExchangeScene(num_engines=1)
    asked = scene.come(stream=False)
    reach(scene).answer(ENDING, b"{}", True)
    scene.set_ready("e0", True)
    reach(scene).answer(ENDING, b"{}", True)
    assert asked.client.ends == ["whole"]
    assert asked.client.data.startswith(b"HTTP/1.1 503 ")
    scene.check()


def test_where_nobody_holds_requests_the_engine_s_answer_is_passed_on() -> None:
    scene = ExchangeScene(num_engines=1, cold_start=0.0)
    asked = scene.come()
    reach(scene).answer(ENDING, b"{}", True)
    assert asked.client.data.startswith(b"HTTP/1.1 503 ")
    scene.check()


def test_a_prompt_counts_as_computed_when_the_stream_s_first_event_comes() -> None:
    """Servers send the head of a stream before they have computed anything."""
    scene = ExchangeScene(num_engines=1)
    scene.come(num_tokens=1000)
    call = reach(scene)
    [engine] = scene.table.snapshot.engines
    start = engine.rates.prefill.value
    call.answer(SSE, b"", False)
    assert engine.tally.queued(scene.now) == 1000
    scene.later(10.0)
    call.answer(None, call.next_events(1), False)
    assert engine.tally.queued(scene.now) == 0
    assert engine.rates.prefill.value < start / 2, "ten seconds for these tokens are slow"
    scene.check()


def test_what_an_engine_is_sent_is_known_to_the_next_choice() -> None:
    scene = ExchangeScene(num_engines=1)
    scene.come(num_tokens=1000)
    assert scene.services.dispatcher.metrics.prefix_queries == 0
    reach(scene)
    assert scene.services.dispatcher.metrics.prefix_queries == 1000


TestPairsInAnyOrder = PairsInAnyOrder.TestCase
TestPairsInAnyOrder.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
