"""The core's loop while requests wait for K/V: it neither spins nor sleeps through the end of a transfer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import zmq
from pagefleet_engine.engine_core.messages import AbortRequests, AddRequest, Drain, ResetPrefixCache, StepOutputs
from pagefleet_engine.engine_core.process import STATS_INTERVAL_S, TRANSFER_WAIT_S
from pagefleet_engine.engine_core.transport import CoreSocket
from pagefleet_kv.port import AnswerDone, TransfersDone
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.core_wire import Wire
from tests.fakes.held_connector import HeldConnector

PROMPT = [5, 6, 7, 8] * 3


@pytest.fixture
def connector() -> HeldConnector:
    return HeldConnector()


@pytest.fixture
def wire(tmp_path: Path, connector: HeldConnector) -> Wire:
    return Wire(tmp_path, connector=connector)


def add(request_id: str, max_tokens: int = 1) -> AddRequest:
    return AddRequest(request_id, PROMPT, SamplingParams(max_tokens=max_tokens), ())


def test_it_watches_the_bell(wire: Wire, connector: HeldConnector) -> None:
    assert wire.watched == [connector.bell]


def test_a_parked_request_makes_it_wait_and_is_no_work_without_a_step(wire: Wire, connector: HeldConnector) -> None:
    wire.turn(add("a"))
    wire.turn()
    wire.turn()
    assert connector.loading == ["a"]
    assert wire.waits == [STATS_INTERVAL_S, TRANSFER_WAIT_S, TRANSFER_WAIT_S]
    assert wire.core.has_work
    assert not wire.reader.read().busy
    assert wire.reader.read().steps == 0


def test_a_load_that_ended_is_a_prefix_hit_in_the_same_turn(wire: Wire, connector: HeldConnector) -> None:
    wire.turn(add("a"))
    connector.end_load("a", 2)
    wire.turn()
    (output,) = wire.outputs
    assert (output.num_cached_tokens, output.new_token_ids, output.finish_reason) == (8, [9], "length")
    wire.turn()
    assert wire.waits[2] == 0.0  # not settled yet
    assert connector.ended_ids == [("a", True)]


def test_a_load_that_failed_is_answered(wire: Wire, connector: HeldConnector) -> None:
    wire.turn(add("a"))
    connector.end_load("a", 0, "the peer is gone", "unreachable")
    wire.turn()
    (output,) = wire.outputs
    assert (output.finish_reason, output.error_kind, output.error_code) == ("error", *["kv_load_failed"] * 2)
    assert output.kv_fault == "unreachable"
    assert connector.ended_ids == [("a", False)]
    assert not wire.core.has_work


def test_others_run_while_one_waits(wire: Wire, connector: HeldConnector) -> None:
    wire.turn(add("parked"))
    wire.turn(AddRequest("b", [5], SamplingParams(max_tokens=3), ()))
    connector.done = TransfersDone()
    wire.turn()
    wire.turn()
    assert [output.request_id for output in wire.outputs] == ["b"] * 3
    assert wire.waits[2:] == [0.0, 0.0]
    wire.turn()
    wire.turn()
    assert wire.waits[-1] == TRANSFER_WAIT_S


def test_an_abort_answers_at_once_and_keeps_the_blocks_until_the_load_has_ended(
    wire: Wire, connector: HeldConnector
) -> None:
    wire.turn(add("a"))
    wire.turn(AbortRequests(["a"]))
    assert [output.finish_reason for output in wire.outputs] == ["abort"]
    assert connector.cancelled == ["a"]
    assert wire.core.stats().kv_usage > 0
    assert not wire.core.has_work
    connector.end_load("a", 0)
    wire.turn()
    assert wire.core.stats().kv_usage == 0


def test_an_idle_core_takes_in_saves_that_end(wire: Wire, connector: HeldConnector) -> None:
    connector.knows = True
    wire.turn(add("a"))
    connector.end_load("a", 2)
    wire.turn()
    wire.turn()
    assert not wire.core.has_work
    assert wire.core.stats().kv_usage > 0
    connector.done = TransfersDone(saves=range(1, len(connector.saved) + 1))
    wire.turn()
    assert wire.core.stats().kv_usage == 0


def test_who_does_not_know_is_asked_again(wire: Wire, connector: HeldConnector) -> None:
    connector.knows = False
    wire.turn(add("a"))
    wire.turn()
    assert (connector.num_asked, connector.loading) == (3, [])
    assert wire.core.stats().requests_waiting == 1
    connector.knows = True
    wire.turn()
    assert connector.loading == ["a"]


def test_figures_travel_with_the_stats(wire: Wire, connector: HeldConnector) -> None:
    wire.turn(add("a"))
    connector.end_load("a", 0)
    wire.turn()
    last = wire.sent[-1]
    assert isinstance(last, StepOutputs)
    assert last.stats.kv_transfer["pagefleet_y"] == 2.0


def test_what_a_transfer_changes_is_told_soon_after_a_telling_that_came_just_before_it(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its client leaves a moment before a peer is taken for dead."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    wire.turn()  # tells
    now += STATS_INTERVAL_S / 5
    wire.turn()  # the bell: too soon to tell again
    assert len(wire.sent) == 1
    wire.turn()
    assert wire.waits[-1] == STATS_INTERVAL_S
    now += wire.waits[-1]
    wire.turn()
    assert len(wire.sent) == 2


def test_a_core_that_passes_no_k_v_sleeps_as_long_as_it_may(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    wire.turn()
    wire.turn()
    assert wire.waits == [5.0, 5.0]


def test_a_reset_reaches_the_connector(wire: Wire, connector: HeldConnector) -> None:
    wire.turn(ResetPrefixCache())
    assert connector.num_resets == 1


def test_the_connector_is_closed_with_the_core(wire: Wire, connector: HeldConnector) -> None:
    wire.core.shutdown()
    assert connector.is_closed


def test_the_socket_waits_for_the_bell_too(tmp_path: Path) -> None:
    context = zmq.Context()
    other = context.socket(zmq.PAIR)
    other.bind(f"ipc://{tmp_path}/s")
    socket = CoreSocket([f"ipc://{tmp_path}/s"])
    ear, hand = os.pipe()
    socket.watch(ear)
    try:
        assert socket.receive(0.0) == []
        ringer = threading.Timer(0.01, lambda: os.write(hand, b"x"))
        ringer.start()
        assert socket.receive(60.0) == []  # would run into the test's time limit
        ringer.join()
        os.read(ear, 1)
        other.send(b"hello")
        assert socket.receive(60.0) == [(0, b"hello")]
    finally:
        socket.close()
        other.close(linger=0)
        context.term()
        os.close(ear)
        os.close(hand)


def hold_one_answer(wire: Wire, connector: HeldConnector) -> None:
    connector.holds_answers = True
    wire.turn(add("a"))
    connector.end_load("a", 2)
    wire.turn()
    wire.turn()
    assert connector.ended_ids == [("a", True)]
    assert wire.outputs == []


def test_an_answer_that_is_held_is_told_as_it_was(wire: Wire, connector: HeldConnector) -> None:
    hold_one_answer(wire, connector)
    wire.turn()
    assert (wire.core.has_work, wire.core.is_due) == (True, False)
    assert wire.waits[-1] == TRANSFER_WAIT_S
    connector.done = TransfersDone(answers=[AnswerDone(1)])
    wire.turn()
    (output,) = wire.outputs
    assert (output.request_id, output.new_token_ids, output.finish_reason) == ("a", [9], "length")
    assert not wire.core.has_work
    wire.core.check_integrity()


def test_an_answer_whose_blocks_did_not_arrive_is_an_error(wire: Wire, connector: HeldConnector) -> None:
    hold_one_answer(wire, connector)
    connector.done = TransfersDone(answers=[AnswerDone(1, "the decode engine is silent")])
    wire.turn()
    (output,) = wire.outputs
    assert (output.finish_reason, output.error_kind, output.error_code) == ("error", *["kv_load_failed"] * 2)
    assert "did not get to the decode engine" in (output.error or "")


def test_a_name_is_taken_while_its_answer_is_held(wire: Wire, connector: HeldConnector) -> None:
    hold_one_answer(wire, connector)
    wire.turn(add("a"))
    (output,) = wire.outputs
    assert output.error_kind == "invalid"


def test_a_held_answer_that_nobody_waits_for_is_dropped(wire: Wire, connector: HeldConnector) -> None:
    hold_one_answer(wire, connector)
    wire.turn(AbortRequests(["a"]))
    assert [output.finish_reason for output in wire.outputs] == ["abort"]
    assert not wire.core.has_work
    connector.done = TransfersDone(answers=[AnswerDone(1)])
    wire.turn(add("a"))  # another by that name
    assert [output.finish_reason for output in wire.outputs] == ["abort"]


def test_the_connector_is_told_that_the_engine_drains(wire: Wire, connector: HeldConnector) -> None:
    wire.turn(add("a"))
    wire.turn()
    wire.turn(Drain())
    assert connector.is_draining
    connector.num_owed = 3
    assert wire.core.stats().transfers_owed == 3
