"""`pagefleet serve -dp 2` as processes: one endpoint, two cores, and what is seen of them from outside."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pagefleet_protocol import metric_names
from pagefleet_protocol.engine_facts import FACTS_PATH, decode_facts
from pagefleet_router.signals.figures import parse_figures

from tests.engine.server.test_process import PATIENCE_S, OpenStream, ServerProcess, _is_alive
from tests.fakes.fleet_processes import shared_memory
from tests.fakes.slow_requests import SLOW, slow

pytestmark = pytest.mark.fleet

MODEL = "builtin://tiny"
PROMPTS = [f"Story number {number}: once upon a time there was a {number} year old" for number in range(12)]
RUNNING = "pagefleet_engine_rank_requests_running"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess(MODEL, "--data-parallel-size", "2", SLOW)
    yield server
    assert server.stop() == 0


def answers(server: ServerProcess, prompts: list[str], **fields: Any) -> list[str]:
    asked = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, **fields}

    def one(prompt: str) -> str:
        answer = server.complete(prompt=prompt, **asked)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def test_answers_are_those_of_one_core_and_both_give_some(server: ServerProcess, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answers, server, PROMPTS, max_tokens=200, vllm_xargs=slow(seen))
        try:
            server.wait_until(lambda: min(server.gauges(RUNNING)) > 0)
        finally:
            seen.touch()
        found = asked.result()
    alone = ServerProcess(MODEL)
    try:
        assert found == answers(alone, PROMPTS, max_tokens=200)
    finally:
        assert alone.stop() == 0


def test_a_router_sees_one_engine_with_the_room_of_both(server: ServerProcess, tmp_path: Path) -> None:
    facts = decode_facts(server.http.get(FACTS_PATH).content)
    assert facts.max_num_seqs == server.gauge(metric_names.ENGINE_REQUESTS_MAX) == 512
    assert facts.num_blocks == 512
    seen = tmp_path / "seen"
    streams = [OpenStream(server, max_tokens=1200, vllm_xargs=slow(seen)) for _ in range(3)]
    server.wait_until(lambda: server.running() == 3)
    page = server.http.get("/metrics").content
    figures = parse_figures(page)
    assert figures is not None
    assert figures.num_running == 3
    assert 0 < figures.kv_usage < 1
    assert sorted(server.gauges(RUNNING)) == [1, 2]
    seen.touch()
    server.wait_until(lambda: server.running() == 0)
    assert all(stream.join()[-1] == "data: [DONE]" for stream in streams)


def test_a_prefix_stays_with_its_core(server: ServerProcess) -> None:
    server.wait_until(lambda: server.running() == 0)
    hits = metric_names.ENGINE_PREFIX_CACHE_HITS_TOKENS
    prompts = [
        f"{name}: " + f"the {name} had a little house in the green wood, " * 30 for name in ("fox", "bear", "owl")
    ]
    for prompt in prompts:
        answers(server, [prompt])
    before, asked = server.gauge(hits), server.gauge(metric_names.ENGINE_PREFIX_CACHE_QUERIES_TOKENS)
    for _ in range(4):
        for prompt in prompts:
            answers(server, [prompt])
    looked_up = server.gauge(metric_names.ENGINE_PREFIX_CACHE_QUERIES_TOKENS) - asked
    assert server.gauge(hits) - before > 0.9 * looked_up > 1000


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [one for child in children for one in descendants(child)]


def test_each_copy_may_be_divided_among_ranks_of_its_own(server: ServerProcess) -> None:
    divided = ServerProcess(MODEL, "-dp", "2", "-tp", "2")
    try:
        pids = descendants(divided.process.pid)
        assert len(divided.core_pids) == 2
        assert len(pids) >= 2 + 4, "two cores, each with two ranks"
        assert answers(divided, PROMPTS) == answers(server, PROMPTS)
        os.kill(divided.core_pids[1], signal.SIGKILL)
        assert divided.process.wait(PATIENCE_S) == 1
        divided.wait_until(lambda: not any(map(_is_alive, pids)))
    finally:
        divided.stop()


def test_a_killed_core_ends_every_request_and_the_process() -> None:
    server = ServerProcess(MODEL, "-dp", "2", SLOW)
    pids = server.core_pids
    assert len(pids) == 2
    before = shared_memory()
    streams = [OpenStream(server, max_tokens=2000) for _ in range(4)]
    server.wait_until(lambda: sorted(server.gauges(RUNNING)) == [2, 2])
    killed = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    for stream in streams:
        assert json.loads(stream.join()[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert time.monotonic() - killed < 60.0
    assert server.stop() == 1
    assert not any(map(_is_alive, pids))
    assert shared_memory() <= before
