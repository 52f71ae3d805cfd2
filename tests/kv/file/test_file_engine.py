"""Engines over a folder: what a script computed is there when it has ended."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
from pagefleet_engine import LLM, SamplingParams
from pagefleet_kv.store.blob_store import BlobStore
from pagefleet_kv.store.block_io import BlockIO
from pagefleet_kv.store.mover import BlockMover

PROMPT = [number % 200 + 1 for number in range(12 * 16)]
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def start(folder: Path) -> LLM:
    return LLM("builtin://tiny", num_threads=1, kv_connector="file", kv_offload_dir=str(folder))


def blocks_in(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.kv"))


def test_an_engine_that_ends_has_saved_what_it_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = BlockIO.steps

    def slow(io: BlockIO, *job: object):  # type: ignore[no-untyped-def]
        for count in steps(io, *job):  # type: ignore[arg-type]
            time.sleep(0.02)  # a disk's
            yield count

    monkeypatch.setattr(BlockIO, "steps", slow)
    with start(tmp_path) as llm:
        llm.generate([PROMPT], ONE_TOKEN, use_tqdm=False)
    assert blocks_in(tmp_path) == 12


def test_an_engine_does_not_wait_for_ever_for_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = threading.Event()
    close = BlockMover.close

    def closed(mover: BlockMover) -> None:
        stuck.set()  # its thread is waited for all the same
        close(mover)

    monkeypatch.setattr(BlobStore, "write", lambda *_: stuck.wait(300.0))
    monkeypatch.setattr(BlockMover, "close", closed)
    llm = start(tmp_path)
    llm.generate([PROMPT], ONE_TOKEN, use_tqdm=False)
    with caplog.at_level(logging.WARNING, "pagefleet_engine"):
        llm.llm_engine._core.shutdown(within_s=0.05)
    assert "1 transfers of K/V did not end within 0.05 s" in caplog.text
