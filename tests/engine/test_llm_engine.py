"""The engine a step at a time, and its asynchronous twin."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine import (
    LLM,
    AsyncLLM,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from pagefleet_engine.engine_core.messages import RequestOutput as WireOutput
from pagefleet_engine.engine_core.wire import FAILED_ALONE, INVALID
from pagefleet_engine.errors import EngineDead, InvalidRequest, RequestFailed
from pagefleet_engine.llm_engine import OpenRequest

from tests.fakes.slow_requests import slow
from tests.fakes.small_model import write_small_model

SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "num_kv_blocks": 64,
    "max_num_seqs": 8,
    "device": "cpu",
    "num_threads": 1,
}


def greedy(kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, output_kind=kind, **{"max_tokens": 6, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine.from_engine_args(EngineArgs(str(folder), **SETTINGS))
    yield engine
    engine.shutdown()


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_an_output_shows_what_its_kind_says(engine: LLMEngine) -> None:
    for kind in RequestOutputKind:
        engine.add_request(kind.name, "the quick", greedy(kind))
    assert engine.get_num_unfinished_requests() == 3
    found = run(engine)
    (whole,) = texts(found["FINAL_ONLY"])
    assert "".join(texts(found["DELTA"])) == whole == texts(found["CUMULATIVE"])[-1]
    assert texts(found["CUMULATIVE"]) == [whole[: len(text)] for text in texts(found["CUMULATIVE"])]
    assert [len(output.outputs[0].token_ids) for output in found["CUMULATIVE"]] == [1, 2, 3, 4, 5, 6]
    assert [len(output.outputs[0].token_ids) for output in found["DELTA"]] == [1] * 6
    assert [output.finished for output in found["DELTA"]] == [False] * 5 + [True]


def test_several_outputs_are_one_request(engine: LLMEngine) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    engine.add_request("a", [5, 6, 7], params)
    last = run(engine)["a"][-1]
    assert [output.index for output in last.outputs] == [0, 1, 2]
    assert [len(output.logprobs or ()) for output in last.outputs] == [4, 4, 4]
    assert len(last.prompt_logprobs or ()) == 3


def test_prompt_logprobs_come_once_in_deltas(engine: LLMEngine) -> None:
    engine.add_request("a", [5, 6, 7], greedy(RequestOutputKind.DELTA, prompt_logprobs=0))
    assert [output.prompt_logprobs is not None for output in run(engine)["a"]] == [True] + [False] * 5


def test_cumulative_logprobs_are_of_all_tokens_in_deltas_too(engine: LLMEngine) -> None:
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        engine.add_request(kind.name, "the quick", greedy(kind, logprobs=0))
    found = run(engine)
    deltas = [output.outputs[0] for output in found["DELTA"]]
    of_tokens = [one.logprob for delta in deltas for entry in delta.logprobs or () for one in entry.values()]
    sums = list(itertools.accumulate(of_tokens))
    assert len(sums) == 6
    assert [delta.cumulative_logprob for delta in deltas] == pytest.approx(sums)
    assert [output.outputs[0].cumulative_logprob for output in found["CUMULATIVE"]] == pytest.approx(sums)


def test_parameters_are_the_script_s_again_once_they_are_submitted(engine: LLMEngine) -> None:
    params = greedy(max_tokens=2)
    engine.add_request("a", "x", params)
    params.max_tokens = 5
    engine.add_request("b", "x", params)
    found = run(engine)
    assert [len(found[name][-1].outputs[0].token_ids) for name in "ab"] == [2, 5]


def test_an_aborted_request_is_gone(engine: LLMEngine) -> None:
    for name in "abc":
        engine.add_request(name, "x", greedy())
    engine.step()
    engine.abort_request(["a", "unknown"])
    engine.abort_request("b")
    assert run(engine).keys() == {"c"}
    assert engine.stats().kv_usage == 0


def test_a_name_is_one_open_request_s(engine: LLMEngine) -> None:
    engine.add_request("a", "x", greedy())
    with pytest.raises(InvalidRequest, match="open request 'a'"):
        engine.add_request("a", "y", greedy())
    run(engine)
    engine.add_request("a", "x", greedy())
    run(engine)


def test_wrong_requests_are_refused_before_they_are_queued(engine: LLMEngine) -> None:
    params = greedy(max_tokens=2)
    params.min_tokens = 3
    for prompt, wrong in (("x", params), ([10**6], greedy()), ({"image": 1}, greedy())):
        with pytest.raises(InvalidRequest):
            engine.add_request("a", prompt, wrong)
    with pytest.raises(InvalidRequest, match="Adapters"):
        engine.add_request("a", "x", greedy(), lora_request=object())  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


def test_a_request_that_fails_leaves_the_others(engine: LLMEngine) -> None:
    engine.add_request("good", "x", greedy())
    engine.add_request("bad", "x", greedy(allowed_token_ids=[3], logit_bias={3: -100.0}, bad_words=["\x01"]))
    engine.abort_request("bad")
    engine.add_request("bad", "x", greedy(allowed_token_ids=[300], bad_words_token_ids=((300,),)))
    with pytest.raises((RequestFailed, InvalidRequest)):
        run(engine)
    assert run(engine)["good"][-1].finished


def fail_in_one_step(engine: LLMEngine, kinds: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the core's next outputs begin with an error for each of the requests, in place of their own."""
    core, by_name = engine._core, engine._by_id
    errors = [
        WireOutput(by_name[name].message.request_id, [], "error", error=name, error_kind=kind)
        for name, kind in kinds.items()
    ]
    failed = {error.request_id for error in errors}

    def step() -> list[WireOutput]:
        outputs = type(core).step(core)
        if not outputs:
            return []
        monkeypatch.undo()
        return [*errors, *(output for output in outputs if output.request_id not in failed)]

    monkeypatch.setattr(core, "step", step)


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_what_fails_costs_no_other_request_a_token(
    engine: LLMEngine, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = greedy(RequestOutputKind.DELTA, max_tokens=max_tokens)
    engine.add_request("good", "the quick", params)
    whole = run(engine)["good"]
    for name in ("bad", "worse", "good"):
        engine.add_request(name, "the quick", params)
    fail_in_one_step(engine, {"bad": INVALID, "worse": FAILED_ALONE}, monkeypatch)
    with pytest.raises(InvalidRequest, match="bad"):
        run(engine)
    with pytest.raises(RequestFailed, match="worse"):
        run(engine)
    assert engine.get_num_unfinished_requests() == 1
    found = run(engine)
    assert found.keys() == {"good"}
    assert texts(found["good"]) == texts(whole)
    assert found["good"][-1].finished


def test_when_each_request_was_where(engine: LLMEngine) -> None:
    engine.add_request("a", "x", greedy())
    found = run(engine)["a"][-1].metrics
    assert found is not None
    assert 0 < found.queued_ts <= found.scheduled_ts <= found.first_token_ts <= found.last_token_ts
    assert found.num_generation_tokens == 6
    assert found.arrival_time > 1e9 > found.first_token_latency > 0


def test_flags_of_a_script_become_keywords() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--own", default="x")
    line = (
        "--model m --max_model_len 64 --no-enable-prefix-caching -tp 1 -dp 2 --enforce-eager --kv-cache-memory-bytes 1M"
    )
    arguments = parser.parse_args(line.split())
    assert arguments.own == "x"
    assert EngineArgs.from_cli_args(arguments).keywords == {
        "model": "m",
        "max_model_len": "64",
        "enable_prefix_caching": False,
        "tensor_parallel_size": "1",
        "data_parallel_size": "2",
        "enforce_eager": True,
        "kv_cache_memory_bytes": "1M",
    }
    assert EngineArgs.from_cli_args(argparse.Namespace(model="m", other=1)).keywords == {"model": "m"}


def test_an_engine_that_nobody_holds_frees_its_model(folder: Path) -> None:
    engine = LLMEngine(str(folder), **SETTINGS)
    freed: list[float] = []
    engine._core.shutdown = freed.append  # type: ignore[method-assign,assignment]
    finalizer = engine._unless_shut
    assert finalizer.alive
    del engine
    assert not finalizer.alive


@pytest.fixture(scope="module")
def offline(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


def test_a_batch_that_failed_leaves_nothing_to_the_next(offline: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, submit = offline.llm_engine, offline.llm_engine.submit
    sent: list[str] = []

    def submit_and_fail(request: OpenRequest) -> None:
        submit(request)
        sent.append(request.request_id)
        if len(sent) == 3:
            fail_in_one_step(engine, dict.fromkeys(sent[:2], FAILED_ALONE), monkeypatch)

    monkeypatch.setattr(engine, "submit", submit_and_fail)
    with pytest.raises(RequestFailed):
        offline.generate(["a", "b", "c"], greedy(max_tokens=1))
    assert not engine.has_unfinished_requests()
    assert len(offline.generate("a", greedy())[0].outputs[0].token_ids) == 6


async def collect(engine: AsyncLLM, prompt: str, params: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


@pytest.mark.usefixtures("plugin")
def test_streams_give_what_offline_runs_give(folder: Path, offline: LLM) -> None:
    prompts = ["a", "b", "the quick"]
    expected = [result.outputs[0].token_ids for result in offline.generate(prompts, greedy())]

    async def ask() -> None:
        engine = AsyncLLM(str(folder), logits_processors=["slow"], **SETTINGS)
        try:
            found = await asyncio.gather(
                *(collect(engine, prompt, greedy(), f"r{index}") for index, prompt in enumerate(prompts))
            )
            assert [outputs[-1].outputs[0].token_ids for outputs in found] == expected
            deltas = await collect(engine, "the quick", greedy(RequestOutputKind.DELTA), "d")
            assert [token for output in deltas for token in output.outputs[0].token_ids] == expected[2]
            metrics = deltas[-1].metrics
            assert metrics is not None
            assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
            await abort_one(engine)
            with pytest.raises(InvalidRequest):
                await collect(engine, "x" * 400, greedy(), "long")
            await engine.check_health()
            assert await engine.reset_prefix_cache()
        finally:
            engine.shutdown()
        with pytest.raises(EngineDead):
            await collect(engine, "x", greedy(), "late")

    asyncio.run(ask())


async def abort_one(engine: AsyncLLM) -> None:
    reasons = []
    async for output in engine.generate("x", greedy(max_tokens=200, n=1, extra_args=slow()), "given up"):
        reasons.append(output.outputs[0].finish_reason)
        await engine.abort(["given up", "unknown"])
    assert reasons[-1] == "abort"
    assert len(reasons) < 200


def test_an_engine_that_never_ran_is_shut_down_at_once(folder: Path) -> None:
    AsyncLLM(str(folder), **SETTINGS).shutdown()

    async def start_and_stop() -> None:
        engine = AsyncLLM(str(folder), **SETTINGS)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        engine.shutdown()
        with pytest.raises((asyncio.CancelledError, EngineDead)):
            await starting

    asyncio.run(start_and_stop())
