"""What a download tells of experts is what the engine gives to ranks whole."""

from __future__ import annotations

import asyncio

import pytest
from pagefleet_download.download import inspect
from pagefleet_download.progress import ProgressMeter
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.parameters import count_parameters

from tests.engine.ranks.test_tensor_ranks import MIXTURES, Make
from tests.fakes.downloads import fast


@pytest.mark.parametrize("family", MIXTURES)
def test_bytes_of_experts_are_those_of_every_familys_tensors(family: str, make_checkpoint: Make) -> None:
    folder = make_checkpoint(family, shard_size="100KB")
    facts = asyncio.run(inspect(folder.as_uri(), fast(), ProgressMeter())).facts
    experts = read_arch(folder).experts
    assert facts is not None
    assert experts is not None
    assert facts.num_experts == experts.routing.num_experts
    matrices = 4 * count_parameters(read_arch(folder)).experts
    assert matrices <= facts.expert_bytes <= 1.02 * matrices, "biases are not counted as parameters"
