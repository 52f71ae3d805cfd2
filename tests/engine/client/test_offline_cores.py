"""Data ranks behind `LLM` and `AsyncLLM`: real processes, driven by a script."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.async_llm import AsyncLLM
from pagefleet_engine.client.offline_cores import OfflineCores
from pagefleet_engine.engine_core.messages import AddRequest, RequestOutput
from pagefleet_engine.errors import ConfigError, EngineDead, InvalidRequest, ModelLoadError

from tests.engine.client.test_async_client import COMMAND, LONG
from tests.engine.client.test_data_ranks import config
from tests.fakes.small_model import write_small_model

pytestmark = pytest.mark.fleet

SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8, "device": "cpu",
    "num_threads": 1,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5 + number, 6, 7] for number in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with LLM(str(folder), **SETTINGS) as llm:
        return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), data_parallel_size=2, **SETTINGS) as llm:
        yield llm


def cores_of(llm: LLM) -> OfflineCores:
    cores = llm.llm_engine._core
    assert isinstance(cores, OfflineCores)
    return cores


def test_answers_of_a_script_are_those_of_one_core(llm: LLM, expected: list[list[int]]) -> None:
    assert [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, GREEDY)] == expected
    assert all(core.stats is not None and core.stats.steps for core in cores_of(llm)._cores)
    assert llm.stats().prefix_cache_queries_tokens == 30
    assert llm.llm_engine.max_model_len == cores_of(llm).limits.max_model_len
    assert llm.startup_seconds["imports"] > 0
    n = SamplingParams(n=3, temperature=0.0, max_tokens=6, ignore_eos=True)
    (result,) = llm.generate([PROMPTS[0]], n)
    assert [list(output.token_ids) for output in result.outputs] == [expected[0]] * 3
    assert llm.reset_prefix_cache()


def test_a_script_in_an_event_loop_may_use_it_too(llm: LLM, expected: list[list[int]]) -> None:
    async def notebook() -> list[int]:
        return list(llm.generate([PROMPTS[3]], GREEDY)[0].outputs[0].token_ids)

    assert asyncio.run(notebook()) == expected[3]


def test_an_aborted_request_is_told_nothing_more(llm: LLM, expected: list[list[int]]) -> None:
    engine = llm.llm_engine
    long = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    engine.add_request("long", {"prompt_token_ids": PROMPTS[0]}, long)
    engine.add_request("short", {"prompt_token_ids": PROMPTS[1]}, GREEDY)
    engine.abort_request("long")
    told = []
    while engine.has_unfinished_requests():
        told += engine.step()
    assert {output.request_id for output in told} == {"short"}
    assert list(told[-1].outputs[0].token_ids) == expected[1]
    assert not cores_of(llm)._seats
    assert engine.step() == []


def test_what_cannot_run_is_refused_before_it_is_sent(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([[10**6]], GREEDY)
    assert not cores_of(llm)._seats


def test_a_setting_that_cannot_work_is_told_and_nothing_stays(folder: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="one request of max_model_len"):
        LLM(str(folder), data_parallel_size=2, max_model_len=64, **{**SETTINGS, "num_kv_blocks": 1})
    assert threading.active_count() == before


def add(cores: OfflineCores, number: int, sampling: SamplingParams) -> None:
    assert cores.add(AddRequest(f"r{number}", [number], sampling, ())) == []


def step_for_ever(cores: OfflineCores) -> None:
    while True:
        cores.step()


def test_a_rank_that_is_killed_ends_the_engine_of_a_script() -> None:
    cores = OfflineCores(config("delay=0.01"), COMMAND)
    try:
        for number in range(4):
            add(cores, number, LONG)
        cores.step()
        pids = [core.process.pid for core in cores._cores]
        os.kill(pids[0], signal.SIGKILL)
        thread = cores._thread
        with pytest.raises(EngineDead, match=r"was killed by signal 9 of data rank 0"):
            step_for_ever(cores)
        with pytest.raises(EngineDead):
            add(cores, 9, LONG)
    finally:
        cores.shutdown(1.0)
        cores.shutdown()
    assert not thread.is_alive()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def step_until_interrupted(cores: OfflineCores) -> None:
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    cores.step()


def test_who_is_interrupted_loses_no_output() -> None:
    cores = OfflineCores(config(), COMMAND)
    pids = [core.process.pid for core in cores._cores]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that there is nothing to tell yet
        add(cores, 10, SamplingParams(max_tokens=2))
        with pytest.raises(KeyboardInterrupt):
            step_until_interrupted(cores)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        found: list[RequestOutput] = []
        while not found or found[-1].finish_reason is None:
            found += cores.step()
        assert [token for output in found for token in output.new_token_ids] == [11, 12]
    finally:
        signal.signal(signal.SIGINT, before)
        cores.shutdown()


def test_a_rank_that_cannot_load_is_told() -> None:
    with pytest.raises(ModelLoadError, match=r"^the fake model is torn$"):
        OfflineCores(config("broken=torn"), COMMAND)


def test_an_asynchronous_script_uses_all_ranks(folder: Path, expected: list[list[int]]) -> None:
    async def script() -> list[list[int]]:
        engine = AsyncLLM(str(folder), data_parallel_size=2, **SETTINGS)

        async def one(number: int) -> list[int]:
            tokens: list[int] = []
            async for output in engine.generate({"prompt_token_ids": PROMPTS[number]}, GREEDY, f"r{number}"):
                tokens = list(output.outputs[0].token_ids)
            return tokens

        try:
            found = await asyncio.gather(*map(one, range(len(PROMPTS))))
            client = await engine.start()
            assert all(stats is not None and stats.steps for stats in client.rank_stats)
            return found
        finally:
            engine.shutdown()

    assert asyncio.run(script()) == expected
