"""What API processes note for each other: the loads of all, and the prefixes that any of them sent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.client.api_seat import ApiSeat
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.balance import PIECE, Balance, RankRoom, Seat
from pagefleet_engine.client.core_process import CoreAtHand, RunningCore
from pagefleet_engine.client.data_ranks import rank_rooms
from pagefleet_engine.client.shared_notebook import NotebookShape, SharedNotebook, make_notebook_memory
from pagefleet_engine.config import EngineConfig, ModelConfig
from pagefleet_engine.engine_core.messages import Ready
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.small_tokenizers import byte_level_backend

ROOMS = [RankRoom(requests=8, tokens=100 * PIECE)] * 2
SCOPE = PrefixScope("")


@pytest.fixture
def memory() -> Iterator[int]:
    fd = make_notebook_memory()
    yield fd
    os.close(fd)


def notebook(fd: int, index: int) -> SharedNotebook:
    return SharedNotebook(fd, NotebookShape(3, ROOMS), index)


def loads(one: Balance) -> list[tuple[int, int, int]]:
    return [(load.outputs, load.held_tokens, load.prefill_tokens) for load in one.loads]


@given(moves=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 300), st.integers(1, 3))))
def test_all_see_what_any_has_given_and_what_of_it_has_ended(moves: Sequence[tuple[int, bool, int, int]]) -> None:
    fd = make_notebook_memory()
    balances = [Balance(ROOMS, notebook=notebook(fd, index)) for index in range(3)]
    seats: list[Seat] = []
    for index, gives, length, outputs in moves:
        if gives or not seats:
            seats.append(balances[index].place(range(length), outputs, SCOPE))
        elif seats[0].outputs > 1:
            seats[0].leave()
        else:
            seats.pop(0).leave()
        own = [[seat for seat in seats if seat.rank == rank] for rank in range(2)]
        expected = [
            (
                sum(seat.outputs for seat in here),
                sum(seat.outputs * seat.held_tokens for seat in here),
                sum(seat.prefill_tokens for seat in here),
            )
            for here in own
        ]
        assert loads(balances[0]) == loads(balances[1]) == loads(balances[2]) == expected
    os.close(fd)


def test_a_prefix_that_one_sent_is_known_to_all(memory: int) -> None:
    first, second = (Balance(ROOMS, notebook=notebook(memory, index)) for index in range(2))
    prompt = list(range(8 * PIECE))
    seat = first.place(prompt, 1, SCOPE)
    assert second.place([*prompt, 1, 2], 1, SCOPE).rank == seat.rank
    first.forget_prefixes()
    assert second.place([*prompt, 3], 1, SCOPE).rank != seat.rank


def test_what_a_process_that_is_gone_had_noted_is_forgotten(memory: int) -> None:
    gone, other = notebook(memory, 1), notebook(memory, 2)
    gone.in_flight[1], other.in_flight[2] = 5, 7
    given_by_gone, kept = Balance(ROOMS, notebook=gone), Balance(ROOMS, notebook=other)
    given_by_gone.place(range(100), 2, SCOPE)
    before = loads(kept)
    kept.place(range(1000, 1300), 1, SCOPE)
    assert sum(load[0] for load in before) == 2
    other.clear(1)
    assert sum(load.outputs for load in kept.loads) == 1
    assert sum(load.prefill_tokens for load in kept.loads) == 300
    assert list(other.in_flight) == [0, 0, 7]


def test_who_starts_the_processes_clears_the_row_of_one_that_is_gone(memory: int, tmp_path: Path) -> None:
    ready, config = Ready(512, 300, 64, 16, "float32"), EngineConfig(model=ModelConfig(model="fake"))
    core = CoreAtHand(RunningCore(str(tmp_path), os.getpid(), "0" * 32, ready), config)

    async def run() -> None:
        engine = AsyncEngineClient([core], Tokenizer(byte_level_backend(), {}), None, ApiSeat(0, 2, 0, memory))
        engine.join([ready])
        assert engine.notebook is not None
        engine.notebook.in_flight[1] = 4
        rooms = rank_rooms(config, [ready])
        gone = Balance(rooms, notebook=SharedNotebook(memory, NotebookShape(2, rooms), 1))
        gone.place(range(100), 4, SCOPE)
        engine.asker_gone(1, start=1)
        assert list(engine.notebook.in_flight) == [0, 0]
        assert loads(gone) == [(0, 0, 0)]
        await engine.close()

    asyncio.run(run())


def test_one_process_shares_nothing() -> None:
    assert ApiSeat().notebook(ROOMS) is None
