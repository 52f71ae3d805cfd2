"""Ranks that the real Ray places, offline and served, and an actor that is killed. Skipped where there is no Ray."""

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

import httpx
import psutil
import pytest
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.errors import EngineDead

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagefleet-engine[ray]'")
pytestmark = [
    pytest.mark.fleet,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def made(**settings: Any) -> LLM:
    return LLM("builtin://tiny", dtype="float32", device="cpu", num_kv_blocks=256, num_threads=2, **settings)


def answer_of(llm: LLM) -> tuple[int, ...]:
    (told,) = llm.generate(["What is pagefleet?"], GREEDY, use_tqdm=False)
    return tuple(told.outputs[0].token_ids)


@pytest.fixture
def cluster() -> Iterator[None]:
    """One of Ray's, on this machine, for this test."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def actors() -> list[psutil.Process]:
    """The processes of ranks' actors below this one's cluster."""
    return [one for one in psutil.Process().children(recursive=True) if "RankActor" in " ".join(one.cmdline())]


def test_ranks_under_ray_answer_as_one_process_and_end_with_an_actor(cluster: None) -> None:
    alone = made()
    expected = answer_of(alone)
    alone.shutdown()
    llm = made(tensor_parallel_size=2, distributed_executor_backend="ray")
    assert answer_of(llm) == expected
    placed = actors()
    assert len(placed) == 2
    os.kill(placed[1].pid, signal.SIGKILL)
    psutil.wait_procs(placed[1:], 30)
    with pytest.raises(EngineDead, match=r"rank [01] on .*: the engine must be started again"):
        answer_of(llm)
    llm.shutdown()
    _, left = psutil.wait_procs(placed, 60)
    assert not left


def test_blocks_of_ranks_under_ray_are_those_of_one_process(cluster: None, tmp_path: Path) -> None:
    """A file that one engine wrote is read by the other, whichever has its ranks under Ray."""

    def told(folder: str, **settings: Any) -> tuple[tuple[int, ...], int]:
        kept = made(kv_connector="file", kv_offload_dir=str(tmp_path / folder), **settings)
        prompt = {"prompt_token_ids": [number % 200 + 3 for number in range(100)]}
        (result,) = kept.generate([prompt], GREEDY, use_tqdm=False)
        kept.shutdown()
        return tuple(result.outputs[0].token_ids), result.num_cached_tokens or 0

    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    tokens, _ = told("by one")
    assert told("by one", **ranks) == (tokens, 96)
    assert told("by ranks", **ranks) == (tokens, 0)
    assert told("by ranks") == (tokens, 96)


def test_copies_whose_experts_are_with_ranks_under_ray(cluster: None, make_checkpoint: Callable[..., Path]) -> None:
    def told(**settings: Any) -> list[list[int]]:
        fixed: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 256, "num_threads": 2}
        prompts = [{"prompt_token_ids": [number + 5 * place for place in range(9)]} for number in range(4)]
        with LLM(str(make_checkpoint("qwen3_moe")), skip_tokenizer_init=True, **fixed, **settings) as llm:
            return [[*one.outputs[0].token_ids] for one in llm.generate(prompts, GREEDY, use_tqdm=False)]

    copies: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    assert told(**copies, distributed_executor_backend="ray") == told()


def test_a_server_whose_ranks_ray_places() -> None:
    """Ray's own, on this machine: there is no other."""
    alone = made()
    expected = answer_of(alone)
    alone.shutdown()
    flags = ["-tp", "2", "--distributed-executor-backend", "ray", "--port", "0", "--device", "cpu"]
    flags += ["--dtype", "float32", "--num-kv-blocks", "256", "--num-threads", "2"]
    command = [sys.executable, "-m", "pagefleet_engine.cli", "builtin://tiny", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        said = iter(server.stderr)
        url = next(found[1] for line in said if (found := re.search(r"serving tiny on (http://\S+)", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        with httpx.Client(base_url=url, timeout=120) as http:
            while http.get("/readyz").status_code != 200:
                assert server.poll() is None
                time.sleep(0.05)
            body = {"model": "tiny", "prompt": "What is pagefleet?", "temperature": 0, "max_tokens": 24}
            told = http.post("/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}).json()
        assert tuple(told["choices"][0]["token_ids"]) == expected
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        server.stderr.close()
