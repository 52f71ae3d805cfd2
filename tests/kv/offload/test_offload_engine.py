"""Whole engines whose pool is too small for what they are asked: the tokens are those of an engine that has room."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.errors import ConfigError
from pagefleet_kv.offload.connector import OffloadConnector

from tests.fakes.offline_core import core_of

QUESTIONS = [
    f"{subject} Please say it in one sentence, as number {number}."
    for number, subject in enumerate(
        [
            "What is a KV cache?",
            "What is a block table?",
            "Who are you?",
            "What does a router do?",
            "What is preemption?",
        ]
    )
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PATIENCE_S = 300.0


def start(**settings: Any) -> LLM:
    return LLM("builtin://tiny", num_threads=1, **{"kv_connector": "offload", "kv_offload_memory": "16M", **settings})


def connector_of(llm: LLM) -> OffloadConnector:
    connector = core_of(llm)._scheduler.connector
    assert isinstance(connector, OffloadConnector)
    return connector


def answers(llm: LLM, questions: Sequence[str] = QUESTIONS) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(list(questions), GREEDY, use_tqdm=False)]


def wait_for(llm: LLM, condition: Callable[[], bool]) -> None:
    """Settle whenever the bell rings, until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        select.select([connector_of(llm).bell], [], [], 1.0)
        core_of(llm).settle()


def settle(llm: LLM) -> None:
    """Until nothing is being saved or spilled."""
    wait_for(llm, lambda: not connector_of(llm).num_moves)


def hits(llm: LLM) -> float:
    return connector_of(llm).stats().counters["pagefleet_engine_kv_transfer_offload_hits_total"]


@pytest.fixture(scope="module")
def wanted() -> Iterator[list[list[int]]]:
    with start(kv_connector=None) as llm:
        yield answers(llm)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_prompts_come_back_from_memory(wanted: list[list[int]], policy: str) -> None:
    with start(num_kv_blocks=8, max_num_seqs=1, kv_offload_policy=policy) as llm:
        assert answers(llm) == wanted
        settle(llm)
        assert hits(llm) == 0
        for question, tokens in zip(QUESTIONS, wanted, strict=True):
            assert answers(llm, [question]) == [tokens]
        assert hits(llm) > 0
        core_of(llm).check_integrity()


def test_preempted_requests_go_on_as_if_nothing_had_happened(wanted: list[list[int]]) -> None:
    with start(num_kv_blocks=30, block_size=4) as llm:
        assert answers(llm) == wanted
        assert llm.stats().preemptions > 0
        core_of(llm).check_integrity()


def test_another_start_goes_on_with_the_disk(wanted: list[list[int]], tmp_path: Path) -> None:
    settings = {"num_kv_blocks": 8, "max_num_seqs": 1, "kv_offload_dir": str(tmp_path)}
    with start(**settings, kv_offload_memory=4 * 32768) as llm:
        for question in QUESTIONS:
            answers(llm, [question])
            settle(llm)
    num_files = len(list(tmp_path.glob("??/*.kv")))
    assert num_files > 0
    with start(**settings) as llm:
        wait_for(llm, lambda: len(connector_of(llm)._disk or ()) >= num_files)
        for question, tokens in zip(QUESTIONS, wanted, strict=True):
            assert answers(llm, [question]) == [tokens]
        assert hits(llm) > 0


def test_damaged_folder_gives_no_wrong_token(wanted: list[list[int]], tmp_path: Path) -> None:
    settings = {"num_kv_blocks": 8, "max_num_seqs": 1, "kv_connector": "file", "kv_offload_dir": str(tmp_path)}
    with start(**settings) as llm:
        for question in QUESTIONS:
            answers(llm, [question])
    for number, path in enumerate(sorted(tmp_path.glob("??/*.kv"))):
        data = bytearray(path.read_bytes())
        data[(number * 7919) % len(data)] ^= 0x80
        path.write_bytes(data)
    with start(**settings) as llm:
        for question, tokens in zip(QUESTIONS, wanted, strict=True):
            assert answers(llm, [question]) == [tokens]
        core_of(llm).check_integrity()


def test_reset_forgets_what_was_saved() -> None:
    with start(num_kv_blocks=8, max_num_seqs=1) as llm:
        answers(llm)
        settle(llm)
        llm.reset_prefix_cache()
        answers(llm)
        assert hits(llm) == 0


def test_folder_of_another_block_size_is_refused_at_the_start(tmp_path: Path) -> None:
    start(num_kv_blocks=64, kv_offload_dir=str(tmp_path)).shutdown()
    with pytest.raises(ConfigError, match="block_size 8 here, 16 there"):
        start(num_kv_blocks=64, block_size=8, kv_offload_dir=str(tmp_path))
