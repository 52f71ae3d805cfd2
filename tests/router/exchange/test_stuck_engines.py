"""Requests at an engine that hangs: they go elsewhere as soon as that is known, and nowhere if nobody else is there."""

from __future__ import annotations

from pagefleet_router.wire.upstream import AnswerHead

from tests.fakes.exchange_scene import SSE, Asked, Call, ExchangeScene

DONE = b"data: [DONE]\n\n"


def asked_engine(scene: ExchangeScene, stream: bool) -> tuple[Asked, str]:
    """Let a request reach an engine, whose name is returned."""
    asked = scene.come(stream=stream)
    scene.read_prompt()
    for dial in scene.dials:
        scene.connect(dial)
    assert asked.exchange.attempt is not None
    return asked, asked.exchange.attempt.engine.id


def next_call(scene: ExchangeScene) -> Call:
    for dial in scene.dials:
        scene.connect(dial)
    [call] = scene.calls
    return call


def test_before_the_first_byte_the_request_is_asked_of_another_engine() -> None:
    scene = ExchangeScene(num_engines=2)
    asked, first = asked_engine(scene, stream=False)
    scene.later(20.0)
    assert scene.calls, "a long prompt takes its time"
    scene.table.set_ready(first, False, stuck=True)
    scene.later(0.25)
    call = next_call(scene)
    assert asked.exchange.attempt is not None
    assert asked.exchange.attempt.engine.id != first
    call.answer(AnswerHead(200, [(b"content-length", b"2")]), b"{}", True)
    assert asked.client.ends == ["whole"]
    assert scene.services.dispatcher.metrics.failures["stuck"] == 1
    scene.check()


def test_a_stream_that_has_begun_goes_on_at_another_engine() -> None:
    scene = ExchangeScene(num_engines=2)
    asked, first = asked_engine(scene, stream=True)
    [call] = scene.calls
    call.answer(SSE, call.next_events(3), False)
    scene.table.set_ready(first, False, stuck=True)
    scene.later(4.0)
    assert scene.calls == [call], "what it had computed may still be on its way"
    scene.later(2.0)
    call = next_call(scene)
    call.answer(SSE, call.next_events(99), True)
    assert asked.client.ends == ["whole"]
    assert DONE in asked.client.data
    scene.check()


def test_where_nobody_else_can_answer_the_engine_may_yet_move_on() -> None:
    scene = ExchangeScene(num_engines=1, cold_start=0.0)
    asked, first = asked_engine(scene, stream=True)
    [call] = scene.calls
    call.answer(SSE, call.next_events(2), False)
    scene.table.set_ready(first, False, stuck=True)
    for _ in range(20):
        scene.later(1.0)
    scene.table.set_ready(first, True)
    call.answer(None, call.next_events(99), True)
    assert asked.client.ends == ["whole"]
    assert scene.services.dispatcher.metrics.failures["stuck"] == 0
    scene.check()


def test_a_router_that_holds_requests_leaves_them_at_the_model_s_only_engine() -> None:
    scene = ExchangeScene(num_engines=1, cold_start=40.0)
    asked, first = asked_engine(scene, stream=False)
    [call] = scene.calls
    scene.table.set_ready(first, False, stuck=True)
    for _ in range(20):
        scene.later(1.0)
    assert scene.calls == [call], "what it has computed would be lost"
    scene.table.set_ready(first, True)
    call.answer(AnswerHead(200, [(b"content-length", b"2")]), b"{}", True)
    assert asked.client.ends == ["whole"]
    scene.check()


def test_an_engine_that_drains_is_not_stuck() -> None:
    scene = ExchangeScene(num_engines=2)
    asked, first = asked_engine(scene, stream=True)
    [call] = scene.calls
    call.answer(SSE, call.next_events(2), False)
    scene.table.set_ready(first, False)
    scene.later(25.0)
    assert scene.calls == [call]
    call.answer(None, call.next_events(99), True)
    assert asked.client.ends == ["whole"]
    scene.check()
