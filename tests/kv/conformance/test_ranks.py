"""Connectors of engines whose K/V lies with tensor ranks; what these store is what one rank stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.small_model import write_small_model
from tests.kv.conformance.test_same_tokens import core_of, run

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    core = core_of(model, 256)
    answers = run(core, "alone")
    core.shutdown()
    return answers


@pytest.mark.parametrize(("writes", "reads"), [(2, 1), (1, 2)])
def test_a_folder_is_for_any_number_of_ranks(
    model: Path, expected: dict[str, list[int]], tmp_path: Path, writes: int, reads: int
) -> None:
    loaded = []
    for ranks in (writes, reads):
        core = core_of(model, 40, ranks, kv_connector="file", kv_offload_dir=str(tmp_path / "kv"))
        assert run(core, "a") == expected
        core.shutdown(within_s=30)
        counters = core._scheduler.connector.stats().counters
        loaded.append(counters["pagefleet_engine_kv_transfer_file_loaded_blocks_total"])
    assert loaded[1] > loaded[0] + 6 * 9 - 1  # all but the last block of each prompt


def test_a_pool_that_is_too_small_lives_on_host_memory(model: Path, expected: dict[str, list[int]]) -> None:
    core = core_of(model, 16, 2, kv_connector="offload", kv_offload_memory=2**24)
    assert [run(core, f"{number}-") for number in range(2)] == [expected] * 2
    counters = core._scheduler.connector.stats().counters
    assert counters["pagefleet_engine_kv_transfer_offload_hits_total"] > 0
    core.shutdown()
