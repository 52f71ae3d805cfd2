"""Ranks that the real Ray places: answers, and an actor that is killed. Skipped where Ray is not installed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.errors import EngineDead

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagefleet-engine[ray]'")
pytestmark = [
    pytest.mark.fleet,
    pytest.mark.timeout(600),
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
