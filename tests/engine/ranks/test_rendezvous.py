"""The store that ranks meet in: its table, and torch's process groups over it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from pagefleet_engine.ranks.group import gloo_group
from pagefleet_engine.ranks.rendezvous import COPIES, MAX_BYTES, JointTable, RendezvousTable
from pagefleet_engine.ranks.store import RankStore
from torch._C._distributed_c10d import PrefixStore

PATIENCE = timedelta(seconds=20)


def serve(asked: socket.socket, table: RendezvousTable) -> None:
    while request := asked.recv(MAX_BYTES):
        asked.send(table.answer(request))


@contextmanager
def stores(
    count: int, patience: timedelta = PATIENCE, tables: Sequence[RendezvousTable] = ()
) -> Iterator[list[RankStore]]:
    """Stores of so many ranks, whose requests threads answer, from one table unless each has its own."""
    table = RendezvousTable()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    owned = zip(pairs, tables or [table] * count, strict=True)
    threads = [threading.Thread(target=serve, args=(asked, own)) for (asked, _), own in owned]
    for thread in threads:
        thread.start()
    yield [RankStore(asking, patience) for _, asking in pairs]
    for _, asking in pairs:
        asking.close()
    for thread in threads:
        thread.join()
    for asked, _ in pairs:
        asked.close()


def test_ranks_see_what_others_set() -> None:
    with stores(2) as (one, other):
        one.set("name", b"value")
        assert other.get("name") == b"value"
        assert other.check(["name"])
        assert not other.check(["name", "no"])
        assert [one.add("count", 2), other.add("count", 3)] == [2, 5]
        assert other.compare_set("name", "else", "new") == b"value"
        assert other.compare_set("name", "value", "new") == b"new"
        assert other.compare_set("fresh", "", "new") == b"new"
        assert other.delete_key("name")
        assert not other.delete_key("name")


def test_a_value_is_waited_for() -> None:
    with stores(2) as (one, other), ThreadPoolExecutor(1) as pool:
        found = pool.submit(one.get, "later")
        other.set("later", b"here")
        assert found.result(20) == b"here"
    with stores(1, timedelta(milliseconds=1)) as (one,), pytest.raises(RuntimeError, match="waited 0 s for never"):
        one.wait(["never"])


def test_gloo_meets_in_it() -> None:
    with stores(3) as all_stores, ThreadPoolExecutor(3) as pool:

        def rank(index: int) -> float:
            group, _ = gloo_group(PrefixStore("tensor", all_stores[index]), index, 3, PATIENCE)
            return float(group.all_reduce(torch.ones(2) * index)[0])

        assert list(pool.map(rank, range(3))) == [3.0] * 3


def test_ranks_of_different_copies_meet_in_what_their_tables_have_in_common() -> None:
    """Each copy of the model keeps a table; only names below `COPIES` are the same in all."""
    joint = os.memfd_create("joint")
    try:
        with stores(3, tables=[JointTable(joint) for _ in range(3)]) as made, ThreadPoolExecutor(3) as pool:
            for copy, own in enumerate(made):
                own.set("stage 0", str(copy))
            assert [own.get("stage 0") for own in made] == [b"0", b"1", b"2"]

            def meet(copy: int) -> list[int]:
                store = PrefixStore(f"{COPIES}data 0", made[copy])
                group, _ = gloo_group(store, copy, 3, PATIENCE)
                sums = [made[copy].add(f"{COPIES}count", 1) for _ in range(50)]
                return [int(group.all_reduce(torch.tensor([copy]))), *sums]

            told = list(pool.map(meet, range(3)))
    finally:
        os.close(joint)
    assert [one[0] for one in told] == [3, 3, 3]
    assert sorted(number for one in told for number in one[1:]) == list(range(1, 151))
