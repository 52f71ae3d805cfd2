"""Engines of different numbers of ranks pass each other K/V, as if each had one."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagefleet_protocol.kv_handoff import KvTransfer

from tests.fakes.kv_engine_process import EngineProcess
from tests.fakes.kv_engines import (
    FIRST_TOKEN,
    FULL_BLOCKS,
    Fleet,
    FleetEngine,
    answers_alone,
    legs,
    pass_on,
    prompt_of,
    running_fleet,
)
from tests.fakes.small_model import WINDOWS, write_small_model

pytestmark = pytest.mark.fleet
TRANSFER = "1" * 32


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    """What one engine of one rank answers."""
    return answers_alone(model, range(1, 4))


def pair(fleet: Fleet, prefill_ranks: int, decode_ranks: int) -> tuple[FleetEngine, FleetEngine]:
    prefill = fleet.engine("a", tensor=prefill_ranks, kv_role="prefill")
    return prefill, fleet.engine("d", tensor=decode_ranks, kv_role="decode", kv_peers=prefill.address)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2)])
def test_tokens_are_those_of_one_engine(
    fleet: Fleet, expected: dict[int, list[int]], prefill_ranks: int, decode_ranks: int
) -> None:
    prefill, decode = pair(fleet, prefill_ranks, decode_ranks)
    for number in (1, 2, 3):
        assert pass_on(fleet, prefill, decode, number) == expected[number]
        assert decode.num_cached(f"d{number}") == FULL_BLOCKS * 16
    fleet.until(lambda: prefill.num_held_blocks == 0)  # decode has said that it has all
    assert decode.num_held_blocks == 0
    assert decode.figure("received_blocks_total") == prefill.figure("sent_blocks_total") == 3 * FULL_BLOCKS


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2)])
def test_windows_travel_between_any_numbers_of_ranks(
    tmp_path: Path, key_file: Path, windows: str, prefill_ranks: int, decode_ranks: int
) -> None:
    model = write_small_model(tmp_path / "model", **WINDOWS[windows])
    expected = answers_alone(model, (1, 2))
    with running_fleet(model, key_file) as fleet:
        prefill, decode = pair(fleet, prefill_ranks, decode_ranks)
        for number in (1, 2):
            assert pass_on(fleet, prefill, decode, number) == expected[number]
            assert decode.num_cached(f"d{number}") == FULL_BLOCKS * 16
        fleet.until(lambda: prefill.num_held_blocks == decode.num_held_blocks == 0)


def test_a_stage_gives_and_takes_its_layers(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill = fleet.engine("a", stages=2, kv_role="prefill")
    decode = fleet.engine("d", tensor=2, kv_role="decode", kv_peers=prefill.address)
    assert pass_on(fleet, prefill, decode, 1) == expected[1]
    assert decode.num_cached("d1") == FULL_BLOCKS * 16
    fleet.stop(prefill)
    prefill = fleet.engine("b", kv_role="prefill")
    decode = fleet.engine("e", stages=2, kv_role="decode", kv_peers=prefill.address)
    for number in (2, 3):
        assert pass_on(fleet, prefill, decode, number) == expected[number]
        assert decode.num_cached(f"d{number}") == FULL_BLOCKS * 16


def test_a_request_that_is_aborted_midway_leaves_no_block(fleet: Fleet, expected: dict[int, list[int]]) -> None:
    prefill, decode = pair(fleet, 1, 2)
    one, two = legs(1, prefill, decode)
    decode.add("d1", prompt_of(1), transfer=two)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, one)
    fleet.until(lambda: decode.figure("received_blocks_total") > 0)
    decode.core.abort(["d1"])
    fleet.until(lambda: prefill.ended("p1") and prefill.num_held_blocks == decode.num_held_blocks == 0)
    assert pass_on(fleet, prefill, decode, 2) == expected[2]


def test_a_prefill_engine_that_is_killed_midway_costs_no_wrong_token(
    fleet: Fleet, model: Path, key_file: Path, expected: dict[int, list[int]]
) -> None:
    prefill = EngineProcess(model, key_file, "a", tensor=2)
    decode = fleet.engine("d", kv_peers=prefill.address)
    decode.add("d1", prompt_of(1), transfer=KvTransfer("decode", TRANSFER, prefill.incarnation, prefill.address))
    prefill.add("p1", prompt_of(1), KvTransfer("prefill", TRANSFER, decode.incarnation))
    prefill.step()  # 48 of 165 tokens
    fleet.until(lambda: decode.figure("received_blocks_total") > 0)
    prefill.kill()
    fleet.until(lambda: decode.ended("d1"))
    assert decode.tokens("d1") == expected[1]
    assert decode.figure("recomputed_tokens_total") == FULL_BLOCKS * 16
    assert decode.num_held_blocks == 0


def test_a_decode_engine_that_is_killed_midway_leaves_nothing_held(fleet: Fleet, model: Path, key_file: Path) -> None:
    prefill = fleet.engine("a", tensor=2)
    decode = EngineProcess(model, key_file, "d", kv_peers=prefill.address)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, KvTransfer("prefill", TRANSFER, decode.incarnation))
    decode.add("d1", prompt_of(1), KvTransfer("decode", TRANSFER, prefill.incarnation, prefill.address))
    prefill.step()  # 48 of 165 tokens
    while decode.step() == 0:
        pass
    assert prefill.num_held_blocks > 0
    decode.kill()
    fleet.until(lambda: prefill.ended("p1") and prefill.num_held_blocks == 0)
