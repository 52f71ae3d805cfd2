"""What the gate sees of the fleet: rooms, and models that stay known without engines."""

from __future__ import annotations

import msgspec
import pytest
from pagefleet_protocol.endpoints import Endpoint, EndpointsFileError, OnTrial, decode_endpoints, encode_endpoints
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_router.admission.room import UNKNOWN_CAPACITY, FleetRooms, Room
from pagefleet_router.engines.endpoints import MAX_KEPT, EndpointTable

FACTS = EngineFacts(
    incarnation="1" * 32, model="m", scope="s", block_size=16, num_blocks=100, max_model_len=256, max_num_seqs=256,
    max_num_batched_tokens=512, vocab_size=300,
)  # fmt: skip


def table_of(*models: str, kept: tuple[str, ...] | None = None) -> EndpointTable:
    table = EndpointTable({"alias": "m"}, kept=kept)
    table.replace([Endpoint(f"e{i}", f"http://127.0.0.1:{i + 1}", model) for i, model in enumerate(models)])
    return table


@pytest.mark.parametrize(("num_seqs", "capacity"), [(1, 9), (32, 40), (33, 42), (256, 320)])
def test_an_engine_has_room_for_what_it_runs_and_some_more(num_seqs: int, capacity: int) -> None:
    table = table_of("m", "m", "other")
    rooms = FleetRooms(lambda: table.snapshot)
    assert rooms.room("m") == Room(0, 0, 0)
    table.set_ready("e0", True)
    table.set_facts("e0", msgspec.structs.replace(FACTS, max_num_seqs=num_seqs))
    assert rooms.room("m") == Room(1, capacity, 0)
    table.set_ready("e1", True)
    assert rooms.room("m") == Room(2, capacity + UNKNOWN_CAPACITY, 0)
    table.set_load("e0", 5.0, 2.0, 0.1)
    assert rooms.room("m") == Room(2, capacity + UNKNOWN_CAPACITY, 7)
    table.set_ejected("e0", True)
    assert rooms.room("m") == Room(1, UNKNOWN_CAPACITY, 0)
    assert rooms.room("nobody's") == Room()


@pytest.mark.parametrize(
    ("old", "new", "percent", "capacity"),
    [(4, 1, 5, 160 + 8), (4, 2, 25, 160 + 53), (4, 2, 50, 160 + 80), (1, 1, 0, 40), (1, 1, 99, 80), (0, 2, 5, 80)],
)
def test_engines_that_are_tried_out_have_room_for_their_share(old: int, new: int, percent: int, capacity: int) -> None:
    table = EndpointTable({})
    trial = OnTrial("new", percent)
    revisions = [*[None] * old, *[trial] * new]
    table.replace([Endpoint(f"e{n}", "http://127.0.0.1:1", "m", on_trial=one) for n, one in enumerate(revisions)])
    for n in range(old + new):
        table.set_ready(f"e{n}", True)
        table.set_facts(f"e{n}", msgspec.structs.replace(FACTS, max_num_seqs=32))
    assert FleetRooms(lambda: table.snapshot).room("m") == Room(old + new, capacity, 0)


@pytest.mark.parametrize("percent", [-1, 100])
def test_a_share_of_all_requests_or_fewer_than_none_is_refused(percent: int) -> None:
    data = encode_endpoints((Endpoint("e", "http://127.0.0.1:1", "m", on_trial=OnTrial("new", percent)),))
    with pytest.raises(EndpointsFileError, match="percent"):
        decode_endpoints(data)


def test_a_watcher_hears_of_other_engines_and_not_of_their_loads() -> None:
    table = table_of("m")
    seen = []
    table.watch(lambda: seen.append(table.snapshot))
    table.set_ready("e0", True)
    table.set_ready("e0", True)
    table.set_load("e0", 1.0, 0.0, 0.0)
    table.replace([])
    assert [len(one.engines) for one in seen] == [1, 0], "what an engine has to do is looked at when it matters"
    assert seen[-1] is table.snapshot


def test_models_leave_with_their_endpoints_unless_they_are_kept() -> None:
    forgetful, holding = table_of("m", "n"), table_of("n", kept=("m",))
    assert list(forgetful.snapshot.names) == ["m", "n", "alias"]
    assert list(holding.snapshot.names) == ["n", "m", "alias"]
    for table in (forgetful, holding):
        table.replace([])
    assert not list(forgetful.snapshot.names)
    assert list(holding.snapshot.names) == ["m", "n", "alias"]
    assert holding.snapshot.model_of("alias") == "m"
    assert holding.snapshot.model_of("n") == "n"
    assert holding.snapshot.model_of("o") is None


def test_what_is_kept_is_bounded() -> None:
    table = table_of(kept=())
    for number in range(MAX_KEPT + 10):
        table.replace([Endpoint("e", "http://127.0.0.1:1", f"m{number}")])
    assert len(table.snapshot.models) == MAX_KEPT + 1, "and the one that an endpoint names"
    table = table_of(kept=())
    table.replace([Endpoint(f"e{n}", "http://127.0.0.1:1", f"x{n}") for n in range(2 * MAX_KEPT)])
    table.replace([])
    assert len(table.snapshot.models) == MAX_KEPT
