"""An engine whose peer is a real process that is killed, or frozen, in the middle of a transfer."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagefleet_protocol.kv_handoff import KvTransfer

from tests.fakes.kv_engine_process import EngineProcess
from tests.fakes.kv_engines import FIRST_TOKEN, Fleet, FleetEngine, prompt_of

pytestmark = pytest.mark.fleet
TRANSFER = "1" * 32


def by_itself(fleet: Fleet) -> list[int]:
    """What an engine answers that computes all itself."""
    alone = fleet.engine("c")
    alone.add("alone", prompt_of(1))
    fleet.until(lambda: alone.ended("alone"), alone)
    return alone.tokens("alone")


def midway(fleet: Fleet, decode: FleetEngine, prefill: EngineProcess) -> None:
    """Begin a transfer from a process to an engine here; some blocks have come, not all."""
    decode.add("d1", prompt_of(1), transfer=KvTransfer("decode", TRANSFER, prefill.incarnation, prefill.address))
    prefill.add("p1", prompt_of(1), KvTransfer("prefill", TRANSFER, decode.incarnation))
    prefill.step()  # 48 of 165 tokens
    fleet.until(lambda: decode.figure("received_blocks_total") > 0)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_prefill_process_that_is_gone_midway_costs_no_wrong_token(
    fleet: Fleet, model: Path, key_file: Path, how: str
) -> None:
    expected = by_itself(fleet)
    prefill = EngineProcess(model, key_file, "a")
    decode = fleet.engine("d", kv_peers=prefill.address)
    midway(fleet, decode, prefill)
    if how == "killed":
        prefill.kill()
    else:
        prefill.freeze()
    fleet.until(lambda: decode.ended("d1"))
    assert decode.tokens("d1") == expected
    assert decode.figure("recomputed_tokens_total") == 160
    assert decode.num_held_blocks == 0
    if how == "frozen":
        assert decode.figure("peer_deaths_total") == 1
        prefill.kill()


def test_a_decode_process_that_is_killed_midway_leaves_nothing_held(fleet: Fleet, model: Path, key_file: Path) -> None:
    prefill = fleet.engine("a")
    decode = EngineProcess(model, key_file, "d", kv_peers=prefill.address)
    prefill.add("p1", prompt_of(1), FIRST_TOKEN, KvTransfer("prefill", TRANSFER, decode.incarnation))
    decode.add("d1", prompt_of(1), KvTransfer("decode", TRANSFER, prefill.incarnation, prefill.address))
    prefill.step()  # 48 of 165 tokens
    while decode.step() == 0:
        pass
    assert prefill.num_held_blocks > 0
    decode.kill()
    fleet.until(lambda: prefill.ended("p1") and prefill.num_held_blocks == 0)
