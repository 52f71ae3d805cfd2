"""A real model over rank processes, tensor ranks and stages: offline, and served."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from pagefleet_engine import LLM, SamplingParams, StructuredOutputsParams
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.executor import hang_watch

from tests.engine.executor.test_processes import PATIENCE
from tests.fakes.fleet_processes import all_gone, child_pids, shared_memory
from tests.fakes.slow_requests import SLOW, finding_plugin, slow

pytestmark = pytest.mark.fleet

SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 256, "num_threads": 1}
FORM = StructuredOutputsParams(json='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
PROMPTS = {
    "What is pagefleet?": SamplingParams(temperature=0, max_tokens=24, logprobs=2),
    "Tell me a story": SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True),
    "Give me JSON": SamplingParams(temperature=1, seed=4, max_tokens=24, structured_outputs=FORM),
    "Once": SamplingParams(
        temperature=1, seed=5, top_k=20, repetition_penalty=1.2, max_tokens=24, prompt_logprobs=2, stop=("e t",)
    ),
}


def answers(ranks: int, stages: int = 1, **settings: Any) -> list[tuple[int, ...]]:
    llm = LLM("builtin://tiny", tensor_parallel_size=ranks, pipeline_parallel_size=stages, **SETTINGS, **settings)
    try:
        told = llm.generate(list(PROMPTS), list(PROMPTS.values()), use_tqdm=False)
        return [tuple(one.outputs[0].token_ids) for one in told]
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """What one rank answers."""
    return answers(1)


def test_an_llm_over_ranks(alone: list[tuple[int, ...]]) -> None:
    before = child_pids(os.getpid())  # of tests that ran in this process
    assert answers(2) == alone
    assert set(child_pids(os.getpid())) <= set(before)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_llm_in_stages(alone: list[tuple[int, ...]], ranks: int) -> None:
    before = child_pids(os.getpid())
    assert answers(ranks, stages=2) == alone
    assert set(child_pids(os.getpid())) <= set(before)


def test_an_llm_whose_ranks_have_tokens_of_their_own(alone: list[tuple[int, ...]]) -> None:
    assert answers(2, enable_sequence_parallelism=True) == alone


@pytest.mark.usefixtures("plugin")
def test_a_stage_that_sleeps_in_a_step_ends_the_engine() -> None:
    says = re.compile(r"rank 1 on \S+ has done nothing within a step for \d+ s: the engine must be")
    for patience in PATIENCE:
        others = set(child_pids(os.getpid()))
        llm = LLM("builtin://tiny", pipeline_parallel_size=2, logits_processors=["asleep"], **SETTINGS)
        llm.generate("Once", SamplingParams(max_tokens=4), use_tqdm=False)
        ranks = set(child_pids(os.getpid())) - others
        with mock.patch.object(hang_watch, "HANG_S", patience), pytest.raises(EngineDead) as ended:
            llm.generate("Once", SamplingParams(max_tokens=4, extra_args={"sleep": True}), use_tqdm=False)
        assert all_gone(ranks)
        llm.shutdown()
        if says.search(str(ended.value)):
            return
    raise ended.value


def test_an_llm_whose_ranks_have_whole_experts(make_checkpoint: Callable[..., Path]) -> None:
    """In stages too, and while they move."""
    model, sampling = str(make_checkpoint("qwen2_moe")), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * number + place) % 250 for place in range(3 + number)]} for number in range(6)]

    def tokens(**settings: Any) -> list[tuple[int, ...]]:
        llm = LLM(model, skip_tokenizer_init=True, **SETTINGS, **settings)
        try:
            return [tuple(one.outputs[0].token_ids) for one in llm.generate(prompts, sampling, use_tqdm=False)]
        finally:
            llm.shutdown()

    moving = {"enable_eplb": True, "num_redundant_experts": 2, "eplb_window_size": 8, "eplb_step_interval": 8}
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True}
    assert tokens(**ranks, **moving) == tokens()


class Stream(threading.Thread):
    """A request that streams, for minutes; `ended_at` when nothing more comes."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.lines: list[str] = []
        self.ended_at = 0.0

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        body["vllm_xargs"] = slow()
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=300) as answer:
                for line in answer.iter_lines():
                    self.lines += [line] if line else []
        except httpx.HTTPError as error:
            self.lines.append(repr(error))
        self.ended_at = time.monotonic()


@pytest.fixture(params=["-tp", "-pp"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    command = [
        sys.executable,
        "-m",
        "pagefleet_engine.cli",
        "builtin://tiny",
        request.param,
        "2",
        "--port",
        "0",
        SLOW,
        *flags,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=finding_plugin())
    assert process.stderr is not None
    log = []
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"serving tiny on (http://\S+)", line):
            break
    else:
        raise AssertionError("".join(log))
    threading.Thread(target=process.stderr.read, daemon=True).start()
    with httpx.Client(base_url=found[1], timeout=300) as http:
        while http.get("/readyz").status_code != 200:
            time.sleep(0.05)
    yield process, found[1]
    process.kill()
    process.wait()
    process.stderr.close()


def test_ranks_give_the_tokens_of_one_and_end_with_one_of_them(
    server: tuple[subprocess.Popen[str], str], alone: list[tuple[int, ...]]
) -> None:
    process, url = server
    body = {"model": "tiny", "prompt": "What is pagefleet?", "temperature": 0, "max_tokens": 24}
    told = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=300).json()
    assert tuple(told["choices"][0]["token_ids"]) == alone[0]
    (core,) = child_pids(process.pid)
    ranks = child_pids(core)
    assert len(ranks) == 2
    before = shared_memory()
    streams = [Stream(url) for _ in range(4)]
    for stream in streams:
        stream.start()
    while not all(stream.lines for stream in streams):
        time.sleep(0.05)
    os.kill(ranks[1], signal.SIGKILL)
    killed_at = time.monotonic()
    for stream in streams:
        stream.join(300)
        assert '"error"' in stream.lines[-1]
        assert "data: [DONE]" not in stream.lines
    assert process.wait(300) != 0
    assert all_gone([process.pid, core, *ranks])
    assert shared_memory() <= before
    print(f"errors after {max(stream.ended_at for stream in streams) - killed_at:.2f} s")
