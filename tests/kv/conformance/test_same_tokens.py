"""A whole engine with each connector gives the tokens of one without, also where its pool is far too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.config import CacheConfig, EngineConfig, KVCacheDType, ModelConfig, SchedulerConfig
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import AddRequest, RequestOutput
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.port import EngineIdentity
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.small_model import LATENTS, WINDOWS, write_small_model

MODELS: dict[str, dict[str, object]] = {"full": {}, **WINDOWS, "latents": LATENTS}
KINDS = ("file", "offload", "p2p,offload", "p2p,file")
ANSWER = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = {f"{number}": [40 + (number * 31 + place * place) % 200 for place in range(150)] for number in range(6)}
ROUNDS = 2


def core_of(
    model: Path, num_kv_blocks: int, parallel: Parallelism | None = None, dtype: KVCacheDType = "auto", **kv: Any
) -> EngineCore:
    num_groups = len(group_layers(read_arch(model).windows))
    num_kv_blocks += 14 * (num_groups - 1)  # of which one request takes as many in the second group
    config = EngineConfig(
        model=ModelConfig(model=str(model), load_format="dummy", dtype="float32", num_threads=1, max_model_len=256),
        cache=CacheConfig(num_kv_blocks=num_kv_blocks, kv_cache_dtype=dtype),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=48),
        kv_transfer=KVTransferConfig(**kv),
        parallel=parallel or Parallelism(),
    )
    key_file = model / "fleet-key"
    key_file.write_bytes(b"k" * 32)
    core, _ = build_core(config, identity=EngineIdentity("a" * 32, str(key_file)))
    return core


def run(core: EngineCore, name: str) -> dict[str, list[int]]:
    """Ask all prompts at once; returns the answers."""
    answers: dict[str, list[int]] = {prompt: [] for prompt in PROMPTS}

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.error is None
            answers[output.request_id.removeprefix(name)] += output.new_token_ids

    for prompt, token_ids in PROMPTS.items():
        assert not core.add(AddRequest(name + prompt, token_ids, ANSWER, (1,)))
    while core.has_work:
        take(core.step())
    core.check_integrity()
    return answers


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("small") / "model", **MODELS[request.param])


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    core = core_of(model, 256)
    answers = run(core, "alone")
    core.shutdown()
    return answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_kv_blocks", [16, 40])
def test_same_tokens(
    model: Path, expected: dict[str, list[int]], tmp_path: Path, kind: str, num_kv_blocks: int
) -> None:
    core = core_of(
        model, num_kv_blocks, kv_connector=kind, kv_offload_dir=str(tmp_path / "kv"), kv_offload_memory=2**24
    )
    for number in range(ROUNDS):
        assert run(core, f"{number}-") == expected
    core.reset_prefix_cache()
    assert run(core, "after") == expected
    core.shutdown()


def test_same_tokens_over_bytes(model: Path, tmp_path: Path) -> None:
    """K/V in fp8, of every kind of group: what a small pool has no room for comes back from memory or the disk."""
    alone = core_of(model, 256, dtype="fp8")
    wanted = run(alone, "alone")
    alone.shutdown()
    core = core_of(
        model, 16, dtype="fp8", kv_connector="offload", kv_offload_dir=str(tmp_path / "kv"), kv_offload_memory=2**24
    )
    for number in range(ROUNDS):
        assert run(core, f"{number}-") == wanted
    assert core._scheduler.connector.stats().counters["pagefleet_engine_kv_transfer_offload_hits_total"] > 0
    core.shutdown()
