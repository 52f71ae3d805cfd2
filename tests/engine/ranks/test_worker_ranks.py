"""Workers that share a model: each holds its heads' K/V, and samples the tokens that one worker alone would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagefleet_engine.config import CacheConfig, EngineConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.request import Request
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.ranks.group import RankGroup
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.worker import device
from pagefleet_engine.worker.worker import Worker
from pagefleet_kv.config import KVTransferConfig
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.architectures import llama_arch, llama_config
from tests.fakes.ranks import on_ranks

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=4, max_tokens=8, ignore_eos=True)
PLAIN = SamplingParams(temperature=1.0, seed=9, max_tokens=8, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
Prompts = list[tuple[list[int], SamplingParams]]
PROMPTS = [(list(range(5, 25)), GREEDY), (list(range(3, 90)), SAMPLED), ([7], SAMPLED)]
PLAIN_PROMPTS = [(list(range(5, 25)), PLAIN), (list(range(3, 90)), SHORT), ([7], PLAIN)]


pytestmark = pytest.mark.usefixtures("same_threads_after")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(llama_config()))
    model = ModelConfig(model=str(folder), load_format="dummy", dtype="float32", device="cpu", num_threads=1)
    return EngineConfig(model=model, scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8))


def worker(config: EngineConfig, ranks: RankGroup | None = None) -> Worker:
    communicators = None if ranks is None else Communicators(tensor=ranks)
    return Worker(config, Path(config.model.model), llama_arch(), communicators=communicators)


def generate(worker: Worker, config: EngineConfig, prompts: Prompts) -> dict[str, list[int]]:
    kv_cache = KVCache(worker.cache.num_blocks, worker.cache.block_size)
    scheduler = Scheduler(config.scheduler, kv_cache, ModelLimits(worker.cache.max_model_len, 300))
    output: dict[str, list[int]] = {f"r{index}": [] for index in range(len(prompts))}
    for name, (prompt, sampling) in zip(output, prompts, strict=True):
        scheduler.add(Request(name, prompt, sampling, (2,), PrefixScope("test")))
    while scheduler.has_work:
        plan = scheduler.schedule()
        for update in scheduler.update(plan, worker.launch(plan).result()):
            assert update.failure is None
            output[update.request_id] += update.new_token_ids
    return output


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_sample_the_tokens_of_one(config: EngineConfig, size: int) -> None:
    config = replace(config, cache=CacheConfig(num_kv_blocks=64))
    expected = generate(worker(config), config, PROMPTS)
    assert on_ranks(size, lambda ranks: generate(worker(config, ranks), config, PROMPTS)) == [expected] * size


def test_plain_rows_are_sampled_without_the_logits_of_others(config: EngineConfig) -> None:
    config = replace(config, cache=CacheConfig(num_kv_blocks=64))
    expected, widest = generate(worker(config), config, PLAIN_PROMPTS), []

    def work(ranks: RankGroup) -> dict[str, list[int]]:
        shared = worker(config, ranks)
        gather = ranks.all_gather

        def watched(x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
            widest.append(sum(widths))
            return gather(x, widths)

        head = shared._model.divided_head
        assert head is not None
        assert head.part is not None
        head.part = replace(head.part, gather=watched)
        return generate(shared, config, PLAIN_PROMPTS)

    assert on_ranks(2, work) == [expected] * 2
    assert max(widest) == 4  # the likeliest token and its score, of two ranks


def test_ranks_hold_the_same_blocks_of_fewer_heads(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each has room for differs; a machine's memory is divided among its ranks."""
    free = iter([64 * 2**20, 48 * 2**20, *[40 * 2**20] * 20])
    monkeypatch.setattr(device, "free_bytes", lambda *_: next(free))
    alone = worker(replace(config, cache=CacheConfig(num_kv_blocks=64))).cache
    shared = on_ranks(2, lambda ranks: worker(config, ranks).cache)
    assert shared[0] == shared[1]
    assert 2 * shared[0].bytes_per_block == alone.bytes_per_block


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"execution": ExecutionConfig(compile=True)}, "leave compile out"),
        (
            {"kv_transfer": KVTransferConfig(kv_connector="p2p", kv_data_plane="nccl")},
            "give kv_role prefill or decode",
        ),
    ],
)
def test_what_does_not_go_over_ranks_is_refused(config: EngineConfig, settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^tensor_parallel_size is 2, and .*{named}$"):
        replace(config, parallel=Parallelism(tensor_parallel_size=2), **settings)  # type: ignore[arg-type]


def test_ranks_pass_k_v_by_nccl_one_way_whatever_machines_they_are_on(config: EngineConfig) -> None:
    by_nccl = KVTransferConfig(kv_connector="p2p", kv_data_plane="nccl", kv_role="prefill")
    ranks = replace(config, parallel=Parallelism(tensor_parallel_size=2), kv_transfer=by_nccl)
    assert ranks.carries
    assert ranks.takes_unasked
    assert not replace(config, kv_transfer=by_nccl).takes_unasked
    for parallel in (
        Parallelism(tensor_parallel_size=2, nnodes=2, master_addr="10.0.0.1"),
        Parallelism(distributed_executor_backend="ray"),
    ):
        assert replace(ranks, parallel=parallel).carries


def test_copies_that_share_experts_pass_k_v_by_nccl_one_way_from_processes_of_their_own(config: EngineConfig) -> None:
    by_nccl = KVTransferConfig(kv_connector="p2p", kv_data_plane="nccl")
    shared = Parallelism(data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"^copies share experts, and by .*: give kv_role prefill or decode$"):
        replace(config, parallel=shared, kv_transfer=by_nccl)
    one_way = replace(config, parallel=shared, kv_transfer=replace(by_nccl, kv_role="decode"))
    assert one_way.carries
    assert one_way.has_processes
    assert not replace(config, parallel=shared).has_processes
    assert not replace(config, parallel=Parallelism(data_parallel_size=2), kv_transfer=by_nccl).has_processes
