"""Fleets whose engines keep what their pool gives up: prompts that come again are brought back, not computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from e2e.fleet_process import SERVICE, FleetProcess

pytestmark = pytest.mark.fleet
EXAMPLE = Path(__file__).parents[1] / "examples/11-kv-offload/inferenceservice.yaml"
HITS = "pagefleet_engine_kv_transfer_offload_hits_total"
ON_DISK = 'pagefleet_engine_kv_transfer_offload_bytes{tier="disk"}'
PROMPTS = [
    f"Text {number}. " + f"A router asks engine {number} for the KV cache of a prompt. " * 12 for number in range(8)
]


@pytest.fixture(params=[{}, {"disaggregation": {"threshold": 0}}], ids=["whole", "disaggregated"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FleetProcess]:
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())["spec"]
    engine = {**spec["engine"], "args": [*spec["engine"]["args"], "--num-threads", "1"]}
    with FleetProcess(tmp_path, engine=engine, **request.param) as fleet:
        fleet.until(lambda: fleet.serves(2 if request.param else 1))
        yield fleet
    assert not (fleet.state_dir / "kv").exists()


def answers(fleet: FleetProcess) -> list[str]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        return [
            client.completions.create(model=SERVICE, prompt=prompt, max_tokens=8, temperature=0).choices[0].text
            for prompt in PROMPTS
        ]


def total(fleet: FleetProcess, series: str) -> float:
    return sum(found.get(series, 0.0) for found in fleet.engine_metrics().values())


def test_prompts_that_were_pushed_out_come_back_from_memory_and_disk(fleet: FleetProcess) -> None:
    first = answers(fleet)
    assert answers(fleet) == first
    fleet.until(lambda: total(fleet, HITS) > 0 and total(fleet, ON_DISK) > 0)
    names = {one.id for one in fleet.endpoints()}
    assert {folder.name for folder in (fleet.state_dir / "kv").iterdir()} == names
