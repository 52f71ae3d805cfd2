"""Connectors of engines whose K/V lies with tensor ranks or stages; what these store is what one rank stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.ranks.parallelism import Parallelism

from tests.fakes.small_model import WINDOWS, write_small_model
from tests.kv.conformance.test_same_tokens import core_of, run

pytestmark = pytest.mark.fleet

ALONE, TENSOR = Parallelism(), Parallelism(tensor_parallel_size=2)
STAGES = Parallelism(pipeline_parallel_size=2)


@pytest.fixture(scope="module", params=["full", "full and window", "full and chunks"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = "small" if request.param == "full" else "windows"
    return write_small_model(tmp_path_factory.mktemp(name) / "model", **WINDOWS.get(request.param, {}))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    core = core_of(model, 256)
    answers = run(core, "alone")
    core.shutdown()
    return answers


@pytest.mark.parametrize(("writes", "reads"), [(TENSOR, ALONE), (ALONE, TENSOR), (STAGES, TENSOR)])
def test_a_folder_is_for_any_number_of_ranks(
    model: Path, expected: dict[str, list[int]], tmp_path: Path, writes: Parallelism, reads: Parallelism
) -> None:
    if model.parent.name.startswith("windows") and writes is STAGES:  # their blocks are made of other layers
        reads = STAGES
    loaded = []
    for parallel in (writes, reads):
        core = core_of(model, 40, parallel, kv_connector="file", kv_offload_dir=str(tmp_path / "kv"))
        assert run(core, "a") == expected
        core.shutdown(within_s=30)
        counters = core._scheduler.connector.stats().counters
        loaded.append(counters["pagefleet_engine_kv_transfer_file_loaded_blocks_total"])
    assert loaded[1] > loaded[0] + 6 * 9 - 1  # all but the last block of each prompt


def test_stages_of_a_model_with_windows_have_a_folder_of_their_own(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model", **WINDOWS["full and window"])
    core_of(model, 40, STAGES, kv_connector="file", kv_offload_dir=str(tmp_path / "kv")).shutdown()
    with pytest.raises(ConfigError, match=r"parts \(\) here, \(1, 1\) there"):
        core_of(model, 40, kv_connector="file", kv_offload_dir=str(tmp_path / "kv"))


@pytest.mark.parametrize("parallel", [TENSOR, STAGES])
def test_a_pool_that_is_too_small_lives_on_host_memory(
    model: Path, expected: dict[str, list[int]], parallel: Parallelism
) -> None:
    core = core_of(model, 16, parallel, kv_connector="offload", kv_offload_memory=2**24)
    assert [run(core, f"{number}-") for number in range(2)] == [expected] * 2
    counters = core._scheduler.connector.stats().counters
    assert counters["pagefleet_engine_kv_transfer_offload_hits_total"] > 0
    core.shutdown()
