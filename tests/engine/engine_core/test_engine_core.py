from typing import Any

import pytest
from pagefleet_engine.config import EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.core.step import StepPlan
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import AddRequest, RequestOutput
from pagefleet_engine.errors import EngineDead
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.scripted_core import CountingExecutor, scripted_core

CONFIG = EngineConfig(model=ModelConfig(model="fake"), scheduler=SchedulerConfig(max_num_seqs=8, max_num_queued_reqs=8))


class Device:
    """Fails the steps it is told to."""

    def __init__(self) -> None:
        self.failing_steps: set[int] = set()

    def __call__(self, plan: StepPlan) -> None:
        if plan.step_id in self.failing_steps:
            raise RuntimeError("CUDA error at 0xdeadbeef")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def core(device: Device) -> EngineCore:
    return scripted_core(CONFIG, device)


def message(request_id: str, first: int = 10, max_tokens: int = 3, **sampling: Any) -> AddRequest:
    return AddRequest(request_id, [first - 1, first], SamplingParams(max_tokens=max_tokens, **sampling), (299,))


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_requests_run_to_their_end(core: EngineCore) -> None:
    assert not core.add(message("a", 10))
    assert not core.add(message("b", 297, max_tokens=9))
    outputs = run(core)
    assert tokens(outputs["a"]) == [11, 12, 13]
    assert outputs["a"][-1].finish_reason == "length"
    assert tokens(outputs["b"]) == [298, 299]
    assert outputs["b"][-1].finish_reason == "stop"
    assert outputs["a"][0].num_cached_tokens == 0
    core.check_integrity()


def test_logprobs_go_on_the_wire_as_they_were_asked_for(core: EngineCore) -> None:
    core.add(message("a", logprobs=0))
    core.add(message("b"))
    outputs = run(core)
    entries = outputs["a"][0].logprobs
    assert entries is not None
    assert (entries[0].token_ids, entries[0].rank) == ([11], 1)
    assert outputs["b"][0].logprobs is None


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (AddRequest("x", [], SamplingParams(), ()), "prompt"),
        (AddRequest("x", [300], SamplingParams(), ()), "prompt"),
        (AddRequest("x", [1] * 512, SamplingParams(), ()), "prompt"),
        (AddRequest("x", [1], SamplingParams(max_tokens=512), ()), "max_tokens"),
        (AddRequest("x", [1], SamplingParams(n=2), (), resumed_token_ids=[2]), "n"),
        (AddRequest("x", [1], SamplingParams(), (), cache_salt="ä"), "cache_salt"),
        (AddRequest("x", [1], SamplingParams(), (), adapter="a"), "adapter"),
        (AddRequest("a", [1], SamplingParams(), ()), "request_id"),
    ],
)
def test_a_wrong_request_is_answered_and_harms_nobody(core: EngineCore, bad: AddRequest, param: str) -> None:
    core.add(message("a"))
    refused = core.add(bad)[0]
    assert (refused.finish_reason, refused.error_kind, refused.error_param) == ("error", "invalid", param)
    assert tokens(run(core)["a"]) == [11, 12, 13]
    core.check_integrity()


def test_a_full_queue_says_when_to_come_back(core: EngineCore) -> None:
    answers = [core.add(message(f"r{number}")) for number in range(9)]
    assert answers[:8] == [[]] * 8
    (refused,) = answers[8]
    assert refused.error_kind == "queue_full"
    assert (refused.retry_after_s or 0) >= 1
    assert len(core.abort([f"r{number}" for number in range(1, 9)])) == 7, "there is room again, for all but one output"
    several = core.add(AddRequest("x", [1], SamplingParams(n=8), ()))
    assert [answer.request_id for answer in several] == [f"x/{number}" for number in range(8)]
    assert {answer.error_kind for answer in several} == {"queue_full"}
    assert core.stats().requests_waiting == 1, "those that had a place gave it back"


def test_abort_frees_the_blocks(core: EngineCore) -> None:
    core.add(message("a", max_tokens=400))
    core.step()
    assert core.stats().kv_usage > 0
    ended = core.abort(["a", "unknown"])
    assert [(output.request_id, output.finish_reason) for output in ended] == [("a", "abort")]
    assert core.stats().kv_usage == 0
    assert not core.has_work
    core.check_integrity()


def test_a_failed_step_ends_its_own_requests_only(core: EngineCore, device: Device) -> None:
    core.add(message("a"))
    device.failing_steps = {1}
    (failed,) = core.step()
    assert (failed.request_id, failed.finish_reason, failed.error_kind) == ("a", "error", "failed")
    assert "0x" not in (failed.error or "")
    core.check_integrity()
    core.add(message("b"))
    assert tokens(run(core)["b"]) == [11, 12, 13]
    assert core.stats().kv_usage == 0


def test_nothing_of_a_failed_step_stays_in_the_prefix_cache(core: EngineCore, device: Device) -> None:
    device.failing_steps = {1}
    long_prompt = AddRequest("a", list(range(40)), SamplingParams(max_tokens=1), ())
    core.add(long_prompt)
    core.step()
    core.add(AddRequest("b", list(range(40)), SamplingParams(max_tokens=1), ()))
    assert run(core)["b"][0].num_cached_tokens == 0


def test_two_failures_with_a_success_between_are_survived(core: EngineCore, device: Device) -> None:
    device.failing_steps = {1, 3}
    for name in ("a", "b", "c"):
        core.add(message(name, max_tokens=1))
        run(core)
    assert not core.has_work


def test_two_failed_steps_in_a_row_end_the_core(core: EngineCore, device: Device) -> None:
    device.failing_steps = {1, 2}
    core.add(message("a"))
    core.step()
    core.add(message("b"))
    with pytest.raises(EngineDead, match="two steps in a row"):
        core.step()


def test_an_idle_core_steps_for_nothing(core: EngineCore) -> None:
    assert core.step() == []
    assert core.stats().steps == 0


def test_the_prefix_cache_can_be_forgotten(core: EngineCore) -> None:
    def cached() -> int | None:
        core.add(AddRequest("a", list(range(40)), SamplingParams(max_tokens=1), ()))
        return run(core)["a"][0].num_cached_tokens

    assert cached() == 0
    assert cached() == 36
    core.reset_prefix_cache()
    assert cached() == 0


def test_shutdown_reaches_the_executor(core: EngineCore) -> None:
    core.shutdown()
    assert isinstance(core.executor, CountingExecutor)
    assert core.executor.is_shut_down


def test_shutdown_reaches_the_executor_also_where_the_connector_cannot_be_closed(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(connector: object) -> None:
        raise RuntimeError("a thread is gone")

    monkeypatch.setattr(type(core._scheduler.connector), "close", refuse)
    with pytest.raises(RuntimeError, match="a thread is gone"):
        core.shutdown()
    assert isinstance(core.executor, CountingExecutor)
    assert core.executor.is_shut_down


def test_a_device_that_is_gone_ends_the_core_at_once() -> None:
    def gone(plan: StepPlan) -> None:
        raise EngineDead("rank 1 is gone")

    core = scripted_core(CONFIG, gone)
    core.add(message("a"))
    with pytest.raises(EngineDead, match="rank 1 is gone"):
        core.step()


def test_a_device_that_is_gone_is_noticed_while_idle(core: EngineCore) -> None:
    executor = core.executor
    assert isinstance(executor, CountingExecutor)
    executor.bells = (99,)
    assert core.bells == [99]

    def gone() -> None:
        raise EngineDead("rank 1 is gone")

    executor.check = gone  # type: ignore[method-assign]
    with pytest.raises(EngineDead, match="rank 1 is gone"):
        core.settle()
