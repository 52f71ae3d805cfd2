"""What every connector must do, whatever it is made of. A new one is a new name in `KINDS`."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pagefleet_kv.port import BlockRun

from tests.fakes.byte_pages import SHAPE
from tests.fakes.connector_kinds import Ends, connected
from tests.fakes.connector_scene import make_request

KINDS = ("file", "offload", "p2p", "p2p,offload")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["file-host", "file-device", "offload-host", "p2p-host", "p2p-device", "p2p,offload-host"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    """Pools of the host, and of a device, but for connectors that need pinned memory there."""
    kind, _, place = request.param.partition("-")
    with connected(kind, tmp_path, on_host=place == "host") as ends:
        yield ends


def test_what_was_given_comes_byte_by_byte(ends: Ends) -> None:
    for num_blocks in (1, 7):
        given, wanted = ends.request(num_blocks)
        ends.give(given)
        assert ends.taker.loadable(wanted) == num_blocks * 4
        assert ends.taker.load_and_wait(wanted, num_blocks) == num_blocks


def test_only_what_is_not_here_need_come(ends: Ends) -> None:
    given, wanted = ends.request(6)
    ends.give(given)
    assert ends.taker.loadable(wanted, 8) == 24
    assert ends.taker.load_and_wait(wanted, 4, first=2) == 4


def test_there_is_nothing_to_wait_for_where_all_is_here(ends: Ends) -> None:
    given, wanted = ends.request(3)
    ends.give(given)
    assert (ends.taker.connector.loadable(wanted, 12) or 0) <= 12


def test_asking_changes_nothing(ends: Ends) -> None:
    given, wanted = ends.request(3)
    ends.give(given)
    before = bytes(b"".join(ends.taker.pages.peek(block) for block in range(64)))
    answers = {ends.taker.loadable(wanted) for _ in range(20)}
    assert answers == {12}
    assert ends.taker.loaded == {}
    assert bytes(b"".join(ends.taker.pages.peek(block) for block in range(64))) == before
    assert ends.taker.load_and_wait(wanted, 3) == 3


def test_every_load_and_save_ends_once(ends: Ends) -> None:
    pairs = [ends.request(4) for _ in range(5)]
    numbers = [ends.give(given) for given, _ in pairs]
    for _, wanted in pairs:
        assert ends.taker.loadable(wanted) == 16
    runs = [ends.taker.load(wanted, 4) for _, wanted in pairs]
    ends.taker.wait_for(lambda: len(ends.taker.loaded) == 5)  # which fails at one that ends twice
    for (_, wanted), run in zip(pairs, runs, strict=True):
        done = ends.taker.loaded[wanted.request_id]
        assert (done.num_blocks, done.failure) == (4, None)
        ends.taker.check(wanted, run, 4)
    ends.giver.wait_for(lambda: set(numbers) - {None} <= set(ends.giver.saved))
    assert len(set(ends.giver.saved)) == len(ends.giver.saved)


def test_a_cancelled_load_ends_and_touches_its_blocks_no_more(ends: Ends) -> None:
    given, wanted = ends.request(8)
    ends.give(given)
    ends.taker.loadable(wanted)
    ends.taker.pages.gate.clear()
    run = ends.taker.load(wanted, 8)
    ends.taker.connector.cancel(wanted.request_id)
    ends.taker.connector.ended(wanted, False)
    ends.taker.pages.gate.set()
    ends.taker.wait_for(lambda: wanted.request_id in ends.taker.loaded)
    for block in run.blocks:
        ends.taker.pages.poke(block, b"\x5a" * 64)
    other, another = ends.request(4)
    ends.give(other)
    assert ends.taker.loadable(another) == 16
    assert ends.taker.load_and_wait(another, 4) == 4
    assert all(ends.taker.pages.peek(block) == b"\x5a" * 64 for block in run.blocks)


def test_a_request_that_is_over_without_a_load_frees_what_was_kept_for_it(ends: Ends) -> None:
    given, wanted = ends.request(4)
    number = ends.give(given)
    ends.taker.loadable(wanted)
    ends.taker.connector.ended(wanted, False)
    if number is not None:
        ends.giver.wait_for(lambda: number in ends.giver.saved)
    assert len(set(ends.giver.saved)) == len(ends.giver.saved)


def test_a_prompt_that_was_not_computed_to_its_end_is_never_wrong(ends: Ends) -> None:
    given, wanted = ends.request(6)
    ends.giver.save(given, 0, 3)
    ends.giver.connector.ended(given, False)
    num_tokens = ends.taker.loadable(wanted)
    assert num_tokens <= 24
    if num_tokens:
        assert ends.taker.load_and_wait(wanted, num_tokens // 4) <= 3


def test_what_was_given_comes_also_from_one_that_is_short_of_blocks_and_drains(ends: Ends) -> None:
    given, wanted = ends.request(5)
    number = ends.give(given)
    connector = ends.giver.connector
    connector.relieve(5)
    if number is not None:  # it ends before anybody has asked for the blocks
        ends.giver.wait_for(lambda: number in ends.giver.saved)
    connector.drain()
    assert ends.taker.loadable(wanted) == 20
    assert ends.taker.load_and_wait(wanted, 5) == 5
    while connector.num_owed:
        ends.giver.settle()


def test_what_is_stored_is_forgotten_by_a_reset(ends: Ends) -> None:
    given, wanted = ends.request(3)
    ends.give(given)
    ends.giver.connector.reset()
    if ends.stores:  # which may take a moment, where it is on a disk
        later = (make_request(wanted.token_ids, f"later{number}") for number in range(100_000))
        assert any(ends.taker.loadable(request) == 0 for request in later)
    else:  # a request waits for it
        assert ends.taker.loadable(wanted) == 12
        assert ends.taker.load_and_wait(wanted, 3) == 3


def test_figures_have_names_and_are_numbers(ends: Ends) -> None:
    given, wanted = ends.request(2)
    ends.give(given)
    ends.taker.loadable(wanted)
    ends.taker.load_and_wait(wanted, 2)
    stats = ends.taker.connector.stats()
    assert stats.counters
    for name, value in (*stats.counters.items(), *stats.gauges.items()):
        assert name.startswith("pagefleet_engine_kv_transfer_")
        assert value >= 0
    assert all(name.endswith(("_total", "_sum", "_count")) for name in stats.counters)


def test_nothing_rings_while_nothing_happens(ends: Ends) -> None:
    given, wanted = ends.request(2)
    ends.give(given)
    ends.taker.loadable(wanted)
    ends.taker.load_and_wait(wanted, 2)
    ends.giver.wait_for(lambda: True)
    bell = ends.taker.connector.bell
    assert bell is not None

    def is_silent() -> bool:
        return not select.select([bell], [], [], 0)[0]

    for _ in range(1000):  # a late ring is answered as the engine's loop does
        if is_silent():
            break
        ends.taker.settle()
    assert is_silent()


@pytest.mark.parametrize("windows", [(None, 9), (9, 5), (None, None)])
def test_blocks_of_every_group_come(kind: str, tmp_path: Path, windows: tuple[int | None, ...]) -> None:
    """Seven blocks of 4 tokens, computed in two steps, of which a group with a window keeps the end alone."""
    shape = msgspec.structs.replace(SHAPE, windows=windows)
    with connected(kind, tmp_path, shape=shape) as ends:
        given, wanted = ends.request(7)
        giver, taker = ends.giver, ends.taker
        starts = [shape.needed_from(group, 7) for group in range(2)]
        numbers: list[int | None] = []
        for first, stop in ((0, 5), (5, 7)):
            runs = [giver.compute(given, max(first, starts[group]), stop, group) for group in range(2)]
            numbers.append(giver.connector.save(given, [run for run in runs if run.blocks]))
        if ends.stores:
            giver.wait_for(lambda: set(numbers) - {None} <= set(giver.saved))
        giver.connector.ended(given, True)
        assert taker.loadable(wanted) == 28
        parts = [BlockRun(s, taker.take(7 - s), wanted.block_hashes[s:7], group) for group, s in enumerate(starts)]
        taker.connector.load(wanted, parts)
        taker.wait_for(lambda: wanted.request_id in taker.loaded)
        assert taker.loaded[wanted.request_id].num_blocks == 14 - sum(starts)
        for run in parts:
            taker.check(wanted, run, len(run.blocks))


@pytest.mark.parametrize("kind", ["file", "offload"])
def test_a_prefix_is_as_long_as_every_group_has_it(kind: str, tmp_path: Path) -> None:
    with connected(kind, tmp_path, shape=msgspec.structs.replace(SHAPE, windows=(None, 9))) as ends:
        given, wanted = ends.request(7)
        numbers = [ends.giver.connector.save(given, [ends.giver.compute(given)])]
        assert ends.taker.loadable(wanted) == 0
        numbers.append(ends.giver.connector.save(given, [ends.giver.compute(given, 2, 4, group=1)]))
        ends.giver.wait_for(lambda: set(numbers) <= set(ends.giver.saved))
        later = make_request(wanted.token_ids, "later")
        assert ends.taker.loadable(later) == 16


def test_no_thread_is_left_when_it_is_closed(kind: str, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with connected(kind, tmp_path) as ends:
        given, wanted = ends.request(3)
        ends.give(given)
        ends.taker.loadable(wanted)
        ends.taker.load(wanted, 3)
        assert set(threading.enumerate()) - before
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread.name
