"""Engines whose ranks are processes on several machines pass K/V by NCCL, each rank to those of the other engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kv_engines import FULL_BLOCKS, Fleet, answers_alone, pass_on, running_fleet
from tests.fakes.nccl_rank import play_devices, play_devices_meanwhile
from tests.fakes.small_model import write_small_model

pytestmark = pytest.mark.fleet


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    play_devices_meanwhile(monkeypatch)
    key_file = tmp_path / "fleet-key"
    key_file.write_bytes(b"k" * 32)
    with running_fleet(write_small_model(tmp_path / "model"), key_file) as fleet:
        yield fleet


def passes_tokens_of_one_engine(fleet: Fleet, prefill_on: dict[str, Any], decode_on: dict[str, Any]) -> None:
    expected = answers_alone(fleet.model, range(1, 4))
    prefill = fleet.engine("a", tensor=2, **prefill_on, kv_role="prefill", kv_data_plane="nccl")
    peers = prefill.address
    decode = fleet.engine("d", tensor=2, **decode_on, kv_role="decode", kv_data_plane="nccl", kv_peers=peers)
    for number in (1, 2, 3):
        assert pass_on(fleet, prefill, decode, number) == expected[number]
        assert decode.num_cached(f"d{number}") == FULL_BLOCKS * 16
    fleet.until(lambda: prefill.num_held_blocks == 0)  # decode has said that it has all
    assert decode.figure("received_blocks_total") == prefill.figure("sent_blocks_total") == 3 * FULL_BLOCKS
    fleet.until(lambda: decode.figure("communicators") == prefill.figure("communicators") == 2)


@pytest.mark.parametrize(("prefill_nodes", "decode_nodes"), [(2, 1), (1, 2)])
def test_over_two_machines(fleet: Fleet, prefill_nodes: int, decode_nodes: int) -> None:
    passes_tokens_of_one_engine(fleet, {"nodes": prefill_nodes}, {"nodes": decode_nodes})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_with_ranks_under_ray(fleet: Fleet) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagefleet-engine[ray]'")
    played = {
        "worker_process_setup_hook": f"{play_devices.__module__}.{play_devices.__name__}",
        "env_vars": {"PYTHONPATH": str(Path(__file__).parents[4])},
    }
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=played)
    try:
        passes_tokens_of_one_engine(fleet, {"backend": "ray"}, {})
        fleet.stop(fleet.engines[0])
    finally:
        ray.shutdown()
