"""The store of responses: whose they are, how long they stay, and what a restart finds."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.server.responses_api.store import (
    Allowance,
    ResponseStore,
    StoredResponse,
    StoredTooLong,
    StoreLimits,
    open_store,
)

LIMITS = StoreLimits(2**20, 60.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def response(name: str, previous: str | None = None, text: str = "hello", **more: Any) -> StoredResponse:
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}]
    return StoredResponse(id=name, previous=previous, response={"id": name, "output": []}, items=items, **more)


def memory_store(clock: Clock, limits: StoreLimits = LIMITS) -> ResponseStore:
    return ResponseStore(sqlite3.connect(":memory:"), None, limits, clock)


def texts(store: ResponseStore, name: str) -> list[str]:
    return [turn.items[0]["content"][0]["text"] for turn in store.chain("a", name, Allowance(10**6))]


def test_a_restart_finds_the_store_and_its_name_again(tmp_path: Path) -> None:
    store = open_store(tmp_path, LIMITS)
    store.put("a", response("one", events=b"event: x\n\n"))
    store.close()
    again = open_store(tmp_path, LIMITS)
    assert again.name == store.name
    assert again.get("a", "one") == response("one", events=b"event: x\n\n")
    assert again.num_bytes == store.num_bytes > 0
    assert again.num_responses == store.num_responses == 1
    again.close()


def test_two_engines_of_one_folder_hold_two_stores(tmp_path: Path) -> None:
    first, second = open_store(tmp_path, LIMITS), open_store(tmp_path, LIMITS)
    first.put("a", response("one"))
    assert first.name != second.name
    assert second.get("a", "one") is None
    first.close()
    third = open_store(tmp_path, LIMITS)
    assert third.name == first.name
    assert third.get("a", "one") is not None
    second.close()
    third.close()


def test_another_tenant_finds_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, LIMITS)
    store.put("a", response("one"))
    store.put("b", response("two", previous="one"))
    assert store.get("b", "one") is None
    assert store.chain("b", "one", Allowance(10**6)) == []
    assert store.chain("b", "two", Allowance(10**6)) == []  # what it goes on from is not b's
    assert not store.delete("b", "one")
    assert store.delete("a", "one")
    assert store.get("a", "one") is None
    store.close()


def test_a_chain_is_whole_or_nothing() -> None:
    store = memory_store(Clock())
    for name, previous in (("one", None), ("two", "one"), ("three", "two")):
        store.put("a", response(name, previous, text=name))
    assert texts(store, "three") == ["one", "two", "three"]
    store.delete("a", "two")
    assert store.chain("a", "three", Allowance(10**6)) == []
    assert texts(store, "one") == ["one"]


def test_a_complete_response_is_not_replaced() -> None:
    store = memory_store(Clock())
    store.put("a", response("one", text="runs", is_running=True))
    store.put("a", response("one", text="complete"))
    store.put("a", response("one", "one", text="forged"))
    assert texts(store, "one") == ["complete"]
    assert store.num_responses == 1
    store.delete("a", "one")
    assert not store.delete("a", "one")
    assert store.num_responses == 0


def test_a_response_that_goes_on_from_itself_has_no_chain() -> None:
    store = memory_store(Clock())
    store.put("a", response("one", "two"))
    store.put("a", response("two", "one"))
    assert store.chain("a", "two", Allowance(10**6)) == []


def test_what_is_brought_back_is_bounded() -> None:
    store = memory_store(Clock())
    for number in range(8):
        store.put("a", response(f"r{number}", f"r{number - 1}" if number else None, text="x" * 1000))
    assert len(store.chain("a", "r7", Allowance(10_000))) == 8
    for allowed in (900, 5000):
        with pytest.raises(StoredTooLong):
            store.chain("a", "r7", Allowance(allowed))
    store.put("a", response("bomb", text="x" * 10**7))
    with pytest.raises(StoredTooLong):
        store.turn("a", "bomb", Allowance(10**6))


def test_what_was_not_used_for_long_goes() -> None:
    clock = Clock()
    store = memory_store(clock)
    store.put("a", response("old"))
    store.put("a", response("used"))
    clock.now += 40
    assert store.get("a", "used") is not None
    clock.now += 40
    assert store.get("a", "old") is None
    assert store.get("a", "used") is not None
    before = store.num_bytes
    store.put("a", response("new"))
    assert store.num_bytes == before  # the old one is gone, of the same size
    assert (store.num_responses, store.num_evicted) == (2, {"age": 1, "room": 0})


def test_the_least_recently_used_make_room() -> None:
    clock = Clock()
    probe = memory_store(clock)
    probe.put("a", response("r0"))
    store = memory_store(clock, StoreLimits(4 * probe.num_bytes + 8, 60.0))
    for number in range(4):
        clock.now += 1
        store.put("a", response(f"r{number}"))
    clock.now += 1
    store.chain("a", "r0", Allowance(10**6))
    clock.now += 1
    store.put("a", response("r4"))
    assert [n for n in range(5) if store.get("a", f"r{n}")] == [0, 2, 3, 4]
    assert (store.num_responses, store.num_evicted) == (4, {"age": 0, "room": 1})


def test_the_tenant_that_has_most_makes_room() -> None:
    clock = Clock()
    probe = memory_store(clock)
    probe.put("a", response("r0"))
    store = memory_store(clock, StoreLimits(4 * probe.num_bytes + 8, 60.0))
    for tenant, name in [("a", "r0"), *(("b", f"r{n}") for n in range(8))]:
        clock.now += 1
        store.put(tenant, response(name))
    assert store.get("a", "r0") is not None
    assert [n for n in range(8) if store.get("b", f"r{n}")] == [5, 6, 7]
    clock.now += 1
    store.put("c", response("run", text="much " * 1000, is_running=True))
    assert store.get("c", "run") is not None  # what runs stays


def test_a_disk_that_takes_nothing_is_read_all_the_same() -> None:
    database = sqlite3.connect(":memory:")
    store = ResponseStore(database, None, LIMITS, Clock())
    store.put("a", response("one"))
    before = store.num_bytes
    database.execute("PRAGMA query_only = 1")
    assert store.get("a", "one") == response("one")
    assert texts(store, "one") == ["hello"]
    for change in (lambda: store.put("a", response("two")), lambda: store.delete("a", "one")):
        with pytest.raises(sqlite3.Error):
            change()
    assert store.num_bytes == before


def test_what_cannot_be_written_is_not_counted() -> None:
    database = sqlite3.connect(":memory:")
    store = ResponseStore(database, None, LIMITS, Clock())
    store.put("a", response("one", is_running=True))
    before = store.num_bytes
    database.execute("CREATE TRIGGER full BEFORE INSERT ON responses BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(sqlite3.Error):
        store.put("a", response("one"))
    assert store.num_bytes == before


def test_what_ran_is_found_after_a_start(tmp_path: Path) -> None:
    store = open_store(tmp_path, LIMITS)
    store.put("a", response("one", is_running=True))
    store.put("a", response("two"))
    store.close()
    again = open_store(tmp_path, LIMITS)
    assert [(tenant, stored.id) for tenant, stored in again.running()] == [("a", "one")]
    again.close()


def test_a_broken_file_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "0.sqlite3").write_bytes(b"no database at all " * 100)
    store = open_store(tmp_path, LIMITS)
    store.put("a", response("one"))
    assert store.get("a", "one") is not None
    assert (tmp_path / "0.broken").exists()
    store.close()


def test_a_folder_that_cannot_be_used_leaves_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = open_store(tmp_path / "file" / "folder", LIMITS)
    store.put("a", response("one"))
    assert store.get("a", "one") is not None
    store.close()
