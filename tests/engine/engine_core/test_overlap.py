"""A core whose steps overlap: what is launched when, and what becomes of a step that fails on its way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from pagefleet_engine.config import EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.core.step import FailureKind, StepPlan
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.garbage import GarbageSchedule
from pagefleet_engine.engine_core.messages import AddRequest, RequestOutput
from pagefleet_engine.errors import EngineDead, StepOutOfMemory
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.core_wire import Wire
from tests.fakes.scripted_core import CountingExecutor, scripted_core

CONFIG = EngineConfig(model=ModelConfig(model="fake"), scheduler=SchedulerConfig(max_num_seqs=8))
LAUNCH, WAIT = "launch", "wait"


class Faults:
    """Raises for the steps it is told to, at their launch or at their end."""

    def __init__(self) -> None:
        self.at_launch: dict[int, Exception] = {}
        self.at_end: dict[int, Exception] = {}

    def before(self, plan: StepPlan) -> None:
        if plan.step_id in self.at_launch:
            raise self.at_launch[plan.step_id]

    def after(self, plan: StepPlan) -> None:
        if plan.step_id in self.at_end:
            raise self.at_end[plan.step_id]


class Computed:
    """What a tensor of a step would be."""


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def make_core(faults: Faults) -> Callable[..., EngineCore]:
    return lambda depth=2: scripted_core(CONFIG, faults.before, faults.after, depth)


@pytest.fixture
def core(make_core: Callable[..., EngineCore]) -> EngineCore:
    return make_core()


def events(core: EngineCore) -> list[tuple[str, int]]:
    assert isinstance(core.executor, CountingExecutor)
    return core.executor.events


def ask(core: EngineCore, name: str, max_tokens: int = 3, first: int = 10, stop: int | None = None) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=() if stop is None else (stop,))
    assert not core.add(AddRequest(name, [first - 1, first], sampling, ()))


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    core.check_integrity()
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_the_next_step_is_launched_before_the_last_is_waited_for(core: EngineCore) -> None:
    ask(core, "a")
    assert tokens(core.step()) == [11]
    assert events(core) == [(LAUNCH, 1), (LAUNCH, 2), (WAIT, 1)]
    assert tokens(core.step()) == [12]
    assert events(core)[3:] == [(LAUNCH, 3), (WAIT, 2)]
    assert tokens(core.step()) == [13]
    assert events(core)[5:] == [(WAIT, 3)]
    assert not core.has_work


def test_a_depth_of_one_waits_for_each_step(make_core: Callable[..., EngineCore]) -> None:
    core = make_core(1)
    ask(core, "a", max_tokens=2)
    run(core)
    assert events(core) == [(LAUNCH, 1), (WAIT, 1), (LAUNCH, 2), (WAIT, 2)]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_outputs_do_not_depend_on_the_depth(make_core: Callable[..., EngineCore], depth: int) -> None:
    core = make_core(depth)
    ask(core, "stops", 50, stop=14)
    ask(core, "long", 9, first=40)
    outputs = run(core)
    assert tokens(outputs["stops"]) == [11, 12, 13, 14]
    assert [(o.finish_reason, o.stop_token_id) for o in outputs["stops"]][-1] == ("stop", 14)
    assert len(outputs["stops"]) == 4
    assert tokens(outputs["long"]) == list(range(41, 50))
    assert core.stats().kv_usage == 0


def test_there_is_work_until_the_surplus_step_is_taken(core: EngineCore) -> None:
    ask(core, "a", 50, stop=11)
    assert core.step()[0].finish_reason == "stop"
    assert core.stats().requests_running == 0
    assert core.has_work
    assert run(core) == {}
    assert events(core) == [(LAUNCH, 1), (LAUNCH, 2), (WAIT, 1), (WAIT, 2)]


def test_a_request_that_comes_while_a_step_runs_is_in_the_next(core: EngineCore) -> None:
    ask(core, "a", 20)
    core.step()
    ask(core, "b", 2, first=90)
    assert {output.request_id for output in core.step()} == {"a"}
    assert {output.request_id for output in core.step()} == {"a", "b"}


def test_an_abort_between_launch_and_end_is_silent_afterwards(core: EngineCore) -> None:
    ask(core, "a", 100)
    core.step()
    assert [output.finish_reason for output in core.abort(["a"])] == ["abort"]
    assert core.stats().kv_usage == 0
    assert run(core) == {}


@pytest.mark.parametrize("when", ["at_launch", "at_end"])
def test_a_failed_step_ends_its_requests_once_and_no_others(core: EngineCore, faults: Faults, when: str) -> None:
    ask(core, "a", 9)
    core.step()
    getattr(faults, when)[3] = RuntimeError("CUDA error at 0xdeadbeef")
    ask(core, "b", 9, first=40)  # in from step 3 on
    outputs = run(core)
    assert [outputs[name][-1].error_kind for name in "ab"] == ["failed", "failed"]
    assert tokens(outputs["a"]) == [12]
    assert tokens(outputs["b"]) == []
    ask(core, "c")
    assert tokens(run(core)["c"]) == [11, 12, 13]


def test_after_a_failed_launch_nothing_is_launched_before_it_was_told(core: EngineCore, faults: Faults) -> None:
    faults.at_launch[2] = RuntimeError("no")
    ask(core, "a", 9)
    assert tokens(core.step()) == [11]  # of step 1, which came before
    assert [output.error_kind for output in core.step()] == ["failed"]
    assert events(core) == [(LAUNCH, 1), (LAUNCH, 2), (WAIT, 1)]


def test_a_step_launched_before_the_failure_was_known_proves_nothing(core: EngineCore, faults: Faults) -> None:
    faults.at_end = {1: RuntimeError("poison"), 2: RuntimeError("poison")}  # the same request is in both
    ask(core, "poison", 9)
    assert run(core)["poison"][-1].error_kind == "failed"
    ask(core, "a")
    assert tokens(run(core)["a"]) == [11, 12, 13]


def test_the_first_step_launched_after_a_failure_decides(core: EngineCore, faults: Faults) -> None:
    faults.at_end = {number: RuntimeError("gone") for number in range(1, 9)}
    ask(core, "a", 9)
    run(core)
    ask(core, "b", 9)
    with pytest.raises(EngineDead, match="two steps in a row failed, the last with RuntimeError"):
        run(core)
    assert events(core)[-1] == (WAIT, 3)


def test_failures_with_a_success_between_are_survived(core: EngineCore, faults: Faults) -> None:
    faults.at_end = {number: RuntimeError("now and then") for number in (1, 4, 7)}
    for name in "abcdef":
        ask(core, name, max_tokens=2)
        run(core)
    assert events(core)[-1][1] > 7


def test_a_success_clears_the_doubt_though_the_next_was_launched_in_it(core: EngineCore, faults: Faults) -> None:
    faults.at_end = {1: RuntimeError("now"), 3: RuntimeError("and then")}
    ask(core, "a", 9)
    core.step()  # step 1 fails with step 2 in flight, which will not
    ask(core, "b", 9)  # in step 3
    assert run(core)["b"][-1].error_kind == "failed"
    ask(core, "c")
    assert tokens(run(core)["c"]) == [11, 12, 13]


@pytest.mark.parametrize("when", ["at_launch", "at_end"])
@pytest.mark.parametrize("depth", [1, 2])
def test_out_of_memory_ends_a_steps_requests_and_never_the_core(
    make_core: Callable[..., EngineCore], faults: Faults, when: str, depth: int
) -> None:
    core = make_core(depth)
    setattr(faults, when, {number: StepOutOfMemory("tried to allocate 2 GiB") for number in range(1, 7)})
    for number in range(3):
        ask(core, f"r{number}", max_tokens=2)
        (output,) = run(core)[f"r{number}"]
        assert (output.finish_reason, output.error_kind) == ("error", "out_of_memory")
        for flag in ("--max-num-batched-tokens", "--max-num-seqs", "--gpu-memory-utilization"):
            assert flag in (output.error or "")
        assert "GiB" not in (output.error or "")
    assert core.stats().out_of_memory_steps >= 3
    assert core.stats().kv_usage == 0
    while len(events(core)) < 14:  # past the steps that fail
        ask(core, "a")
        outputs = run(core)
    assert tokens(outputs["a"]) == [11, 12, 13]


@pytest.mark.parametrize("when", ["at_launch", "at_end"])
def test_a_failed_step_keeps_nothing_of_what_it_computed(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    computed: list[weakref.ref[Computed]] = []

    def fail(faults: Faults, plan: StepPlan) -> None:
        if not computed:
            tensor = Computed()
            computed.append(weakref.ref(tensor))
            raise RuntimeError("a device error")

    monkeypatch.setattr(Faults, "before" if when == "at_launch" else "after", fail)
    with GarbageSchedule().paused():
        core = scripted_core(CONFIG, Faults().before, Faults().after, 2)
        ask(core, "a")
        assert run(core)["a"][-1].error_kind == "failed"
        assert [reference() for reference in computed] == [None]


def test_out_of_memory_is_logged_with_what_the_device_said(
    core: EngineCore, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.at_end[1] = StepOutOfMemory("tried to allocate 2 GiB")
    ask(core, "a")
    run(core)
    (record,) = caplog.records
    assert "tried to allocate 2 GiB" in record.getMessage()
    assert "--max-num-seqs" in record.getMessage()


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"allowed_token_ids": (4, 5)}, "invalid", "no_token_left"),
        ({"bad_words_token_ids": ((4,),)}, "invalid", "no_token_left"),
        ({"min_tokens": 2}, "invalid", "no_token_left"),
        ({}, "failed_alone", None),  # the client forbade nothing
        ({"logit_bias": {3: -100.0}}, "failed_alone", None),  # nor by a bias, which is finite
    ],
)
def test_no_token_left_is_the_clients_mistake_where_it_forbade_some(
    core: EngineCore, fields: dict[str, object], kind: str, code: str | None
) -> None:
    assert isinstance(core.executor, CountingExecutor)
    core.executor.failing["a"] = FailureKind.NOTHING_LEFT
    core.add(AddRequest("a", [5], SamplingParams(max_tokens=4, **fields), ()))  # type: ignore[arg-type]
    (output,) = run(core)["a"]
    assert (output.error_kind, output.error_code) == (kind, code)
    assert core.stats().nan_requests == (0 if kind == "invalid" else 1)


def test_requests_ended_by_nan_are_counted(core: EngineCore) -> None:
    assert isinstance(core.executor, CountingExecutor)
    for name in "abc":
        ask(core, name)
    core.executor.failing |= {"a": FailureKind.NOT_NUMBERS, "c": FailureKind.NOT_NUMBERS}
    outputs = run(core)
    assert {name: outputs[name][-1].error_kind for name in "abc"} == {
        "a": "failed_alone",
        "b": None,
        "c": "failed_alone",
    }
    assert core.stats().nan_requests == 2


def test_idleness_of_the_device_is_passed_on(core: EngineCore) -> None:
    assert isinstance(core.executor, CountingExecutor)
    core.executor.idle_seconds = 1.25
    assert core.stats().gpu_idle_seconds == 1.25


def test_the_loop_settles_when_nothing_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(tmp_path, max_in_flight=2)
    checked: list[list[tuple[str, int]]] = []
    monkeypatch.setattr(EngineCore, "check_integrity", lambda core: checked.append(list(events(core))))
    wire.turn(AddRequest("a", [5], SamplingParams(max_tokens=50, stop_token_ids=(6,)), ()))
    assert wire.outputs[-1].finish_reason == "stop"
    assert wire.reader.read().busy  # a step is still on its way
    wire.turn()
    assert checked == []
    assert not wire.reader.read().busy
    wire.turn()
    assert checked == [[(LAUNCH, 1), (LAUNCH, 2), (WAIT, 1), (WAIT, 2)]]
    wire.turn()
    assert wire.waits == [5.0, 0.0, 0.0, 5.0]
    assert len(checked) == 1
    wire.reader.close()
