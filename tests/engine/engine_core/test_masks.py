"""Answers that hold a form: masks filled beside the steps, rows that do not wait for them, stretches taken at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from pagefleet_engine.config import EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.core.parking import Suppliers
from pagefleet_engine.core.step import StepPlan
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.masks import _of_one_word, _only_token
from pagefleet_engine.engine_core.messages import AddRequest, RequestOutput
from pagefleet_engine.errors import GrammarFailed, StepOutOfMemory
from pagefleet_engine.executor.executor import PendingStep
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_protocol.structured_outputs import StructuredOutputsParams
from pagefleet_protocol.thinking import Thinking

from tests.fakes.scripted_core import CountingExecutor, scripted_core
from tests.fakes.trie_forms import EOS, TrieSource, choice

CONFIG = EngineConfig(model=ModelConfig(model="fake"), scheduler=SchedulerConfig(max_num_seqs=8))
FORM = choice([20, 30, 25], [20, 31], [40, 41, 42, 43, 44, 45], [40, 99])
LONG = choice([50, 51, 52, 53, 54, 55, 60], [50, 51, 52, 53, 54, 55, 70])


@pytest.fixture
def source() -> Iterator[TrieSource]:
    source = TrieSource()
    yield source
    source.may_fill.set()


@pytest.fixture(params=[1, 2, 3], ids="depth={}".format)
def core(request: pytest.FixtureRequest, source: TrieSource) -> Iterator[EngineCore]:
    core = scripted_core(CONFIG, max_in_flight=request.param, suppliers=Suppliers(grammars=source))
    yield core
    source.may_fill.set()
    core.shutdown()


def ask(
    core: EngineCore,
    name: str,
    form: StructuredOutputsParams | None,
    prompt: Sequence[int] = (9, 10),
    resumed: Sequence[int] = (),
    **more: Any,
) -> list[RequestOutput]:
    sampling = SamplingParams(**{"max_tokens": 12, "structured_outputs": form, **more})
    return core.add(AddRequest(name, list(prompt), sampling, (EOS,), resumed_token_ids=list(resumed)))


def run(core: EngineCore, turn: Callable[[], None] = lambda: None) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(500):
        if not core.has_work:
            core.check_integrity()
            return outputs
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.check_integrity()
        turn()
    raise AssertionError("not done")


def tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def plans(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Those that are launched from now on."""
    seen: list[StepPlan] = []
    launch = core.executor.launch

    def note(plan: StepPlan) -> PendingStep:
        seen.append(plan)
        return launch(plan)

    monkeypatch.setattr(core.executor, "launch", note)
    return seen


def test_an_answer_holds_its_form_and_ends_with_it(core: EngineCore) -> None:
    ask(core, "form", FORM)
    ask(core, "free", None)
    outputs = run(core)
    assert tokens(outputs["form"]) == [20, 30, 25]
    assert outputs["form"][-1].finish_reason == "stop"
    assert tokens(outputs["free"]) == list(range(11, 23))
    assert core.stats().forms["pagefleet_engine_form_requests_total"] == 1


def test_a_form_that_may_go_on_ends_with_the_ending_token(core: EngineCore) -> None:
    ask(core, "a", choice([5], [5, 6]), prompt=[1, 2, 4])
    outputs = run(core)
    assert tokens(outputs["a"]) == [5, 6]
    ask(core, "b", choice([5], [5, 30]), prompt=[1, 4])
    outputs = run(core)
    assert (tokens(outputs["b"]), outputs["b"][-1].finish_reason) == ([5, EOS], "stop")
    ask(core, "c", choice([5], [5, 30]), prompt=[1, 4], min_tokens=2)
    outputs = run(core)
    assert (tokens(outputs["c"])[0], outputs["c"][-1].finish_reason) == (5, "stop")


def test_only_one_token_left_time_after_time_is_taken_in_one_step(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = plans(core, monkeypatch)
    ask(core, "a", LONG)
    outputs = run(core)
    assert tokens(outputs["a"]) == [50, 51, 52, 53, 54, 55, 60]
    assert [len(row.new_token_ids) for row in outputs["a"]] == [6, 1]
    told = [plan.told["a"] for plan in seen if plan.told]
    assert told == [(50, 51, 52, 53, 54, 55)]
    assert core.stats().forms["pagefleet_engine_form_forced_tokens_total"] == 6


def test_a_short_stretch_is_sampled_in_a_large_batch(core: EngineCore) -> None:
    for name in ("a", "b", "c", "d"):
        ask(core, name, choice([50, 51, 52], [90]), prompt=[1, 49])
    for output in run(core).values():
        assert tokens(output) == [50, 51, 52]
    assert core.stats().forms["pagefleet_engine_form_forced_tokens_total"] == 0


@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"allowed_token_ids": tuple(range(100))}])
def test_what_is_described_or_may_be_banned_is_sampled(core: EngineCore, fields: dict[str, Any]) -> None:
    ask(core, "a", LONG, **fields)
    outputs = run(core)
    assert tokens(outputs["a"]) == [50, 51, 52, 53, 54, 55, 60]
    assert core.stats().forms["pagefleet_engine_form_forced_tokens_total"] == 0
    assert sum(len(output.logprobs or ()) for output in outputs["a"]) == 0, "the fake counts those of masked rows not"


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_a_stretch_stops_at_the_limit(core: EngineCore, max_tokens: int) -> None:
    ask(core, "a", LONG, max_tokens=max_tokens)
    outputs = run(core)
    assert tokens(outputs["a"]) == [50, 51, 52, 53, 54, 55, 60][:max_tokens]
    assert outputs["a"][-1].finish_reason == "length"


def test_a_stretch_stops_at_a_stop_token(core: EngineCore) -> None:
    ask(core, "a", LONG, stop_token_ids=(53,))
    outputs = run(core)
    assert tokens(outputs["a"]) == [50, 51, 52, 53]
    assert (outputs["a"][-1].finish_reason, outputs["a"][-1].stop_token_id) == ("stop", 53)


def test_a_stretch_may_end_the_form(core: EngineCore) -> None:
    ask(core, "a", choice([50, 51, 52]))
    outputs = run(core)
    assert (tokens(outputs["a"]), outputs["a"][-1].finish_reason) == ([50, 51, 52], "stop")


def test_rows_without_a_form_go_on_while_masks_are_late(core: EngineCore, source: TrieSource) -> None:
    ask(core, "form", FORM)
    ask(core, "free", None, max_tokens=20)
    told: list[RequestOutput] = []
    source.may_fill.clear()
    while not any(output.finish_reason for output in told):
        told += core.step()
        core.check_integrity()
    assert {output.request_id for output in told} == {"free"}
    assert tokens(told) == list(range(11, 31))
    source.may_fill.set()
    assert tokens(run(core)["form"]) == [20, 30, 25]
    assert source.num_fills <= 4, "what was filled late is used"


def test_a_late_mask_outlives_its_request(core: EngineCore, source: TrieSource) -> None:
    ask(core, "gone", FORM)
    ask(core, "free", None)
    source.may_fill.clear()
    core.step()
    core.step()
    assert core.abort(["gone"])
    ask(core, "gone", FORM)
    source.may_fill.set()
    outputs = run(core)
    assert (tokens(outputs["gone"]), tokens(outputs["free"])[-1]) == ([20, 30, 25], 22)


def test_a_core_whose_rows_all_wait_for_masks_takes_and_ends_requests(core: EngineCore, source: TrieSource) -> None:
    ask(core, "form", FORM)
    ask(core, "gone", FORM)
    source.may_fill.clear()
    for _ in range(4):
        assert not core.step()
        core.check_integrity()
    assert core.abort(["gone"])
    ask(core, "free", None)
    told: list[RequestOutput] = []
    while not any(output.finish_reason for output in told):
        told += core.step()
    source.may_fill.set()
    assert tokens(told) == list(range(11, 23))
    assert tokens(run(core)["form"]) == [20, 30, 25]


def test_a_step_waits_for_the_masks_while_the_device_works(core: EngineCore, source: TrieSource) -> None:
    assert isinstance(core.executor, CountingExecutor)
    core.executor.is_computed = False
    ask(core, "form", FORM)
    ask(core, "free", None)
    assert tokens(run(core)["form"]) == [20, 30, 25]
    assert source.num_fills == 3


def test_a_form_is_compiled_off_the_queue_and_others_run(core: EngineCore, source: TrieSource) -> None:
    source.turns = 5
    ask(core, "form", FORM)
    assert not core.is_due
    core.step()
    assert core.is_stalled
    assert core.bells == [source.bell]
    ask(core, "free", None)
    outputs = run(core, source.turn)
    assert tokens(outputs["form"]) == [20, 30, 25]
    assert len(tokens(outputs["free"])) == 12


def test_forms_wait_in_their_tenants_turns_and_too_many_are_turned_away(core: EngineCore, source: TrieSource) -> None:
    for name, salt in (("a", None), ("b", "own"), ("c", "t-c"), ("d", "t-c/own")):
        core.add(AddRequest(name, [9], SamplingParams(structured_outputs=FORM), (EOS,), cache_salt=salt))
    assert source.tenants == ["", "own", "t-c", "t-c"]
    source.max_forms = 4
    (refused,) = ask(core, "late", FORM)
    assert (refused.error_kind, refused.retry_after_s) == ("queue_full", 5.0)
    assert set(run(core)) == {"a", "b", "c", "d"}


def test_a_form_that_does_not_compile_ends_its_own_request(core: EngineCore, source: TrieSource) -> None:
    source.turns = 2
    ask(core, "bad", FORM, n=2)
    ask(core, "free", None)
    source.refuses = True
    outputs = run(core, source.turn)
    for name in ("bad/0", "bad/1"):
        (refused,) = outputs[name]
        assert (refused.error_kind, refused.error_param) == ("invalid", "structured_outputs.choice")
    assert len(tokens(outputs["free"])) == 12
    source.refuses, source.fails = False, True
    ask(core, "bad", FORM)
    (failed,) = run(core, source.turn)["bad"]
    assert (failed.error_kind, failed.error_code) == ("failed_alone", "form_failed")


def test_a_form_that_breaks_while_it_is_followed_ends_its_own_request(core: EngineCore, source: TrieSource) -> None:
    ask(core, "form", FORM)
    ask(core, "free", None)
    core.step()
    source.breaks = True
    outputs = run(core)
    assert (outputs["form"][-1].error_kind, outputs["form"][-1].error_code) == ("failed_alone", "form_failed")
    assert tokens(outputs["free"])[-1] == 22


@pytest.mark.parametrize("thinking", [None, Thinking(end="<90>", budget=1)])
@pytest.mark.parametrize("error", [GrammarFailed("too complex"), RuntimeError("of a library")])
def test_a_form_that_breaks_within_a_stretch_ends_its_own_request(
    core: EngineCore, source: TrieSource, error: Exception, thinking: Thinking | None
) -> None:
    source.fills_each, source.error = 2, error
    ask(core, "form", LONG, thinking=thinking)
    ask(core, "free", None)
    outputs = run(core)
    assert (outputs["form"][-1].error_kind, outputs["form"][-1].error_code) == ("failed_alone", "form_failed")
    assert tokens(outputs["free"]) == list(range(11, 23))


def test_no_room_to_sample_masked_rows_ends_their_requests_alone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:

    def no_room(*row: object) -> None:
        raise StepOutOfMemory("tried to allocate 2 GiB")

    ask(core, "free", None)
    ask(core, "form", LONG, prompt=[49], logprobs=0)
    ask(core, "forced", LONG)
    begun = core.step()
    monkeypatch.setattr(core.executor, "sample", no_room)
    ask(core, "next", FORM)
    outputs = run(core)
    for name in ("form", "next", "forced"):
        assert outputs[name][-1].error_kind == "out_of_memory"
        assert outputs[name][-1].finish_reason == "error"
    assert tokens([output for output in begun if output.request_id == "free"] + outputs["free"]) == list(range(11, 23))
    assert core.stats().out_of_memory_steps >= 1
    monkeypatch.undo()
    ask(core, "form", FORM)
    assert tokens(run(core)["form"]) == [20, 30, 25]


def test_a_request_whose_form_compiles_may_leave(core: EngineCore, source: TrieSource) -> None:
    source.turns = 3
    ask(core, "form", FORM)
    assert [output.finish_reason for output in core.abort(["form"])] == ["abort"]
    assert not core.has_work
    core.check_integrity()


def test_a_resumed_answer_goes_on_within_its_form(core: EngineCore) -> None:
    ask(core, "a", FORM, resumed=[20])
    assert tokens(run(core)["a"]) == [30, 25]
    ask(core, "b", FORM, resumed=[20, 31])
    (output,) = run(core)["b"]
    assert (output.finish_reason, list(output.new_token_ids)) == ("stop", [])
    ask(core, "c", FORM, resumed=[20, 40])
    (refused,) = run(core)["c"]
    assert (refused.error_kind, refused.error_param) == ("invalid", "resumed_token_ids")


def test_a_core_without_forms_refuses_them_by_name() -> None:
    core = scripted_core(CONFIG)
    (refused,) = ask(core, "a", FORM)
    assert (refused.error_kind, refused.error_param) == ("invalid", "structured_outputs")


@pytest.mark.parametrize("token", [0, 31, 32, 63, 95])
def test_the_only_token_of_a_mask(token: int) -> None:
    mask = np.zeros(3, dtype=np.uint32)
    mask[token // 32] = 1 << (token % 32)
    assert _only_token(mask.view(np.int32)) == token
    mask[(token // 32 + 1) % 3] = 4
    assert _only_token(mask.view(np.int32)) is None
    mask[:] = 0
    mask[token // 32] = 5 << min(token % 32, 29)
    assert _only_token(mask.view(np.int32)) is None
    assert _only_token(np.zeros(3, dtype=np.int32)) is None


def test_quick_masks_are_filled_behind_a_launch_that_no_row_goes_on_from_without(
    source: TrieSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And beside it where one goes on."""
    monkeypatch.setattr("pagefleet_engine.engine_core.masks.GRACE_S", 100.0)
    core = scripted_core(CONFIG, max_in_flight=1, suppliers=Suppliers(grammars=source))
    assert isinstance(core.executor, CountingExecutor)
    launch, fill, events = core.executor.launch, source.fill, core.executor.events
    behind: list[bool] = []
    masked: list[StepPlan] = []
    changed = threading.Condition()

    def noted(rows: Any, masks: Any) -> dict[int, Exception]:
        with changed:
            behind.append(events[-1:] == [("launch", core.stats().steps)])
            changed.notify()
        return fill(rows, masks)

    def launched(plan: StepPlan) -> PendingStep:
        masked.extend([plan] if plan.masked else [])
        if len(plan.rows) > len(plan.masked) or len(masked) == 1:  # when nothing says yet that they are quick
            with changed:
                assert changed.wait_for(lambda: len(behind) >= len(masked), 10)
        return launch(plan)

    monkeypatch.setattr(source, "fill", noted)
    monkeypatch.setattr(core.executor, "launch", launched)
    ask(core, "form", FORM)
    assert tokens(run(core)["form"]) == [20, 30, 25]
    assert behind == [False, True, True]
    ask(core, "form", FORM)
    ask(core, "free", None)
    assert tokens(run(core)["form"]) == [20, 30, 25]
    assert behind[3:] == [False] * 3
    core.shutdown()


@pytest.mark.parametrize("num_words", [3, 700])
def test_rows_that_may_have_one_token_alone_are_found(num_words: int) -> None:
    masks = np.zeros((4, num_words), dtype=np.int32)
    masks[1, num_words - 1] = -1
    masks[2, :2] = 1
    masks[3, 0] = 8
    assert _of_one_word(masks) == [1, 3]


def test_a_thought_is_ended_by_its_budget_and_the_form_follows(core: EngineCore) -> None:
    thinking = Thinking(end="<90><91><92>", budget=3)
    ask(core, "a", FORM, thinking=thinking)
    ask(core, "free", None)
    outputs = run(core)
    assert tokens(outputs["a"]) == [11, 12, 13, 90, 91, 92, 20, 30, 25]
    assert outputs["a"][-1].finish_reason == "stop"
    assert len(tokens(outputs["free"])) == 12


def test_without_a_form_nothing_is_masked_after_the_thought(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = plans(core, monkeypatch)
    ask(core, "a", None, thinking=Thinking(end="<90>", budget=2))
    assert tokens(run(core)["a"]) == [11, 12, 90, *range(91, 100)]
    assert 3 <= sum(bool(plan.masked) for plan in seen) <= 4
    ask(core, "b", None, thinking=Thinking(end="<90>"))
    assert tokens(run(core)["b"]) == list(range(11, 23)), "nothing is asked of a thought without a budget"
