"""Engines whose copies share experts pass K/V by NCCL, each copy to each of the other engine's, while all step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.kv_engines import (
    FIRST_TOKEN,
    FULL_BLOCKS,
    PATIENCE_S,
    Fleet,
    SteppingEngine,
    answers_alone,
    legs,
    prompt_of,
    running_fleet,
)
from tests.fakes.nccl_rank import play_devices_meanwhile
from tests.fakes.small_model import LATENTS, write_small_model

pytestmark = pytest.mark.fleet

NUMBERS = range(1, 9)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    play_devices_meanwhile(monkeypatch)
    key_file = tmp_path / "fleet-key"
    key_file.write_bytes(b"k" * 32)
    with running_fleet(write_small_model(tmp_path / "model", **LATENTS), key_file) as fleet:
        yield fleet


def test_each_copy_passes_to_each(fleet: Fleet) -> None:
    expected = answers_alone(fleet.model, NUMBERS)
    sources = fleet.copies("ab", fleet.model, kv_role="prefill", kv_data_plane="nccl")
    peers = ",".join(engine.address for engine in sources)
    targets = fleet.copies("de", fleet.model, kv_role="decode", kv_data_plane="nccl", kv_peers=peers)
    pairs = {number: (sources[number % 2], targets[number // 2 % 2]) for number in NUMBERS}

    def begin(number: int, source: SteppingEngine, target: SteppingEngine) -> None:
        one, two = legs(number, source, target)
        source.call(lambda: source.add(f"p{number}", prompt_of(number), FIRST_TOKEN, one))
        target.call(lambda: target.add(f"d{number}", prompt_of(number), transfer=two))

    for number, (source, target) in pairs.items():
        begin(number, source, target)
    deadline = time.monotonic() + PATIENCE_S
    while not all(f"d{n}" in target.outputs and target.ended(f"d{n}") for n, (_, target) in pairs.items()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for number, (_, target) in pairs.items():
        assert target.tokens(f"d{number}") == expected[number]
        assert target.num_cached(f"d{number}") == FULL_BLOCKS * 16
    for engine in targets:
        assert engine.figure("received_blocks_total") == len(NUMBERS) // 2 * FULL_BLOCKS
