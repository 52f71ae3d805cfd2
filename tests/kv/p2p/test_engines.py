"""Two whole engines over loopback: the same tokens as one engine gives, whatever happens to the other."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.errors import ConfigError
from pagefleet_kv.config import KVTransferConfig, SendType
from pagefleet_kv.errors import TransfersDead
from pagefleet_kv.p2p import peers as peers_module
from pagefleet_kv.p2p.agent import TurnClock
from pagefleet_kv.p2p.transfer.actions import SourceAction
from pagefleet_kv.p2p.transfer.source import Source as P2PSource
from pagefleet_kv.port import EngineIdentity

from tests.fakes.kv_engines import (
    FIRST_TOKEN,
    FULL_BLOCKS,
    PATIENCE_S,
    Fleet,
    FleetEngine,
    answers_alone,
    legs,
    pass_on,
    prompt_of,
    running_fleet,
)
from tests.fakes.small_model import WINDOWS, write_small_model


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    """What an engine answers that computes all itself."""
    return answers_alone(model, range(1, 9))


def pair(fleet: Fleet, send_type: SendType = "put_async", **kv: Any) -> tuple[FleetEngine, FleetEngine]:
    """Two engines; `kv`: more settings of the prefill engine's."""
    prefill = fleet.engine("a", kv_role="prefill", kv_send_type=send_type, **kv)
    return prefill, fleet.engine("d", kv_role="decode", kv_peers=prefill.address, kv_send_type=send_type)


def passed(decode: FleetEngine, number: int, expected: dict[int, list[int]]) -> bool:
    """Whether the answer is right and its prompt came from the other engine."""
    assert decode.tokens(f"d{number}") == expected[number]
    return decode.num_cached(f"d{number}") == FULL_BLOCKS * 16


def test_time_that_a_thread_had_no_turn_for_does_not_count() -> None:
    read = iter([10.0, 10.1, 11.1, 71.0, 71.2, 71.1])
    clock = TurnClock(lambda: next(read))
    assert [round(clock(), 6) for _ in range(5)] == [10.1, 11.1, 12.1, 12.3, 12.2]


def test_engines_that_were_stopped_are_not_dead_for_each_other(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    pass_on(fleet, prefill, decode, 1)
    for engine in (prefill, decode):
        engine.skip(60.0)
    pass_on(fleet, prefill, decode, 2)
    assert passed(decode, 2, expected)
    assert decode.figure("peer_deaths_total") == 0


@pytest.mark.parametrize("send_type", ["put_async", "put", "get"])
def test_a_prompt_computed_elsewhere_gives_the_same_tokens(
    fleet: Fleet, expected: dict[int, list[int]], send_type: SendType
) -> None:
    prefill, decode = pair(fleet, send_type)
    for number in (1, 2, 3):
        pass_on(fleet, prefill, decode, number)
        assert passed(decode, number, expected)
    fleet.until(lambda: prefill.num_held_blocks == 0)  # decode has said that it has all
    assert decode.num_held_blocks == 0
    assert decode.figure("received_blocks_total") == prefill.figure("sent_blocks_total") == 3 * FULL_BLOCKS
    assert decode.figure("seconds_count") == 3
    fleet.until(lambda: decode.figure('peers{state="ready"}') == 1)


def test_a_leg_of_put_is_answered_when_its_blocks_have_arrived(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet, "put")
    one, two = legs(1, prefill, decode)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    fleet.until(lambda: not prefill.core.is_due and prefill.core.stats().transfers_owed == 1)
    assert prefill.core.has_work
    assert not prefill.ended("p1")
    decode.add("d1", prompt_of(1), transfer=two)
    fleet.until(lambda: prefill.ended("p1") and decode.ended("d1"))
    assert prefill.outputs["p1"][-1].finish_reason == "length"
    assert passed(decode, 1, expected)
    assert prefill.core.stats().transfers_owed == 0


def test_a_leg_of_put_whose_blocks_nobody_took_is_an_error(fleet: Fleet) -> None:
    prefill, decode = pair(fleet, "put", kv_lease=1.0)
    one, two = legs(1, prefill, decode)
    decode.add("d1", prompt_of(1), transfer=two)
    fleet.until(lambda: bool(decode.core._scheduler._loads.num_parked and prefill.figure("nacks_total") == 0))
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    prefill.step()
    fleet.stop(decode)
    fleet.until(lambda: prefill.ended("p1"), prefill)
    assert prefill.outputs["p1"][-1].error_kind == "kv_load_failed"
    fleet.until(lambda: prefill.num_held_blocks == 0, prefill)


def test_a_leg_that_waits_in_the_queue_keeps_its_place(
    fleet: Fleet, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    begin = P2PSource.begin

    def watched(source: P2PSource, transfer_id: bytes, peer_incarnation: str, now: float) -> list[SourceAction]:
        begun.append(transfer_id.hex())
        return begin(source, transfer_id, peer_incarnation, now)

    monkeypatch.setattr(P2PSource, "begin", watched)
    prefill, decode = pair(fleet)
    one, two = legs(1, prefill, decode)
    decode.add("d1", prompt_of(1), transfer=two)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    fleet.until(lambda: begun == [one.transfer_id], decode)  # the prefill engine computes no step meanwhile
    fleet.until(lambda: decode.ended("d1") and prefill.ended("p1"))
    assert passed(decode, 1, expected)
    assert begun == [one.transfer_id]


def test_an_engine_that_drains_ends_what_it_has_and_takes_no_more(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    (one, two), (_, other) = legs(1, prefill, decode), legs(2, prefill, decode)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    fleet.until(lambda: prefill.ended("p1"))
    assert prefill.core.stats().transfers_owed == 1
    prefill.core.drain()
    decode.add("d2", prompt_of(2), transfer=other)
    fleet.until(lambda: decode.ended("d2"))
    assert decode.figure("recomputed_tokens_total") == FULL_BLOCKS * 16
    decode.add("d1", prompt_of(1), transfer=two)
    fleet.until(lambda: decode.ended("d1"))
    assert passed(decode, 1, expected)
    fleet.until(lambda: prefill.core.stats().transfers_owed == 0)


def test_a_pool_full_of_blocks_that_wait_for_others_serves_new_requests(
    fleet: Fleet, expected: dict[int, list[int]]
) -> None:
    prefill, decode = pair(fleet)
    both = {number: legs(number, prefill, decode) for number in range(1, 8)}
    for number in both:  # 70 blocks of a pool of 64, and nobody has asked for them
        prefill.add(f"p{number}", prompt_of(number), FIRST_TOKEN, both[number][0])
    fleet.until(lambda: all(prefill.ended(f"p{number}") for number in both), prefill)
    assert prefill.figure("blocks_spilled_total") > 0
    for number in both:
        decode.add(f"d{number}", prompt_of(number), transfer=both[number][1])
    fleet.until(lambda: all(decode.ended(f"d{number}") for number in both))
    assert all(passed(decode, number, expected) for number in both)
    fleet.until(lambda: prefill.num_held_blocks == 0)


def test_many_at_once_and_in_any_order(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    both = {number: legs(number, prefill, decode) for number in range(1, 9)}
    for number in (1, 2, 3, 4):  # decode hears of it first
        decode.add(f"d{number}", prompt_of(number), transfer=both[number][1])
    for number in (4, 3, 5, 6, 2, 7, 8, 1):
        prefill.add(f"p{number}", prompt_of(number), FIRST_TOKEN, both[number][0])
    fleet.until(lambda: prefill.ended("p8"))
    for number in (5, 6, 7, 8):
        decode.add(f"d{number}", prompt_of(number), transfer=both[number][1])
    fleet.until(lambda: all(decode.ended(f"d{number}") for number in both))
    assert [decode.tokens(f"d{number}") for number in both] == [expected[number] for number in both]
    assert decode.figure("recomputed_tokens_total") == 0
    fleet.until(lambda: prefill.num_held_blocks == 0)


def test_requests_of_one_transfer_share_its_blocks(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    one, two = legs(1, prefill, decode)
    for choice in "abc":
        decode.add(choice, prompt_of(1), transfer=two)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    fleet.until(lambda: all(decode.ended(choice) for choice in "abc"))
    assert [decode.tokens(choice) for choice in "abc"] == [expected[1]] * 3
    assert [decode.num_cached(choice) for choice in "abc"] == [FULL_BLOCKS * 16] * 3
    assert decode.figure("received_blocks_total") == FULL_BLOCKS


def test_what_decode_has_already_is_not_sent(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    decode.add("before", prompt_of(1)[:100], FIRST_TOKEN)  # leaves 6 blocks in its cache
    fleet.until(lambda: decode.ended("before"))
    pass_on(fleet, prefill, decode, 1)
    assert passed(decode, 1, expected)
    assert decode.figure("received_blocks_total") == FULL_BLOCKS - 6


def test_prefill_lets_go_when_decode_has_all_already(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    decode.add("before", prompt_of(1))
    fleet.until(lambda: decode.ended("before"))
    pass_on(fleet, prefill, decode, 1)
    assert decode.tokens("d1") == expected[1]
    assert decode.figure("received_blocks_total") == 0
    fleet.until(lambda: prefill.num_held_blocks == 0)
    assert prefill.figure("lease_expiries_total") == 0


def test_a_request_that_is_given_up_frees_both_sides(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    one, two = legs(1, prefill, decode)
    decode.add("d1", prompt_of(1), transfer=two)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    fleet.until(lambda: prefill.figure("sent_blocks_total") > 0)
    decode.core.abort(["d1"])
    fleet.until(lambda: prefill.ended("p1") and prefill.num_held_blocks == decode.num_held_blocks == 0)
    pass_on(fleet, prefill, decode, 2)
    assert passed(decode, 2, expected)


def test_a_leg_that_is_given_up_is_computed_by_decode(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    one, two = legs(1, prefill, decode)
    decode.add("d1", prompt_of(1), transfer=two)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    prefill.step()  # a part of the prompt, and no more
    fleet.until(lambda: prefill.figure("sent_blocks_total") > 0, decode)
    prefill.core.abort(["p1"])
    fleet.until(lambda: decode.ended("d1"))
    assert decode.tokens("d1") == expected[1]
    assert decode.figure("recomputed_tokens_total") == FULL_BLOCKS * 16
    fleet.until(lambda: prefill.num_held_blocks == 0)


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_prefill_that_dies_midway_costs_no_wrong_token(
    fleet: Fleet, expected: dict[int, list[int]], on_failure: str
) -> None:
    prefill, decode = pair(fleet)
    one, two = legs(1, prefill, decode, "fail" if on_failure == "fail" else "recompute")
    decode.add("d1", prompt_of(1), transfer=two)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    prefill.step()  # a part of the prompt, and no more
    fleet.until(lambda: prefill.figure("sent_blocks_total") > 0, decode)
    fleet.stop(prefill)
    fleet.until(lambda: decode.ended("d1"))
    if on_failure == "fail":
        last = decode.outputs["d1"][-1]
        assert last.error_kind == "kv_load_failed"
        assert last.kv_fault in {"unreachable", "transfer_failed"}, "its end, or its last word, is noticed first"
        assert decode.tokens("d1") == []
    else:
        assert decode.tokens("d1") == expected[1]
    assert decode.num_held_blocks == 0


def test_an_engine_that_restarts_under_its_name_is_another(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    pass_on(fleet, prefill, decode, 1)
    assert passed(decode, 1, expected)
    port = int(prefill.address.rpartition(":")[2])
    fleet.stop(prefill)
    again = fleet.engine("b", kv_role="prefill", kv_port=port)
    number, later = 2, [0.0]
    while True:  # it is found again as soon as it is noticed that the old one is gone
        pass_on(fleet, again, decode, number)
        if passed(decode, number, expected) or number == 8:
            break
        number += 1
        later.append(time.monotonic() + 1.0)
        fleet.until(lambda: time.monotonic() > later[-1])
    assert decode.num_cached(f"d{number}") == FULL_BLOCKS * 16
    _, two = legs(9, prefill, decode)  # a router that has not noticed yet
    decode.add("late", prompt_of(1, 150), transfer=two)
    fleet.until(lambda: decode.ended("late"))
    assert decode.outputs["late"][-1].finish_reason == "length"


def test_decode_that_dies_leaves_nothing_held(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    one, two = legs(1, prefill, decode)
    decode.add("d1", prompt_of(1), transfer=two)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    fleet.until(lambda: prefill.figure("sent_blocks_total") > 0)
    fleet.stop(decode)
    fleet.until(lambda: prefill.ended("p1") and prefill.num_held_blocks == 0)
    other = fleet.engine("e", kv_role="decode", kv_peers=prefill.address)
    pass_on(fleet, prefill, other, 2)
    assert passed(other, 2, expected)


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_who_is_no_peer_is_not_asked(
    fleet: Fleet, expected: dict[int, list[int]], on_failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = fleet.engine("a"), fleet.engine("d", kv_peers="127.0.0.1:1")
    _, two = legs(1, prefill, decode, "fail" if on_failure == "fail" else "recompute")
    decode.add("d1", prompt_of(1), transfer=two)
    fleet.until(lambda: decode.ended("d1"))
    if on_failure == "fail":
        last = decode.outputs["d1"][-1]
        assert (last.error_kind, last.kv_fault) == ("kv_load_failed", "unknown_peer")
        assert decode.figure("recomputed_tokens_total") == 0
    else:
        assert decode.tokens("d1") == expected[1]
        assert decode.figure("recomputed_tokens_total") > 0
    assert decode.figure("refused_peers_total") == decode.figure("failures_total") == 1
    assert f"the K/V of request d1 did not come: {prefill.address} is none of kv_peers" in caplog.text
    assert sum(decode.figure(f'peers{{state="{state}"}}') for state in ("dialing", "ready")) == 0


def test_an_engine_with_other_blocks_is_refused(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill = fleet.engine("a", block_size=8)
    decode = fleet.engine("d", kv_peers=prefill.address)
    _, two = legs(1, prefill, decode)
    decode.add("d1", prompt_of(1), transfer=two)
    fleet.until(lambda: decode.ended("d1"))
    assert decode.tokens("d1") == expected[1]
    fleet.until(lambda: decode.figure('peers{state="refused"}') == 1)


def test_an_engine_of_another_fleet_is_not_heard(fleet: Fleet, expected: dict[int, list[int]], tmp_path: Path) -> None:
    other_key = tmp_path / "another"
    other_key.write_bytes(b"o" * 32)
    prefill = fleet.engine("a")
    decode = fleet.engine("d", key_file=other_key, kv_peers=prefill.address, kv_transfer_timeout=1.0)
    _, two = legs(1, prefill, decode)
    decode.add("d1", prompt_of(1), transfer=two)
    fleet.until(lambda: decode.ended("d1"))
    assert decode.tokens("d1") == expected[1]
    fleet.until(lambda: prefill.figure("refused_connections_total") > 0)


def test_noise_on_both_ports_harms_nobody(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet)
    drawn = random.Random(11)
    host, _, port = prefill.address.rpartition(":")
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01CURVE".ljust(64, b"\x00")
    open_sockets = []
    for number in (1, 2):
        for count in range(40):
            raw = socket.create_connection((host, int(port) + count % 2))
            open_sockets.append(raw)
            raw.sendall((greeting if count % 4 == 0 else b"") + drawn.randbytes(drawn.randrange(1, 5000)))
            if count % 3 == 0:
                raw.close()
        pass_on(fleet, prefill, decode, number)
        assert passed(decode, number, expected)
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:  # a client without any key
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(f"tcp://{prefill.address}")
        plain.send(b"let me in")
        fleet.until(lambda: prefill.figure("refused_connections_total") > 0)
    for raw in open_sockets:
        raw.close()
    pass_on(fleet, prefill, decode, 3)
    assert passed(decode, 3, expected)


def test_engines_that_do_both_pass_both_ways(fleet: Fleet, expected: dict[int, list[int]], tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    peers.write_text("")
    one, two = (fleet.engine(name, kv_peers=f"file:{peers}") for name in "ab")
    peers.write_text(f"{one.address}  # a comment\n{two.address}\n")
    deadline = time.monotonic() + PATIENCE_S
    while None in (one.peers.find(two.address), two.peers.find(one.address)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pass_on(fleet, one, two, 1)
    pass_on(fleet, two, one, 2)
    assert passed(two, 1, expected)
    assert passed(one, 2, expected)


def test_a_peer_that_leaves_the_list_is_hung_up_when_nothing_comes_from_it(
    fleet: Fleet, expected: dict[int, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "REFRESH_S", 0.05)
    peers = tmp_path / "peers"
    prefill = fleet.engine("a")
    peers.write_text(f"{prefill.address}\n")
    decode = fleet.engine("d", kv_peers=f"file:{peers}")
    one, two = legs(1, prefill, decode)
    decode.add("d1", prompt_of(1), transfer=two)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)  # and computes nothing yet
    fleet.until(lambda: decode.figure('peers{state="ready"}') == 1, decode)
    peers.write_text("")
    fleet.until(lambda: not decode.peers.allows(prefill.address), decode)
    fleet.until(lambda: decode.ended("d1"))
    assert passed(decode, 1, expected)
    fleet.until(lambda: decode.figure('peers{state="ready"}') == 0)
    _, late = legs(2, prefill, decode)
    decode.add("d2", prompt_of(2), transfer=late)
    fleet.until(lambda: decode.ended("d2"))
    assert decode.figure("refused_peers_total") == 1


def test_without_a_fleet_key_there_is_no_p2p(model: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(model), load_format="dummy", num_threads=1),
        cache=CacheConfig(num_kv_blocks=32),
        kv_transfer=KVTransferConfig(kv_connector="p2p"),
    )
    with pytest.raises(ConfigError, match="give fleet_key_file"):
        build_core(config)
    with pytest.raises(ConfigError, match="fleet_key_file /nowhere cannot be read"):
        build_core(config, identity=EngineIdentity("a" * 32, "/nowhere"))


def test_a_thread_that_ends_by_a_mistake_ends_the_engine(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fleet.engine("a")

    def broken(*_: object) -> bool:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(P2PSource, "tick", broken)  # which its thread calls ten times a second
    with pytest.raises(TransfersDead, match="passes K/V has ended"):
        fleet.until(lambda: False, engine)


@pytest.mark.parametrize("windows", WINDOWS)
def test_windows_come_whole_from_engines_whose_pools_are_full(tmp_path: Path, key_file: Path, windows: str) -> None:
    """Twelve prompts at once, of which a pool holds two or three: what waits for its receiver is spilled."""
    model, numbers = write_small_model(tmp_path / "model", **WINDOWS[windows]), range(1, 13)
    expected = answers_alone(model, numbers)
    with running_fleet(model, key_file) as fleet:
        prefill = fleet.engine("a", num_tokens=560, kv_role="prefill")
        decode = fleet.engine("d", num_tokens=560, kv_role="decode", kv_peers=prefill.address)
        for number in numbers:
            one, two = legs(number, prefill, decode)
            prefill.add(f"p{number}", prompt_of(number), FIRST_TOKEN, one)
            decode.add(f"d{number}", prompt_of(number), transfer=two)
        fleet.until(lambda: all(decode.ended(f"d{number}") for number in numbers))
        for number in numbers:
            assert decode.tokens(f"d{number}") == expected[number]
            assert decode.num_cached(f"d{number}") == FULL_BLOCKS * 16
        fleet.until(lambda: prefill.num_held_blocks == decode.num_held_blocks == 0)
        assert decode.figure("recomputed_tokens_total") == 0
