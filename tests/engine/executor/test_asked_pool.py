"""Blocks of a pool that only its rank reaches, which copies them when asked."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

import numpy as np
import pytest
import torch
from pagefleet_engine.executor import asked_pool
from pagefleet_engine.executor.asked_pool import AskedPool, CopyServer, close_all
from pagefleet_engine.executor.rank_pages import RankPages, StepFence
from pagefleet_engine.executor.ring import make_ring_pair
from pagefleet_engine.worker.kv_pages import HostPages
from pagefleet_kv.port import KVPages, KVShard, PagesCopy

LAYERS, HEADS, HEAD_BYTES, NUM_BLOCKS = 3, 2, 8, 7
PART_BYTES = LAYERS * 2 * HEAD_BYTES
IDLE = StepFence(lambda _: None, 1)


class Rank:
    """Its pool, and the end of who asks it; until it is closed a thread of this process copies."""

    def __init__(self, pages: KVPages | None = None) -> None:
        self.pool = torch.zeros(NUM_BLOCKS, PART_BYTES, dtype=torch.uint8)
        self.is_over = False
        staging, rings = os.memfd_create("staging"), make_ring_pair(1 << 12)
        self._fds = (staging, *rings.fds)
        self._server = CopyServer(pages or HostPages(self.pool), staging, rings, pinned=False)
        self.asked = AskedPool(PART_BYTES, KVShard(range(LAYERS), range(1)), staging, rings, lambda: self.is_over)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        close_all(self._fds)

    def _run(self) -> None:
        while not self._is_closed:
            self._server.serve(timeout_s=0.01)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setattr(asked_pool, "STAGING_BYTES", 3 * PART_BYTES)  # so that most copies go in pieces
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Rank())) for _ in range(HEADS)]


def test_whole_blocks_go_in_and_out(ranks: list[Rank]) -> None:
    pools = [(KVShard(range(LAYERS), range(head, head + 1)), rank.asked) for head, rank in enumerate(ranks)]
    pages = RankPages(pools, IDLE)
    whole = np.random.default_rng(0).integers(1, 256, (NUM_BLOCKS, LAYERS, 2, HEADS, HEAD_BYTES), np.uint8)
    pages.write(memoryview(whole.tobytes()), range(NUM_BLOCKS)).wait()
    for head, rank in enumerate(ranks):
        assert (rank.pool.numpy().reshape(NUM_BLOCKS, LAYERS, 2, HEAD_BYTES) == whole[:, :, :, head]).all()
    order = [6, 0, 1, 5, 3]
    read = bytearray(len(order) * pages.bytes_per_block)
    pages.read(order, memoryview(read)).wait()
    assert bytes(read) == whole[order].tobytes()


def test_threads_take_turns(ranks: list[Rank]) -> None:
    pool = ranks[0].asked
    content = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None, None, None] + np.zeros(
        (1, LAYERS, 2, HEAD_BYTES), np.uint8
    )
    pool.write(content, range(NUM_BLOCKS))

    def read(block: int, wrong: list[int]) -> None:
        into = np.zeros((1, LAYERS, 2, HEAD_BYTES), np.uint8)
        for _ in range(50):
            pool.read([block], into)
            wrong += [block] * bool((into != block).any())

    wrong: list[int] = []
    threads = [threading.Thread(target=read, args=(block, wrong)) for block in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Broken(HostPages):
    def read(self, blocks: Sequence[int], into: memoryview) -> PagesCopy:
        raise RuntimeError("the device does not answer")


def test_what_a_rank_cannot_copy_is_said_and_the_next_copy_goes_on() -> None:
    into = np.zeros((1, LAYERS, 2, HEAD_BYTES), np.uint8)
    with closing(Rank(Broken(torch.zeros(NUM_BLOCKS, PART_BYTES, dtype=torch.uint8)))) as rank:
        with pytest.raises(OSError, match="a rank could not copy K/V: RuntimeError: the device does not answer"):
            rank.asked.read([0], into)
        rank.asked.write(into, [0])


class Silent(HostPages):
    """Does not come back before `end`."""

    def __init__(self, pool: torch.Tensor) -> None:
        super().__init__(pool)
        self.end = threading.Event()

    def read(self, blocks: Sequence[int], into: memoryview) -> PagesCopy:
        self.end.wait(10.0)
        return super().read(blocks, into)


def test_nobody_waits_for_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_pool, "LOOK_S", 0.01)
    silent = Silent(torch.zeros(NUM_BLOCKS, PART_BYTES, dtype=torch.uint8))
    with closing(Rank(silent)) as rank:
        rank.is_over = True
        with pytest.raises(OSError, match="the engine's ranks are gone"):
            rank.asked.read([0], np.zeros((1, LAYERS, 2, HEAD_BYTES), np.uint8))
        silent.end.set()
