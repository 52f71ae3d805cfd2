"""The core's loop, turn by turn, with a socket made of lists."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import (
    AbortRequests,
    AddRequest,
    AskerGone,
    ResetPrefixCache,
    StepOutputs,
)
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.core_wire import Wire, outputs_of


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return Wire(tmp_path)


def add(request_id: str, max_tokens: int = 2) -> AddRequest:
    return AddRequest(request_id, [5], SamplingParams(max_tokens=max_tokens), ())


def test_a_request_runs_through(wire: Wire) -> None:
    wire.turn(add("a"))
    wire.turn()
    assert [(o.new_token_ids, o.finish_reason) for o in wire.outputs] == [([6], None), ([7], "length")]


def test_it_waits_only_when_idle(wire: Wire) -> None:
    wire.turn(add("a"))
    wire.turn()
    wire.turn()
    wire.turn()
    assert wire.waits == [5.0, 0.0, 0.0, 5.0]


def test_progress_is_stamped_before_a_step_and_cleared_after_the_last(wire: Wire) -> None:
    wire.turn(add("a"))
    assert wire.during_step[0].busy
    assert wire.during_step[0].steps == 0
    assert wire.reader.read().busy
    wire.turn()
    assert not wire.reader.read().busy
    assert wire.reader.read().steps == 2


def test_an_aborted_request_leaves_the_core_idle(wire: Wire) -> None:
    wire.turn(add("a", 100))
    wire.turn(AbortRequests(["a"]))
    assert wire.outputs[-1].finish_reason == "abort"
    assert not wire.reader.read().busy
    assert not wire.core.has_work


def test_garbage_is_dropped_and_counted(wire: Wire) -> None:
    wire.turn(b"\xc1", b"", add("a"))
    last = wire.sent[-1]
    assert isinstance(last, StepOutputs)
    assert last.stats.messages_dropped == 2
    assert wire.outputs[0].new_token_ids == [6]


def test_a_request_that_cannot_be_decoded_is_answered(wire: Wire) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(add("a")))
    fields[3] = {"top_p": 7}
    wire.turn(msgspec.msgpack.encode(fields))
    assert [(o.request_id, o.error_kind) for o in wire.outputs] == [("a", "invalid")]


def test_a_refused_request_is_answered(wire: Wire) -> None:
    wire.turn(add("a"), add("a"))
    assert [o.error_param for o in wire.outputs if o.finish_reason == "error"] == ["request_id"]


def test_it_forgets_prefixes(wire: Wire) -> None:
    def ask(request_id: str) -> int | None:
        wire.turn(AddRequest(request_id, [5] * 32, SamplingParams(max_tokens=1), ()))
        wire.turn()
        wire.turn()
        return next(o.num_cached_tokens for o in wire.outputs if o.request_id == request_id and o.new_token_ids)

    assert [ask("a"), ask("b")] == [0, 28]
    wire.turn(ResetPrefixCache())
    assert ask("c") == 0


def test_integrity_is_checked_when_it_becomes_idle(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: EngineCore) -> None:
        raise IntegrityError("a block is lost")

    monkeypatch.setattr(EngineCore, "check_integrity", broken)
    wire.turn(add("a", max_tokens=1))
    with pytest.raises(IntegrityError):
        wire.turn()


def last_stats(wire: Wire, asker: int) -> tuple[int, int]:
    """Requests that run and steps, as a process knows them."""
    last = wire.told[asker][-1]
    assert isinstance(last, StepOutputs)
    return last.stats.requests_running, last.stats.steps


def test_each_process_hears_of_its_own_requests_and_all_hear_of_the_end(tmp_path: Path) -> None:
    wire = Wire(tmp_path, num_askers=3)
    wire.turn(add("a"), asker=0)
    wire.turn(add("b"), asker=1)
    for _ in range(3):
        wire.turn()
    assert [(o.request_id, o.new_token_ids) for o in outputs_of(wire.told[0])] == [("a", [6]), ("a", [7])]
    assert [(o.request_id, o.new_token_ids) for o in outputs_of(wire.told[1])] == [("b", [6]), ("b", [7])]
    assert outputs_of(wire.told[2]) == []
    assert {last_stats(wire, asker) for asker in range(3)} == {(0, 3)}


def test_requests_end_with_the_process_that_asked(tmp_path: Path) -> None:
    wire = Wire(tmp_path, num_askers=2)
    wire.turn(add("a", 3), asker=0)
    wire.turn(add("b", 100), add("c", 100), asker=1)
    wire.turn(AskerGone(1, start=1))
    wire.turn()
    assert outputs_of(wire.told[0])[-1].finish_reason == "length"
    assert not wire.core.has_work
    assert all(o.finish_reason is None for o in outputs_of(wire.told[1]))


def test_what_is_read_of_a_process_after_its_end_is_not_run(tmp_path: Path) -> None:
    wire = Wire(tmp_path, num_askers=2)
    wire.turn(AskerGone(1, start=3))
    wire.turn(add("late#7.1#3.17", 100), asker=1)
    assert not wire.core.has_work
    wire.turn(add("a#18", 1), asker=0)
    wire.turn(add("new#4.0", 1), asker=1)
    wire.turn()
    assert [o.request_id for o in outputs_of(wire.told[0])] == ["a#18"]
    assert [o.request_id for o in outputs_of(wire.told[1])] == ["new#4.0"]


def test_a_refusal_goes_to_who_asked(tmp_path: Path) -> None:
    wire = Wire(tmp_path, num_askers=2)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(add("a")))
    fields[3] = {"top_p": 7}
    wire.turn(msgspec.msgpack.encode(fields), asker=1)
    assert [o.error_kind for o in outputs_of(wire.told[1])] == ["invalid"]
    assert 0 not in wire.told
