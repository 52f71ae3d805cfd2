"""A core's blocks have the keys that a router computes from what the core says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from pagefleet_engine.config import CacheConfig, EngineConfig, ExecutionConfig, ModelConfig
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.engine_core.messages import AddRequest
from pagefleet_protocol.block_hash import BlockHash, PrefixScope, extend_hashes, root_hash
from pagefleet_protocol.handoff import combined_salt, tenant_salt
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.small_model import write_small_model

PROMPT = list(range(70))


class Recorder:
    def __init__(self) -> None:
        self.known: list[BlockHash] = []

    def stored(self, contents: Sequence[BlockHash]) -> None:
        self.known += contents

    def removed(self, contents: Sequence[BlockHash]) -> None:
        raise AssertionError("the pool is large enough")

    def cleared(self) -> None:
        self.known.clear()


@pytest.mark.parametrize("name", [None, "org/name,alias"])
def test_blocks_are_scoped_with_what_the_core_says(tmp_path: Path, name: str | None) -> None:
    config = EngineConfig(
        model=ModelConfig(
            model=str(write_small_model(tmp_path / "small")), load_format="dummy", served_model_name=name
        ),
        cache=CacheConfig(num_kv_blocks=64),
        execution=ExecutionConfig(profile_cache=False),
    )
    recorder = Recorder()
    core, ready = build_core(config, cache_events=recorder)
    assert ready.scope == ("org/name" if name else "small")
    salts = [None, "mine", tenant_salt("a"), combined_salt(tenant_salt("a"), "mine")]
    expected: list[BlockHash] = []
    for number, salt in enumerate(salts):
        core.add(AddRequest(str(number), PROMPT, SamplingParams(max_tokens=1), (), 0, salt))
        while core.has_work:
            assert all(not output.num_cached_tokens for output in core.step()), "tenants share no block"
        hashes: list[BlockHash] = []
        extend_hashes(hashes, root_hash(PrefixScope(ready.scope, None, salt)), PROMPT, ready.block_size)
        expected += hashes
    assert len(expected) == len(salts) * (len(PROMPT) // ready.block_size)
    assert recorder.known == expected
    core.shutdown()
