"""How many blocks: arithmetic, the log line, and what to do when it is not enough."""

from __future__ import annotations

import pytest
from pagefleet_engine.config import CacheConfig
from pagefleet_engine.core.kv_groups import group_layers, num_blocks_for
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.worker.device import DeviceMemory
from pagefleet_engine.worker.memory import (
    GIB,
    KVCacheSize,
    KVNeeds,
    activation_bytes,
    check_free,
    cpu_budget,
    memory_budget,
    size_kv_cache,
)

from tests.fakes.architectures import llama_arch

MIB = 1024**2
WHOLE = KVNeeds(group_layers([None, None]), block_size=16, chunk=2048)


def size(config: CacheConfig, budget: int = 0, max_model_len: int = 64, exact_len: bool = True) -> KVCacheSize:
    return size_kv_cache(config, WHOLE, MIB, max_model_len, budget, exact_len=exact_len)


def test_the_log_line_says_size_and_concurrency() -> None:
    assert KVCacheSize(21845, 16, 192 * 1024, 2048, 128).describe() == (
        "KV cache: 4.00 GiB, 21845 blocks of 16 tokens = 349520 tokens, 170 requests of 2048 tokens at once"
    )
    assert KVCacheSize(4, 16, MIB, 50, 4).describe().endswith("1 request of 50 tokens at once")


def test_a_fixed_number_of_blocks_wins_over_bytes_and_bytes_over_what_is_free() -> None:
    assert size(CacheConfig(num_kv_blocks=10, kv_cache_memory=99 * MIB), budget=GIB).num_blocks == 10
    assert size(CacheConfig(kv_cache_memory=8 * MIB - 1), budget=GIB).num_blocks == 7
    assert size(CacheConfig(), budget=GIB + 5).num_blocks == 1024


@pytest.mark.parametrize(("num_blocks", "fits"), [(4, True), (3, False)])
def test_one_request_of_the_length_asked_for_must_fit(num_blocks: int, fits: bool) -> None:
    config = CacheConfig(num_kv_blocks=num_blocks)
    if fits:
        assert size(config, max_model_len=64).max_model_len == 64
        return
    with pytest.raises(ConfigError, match=r"num_kv_blocks is 3, .* 64 takes 4 blocks .*--max-model-len 48 at most"):
        size(config, max_model_len=64)


def test_a_length_not_asked_for_shrinks_to_what_fits() -> None:
    assert size(CacheConfig(num_kv_blocks=3), max_model_len=64, exact_len=False).max_model_len == 48
    assert size(CacheConfig(num_kv_blocks=9), max_model_len=64, exact_len=False).max_model_len == 64


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (CacheConfig(num_kv_blocks=1), "--num-kv-blocks 4 at least"),
        (CacheConfig(kv_cache_memory=3 * MIB + 5), "--kv-cache-memory 4M at least"),
        (CacheConfig(), "--gpu-memory-utilization"),
    ],
)
def test_the_remedy_names_the_setting_that_decided(config: CacheConfig, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        size(config, budget=3 * MIB)
    assert remedy in str(caught.value)
    assert "--max-model-len" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("exact_len", [True, False])
@pytest.mark.parametrize("budget", [0, -GIB, MIB - 1])
def test_without_room_for_a_block_there_is_no_length_to_offer(budget: int, exact_len: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        size(CacheConfig(), budget=budget, exact_len=exact_len)
    assert "more memory" in str(caught.value)
    assert "--max-model-len" not in str(caught.value)


def test_the_advice_given_works() -> None:
    assert size(CacheConfig(num_kv_blocks=3), max_model_len=48).max_model_len == 48
    assert size(CacheConfig(kv_cache_memory=4 * MIB), max_model_len=64).max_model_len == 64


def test_the_share_of_a_device_counts_what_is_taken_already() -> None:
    memory = DeviceMemory(total=100 * GIB, free=70 * GIB)
    assert memory_budget(memory, 0.5, 5 * GIB) == 15 * GIB
    assert memory_budget(memory, 0.1, 0) == -20 * GIB


def test_a_cpu_takes_no_more_than_it_can_use_unasked() -> None:
    memory = DeviceMemory(total=64 * GIB, free=64 * GIB)
    assert cpu_budget(memory, 0.5, 0, request_bytes=GIB, max_num_seqs=256) == 4 * GIB
    assert cpu_budget(memory, 0.5, 0, request_bytes=MIB, max_num_seqs=256) == 256 * MIB
    assert cpu_budget(memory, 0.5, 0, request_bytes=6 * GIB, max_num_seqs=256) == 6 * GIB
    assert cpu_budget(DeviceMemory(2 * GIB, 2 * GIB), 0.5, 0, request_bytes=6 * GIB, max_num_seqs=1) == GIB


def test_a_cpu_leaves_what_connectors_take_and_lets_them_tell_where_it_is_not_there() -> None:
    memory = DeviceMemory(total=8 * GIB, free=8 * GIB)
    assert memory.without(6 * GIB) == DeviceMemory(2 * GIB, 2 * GIB)
    assert memory.without(0) == memory.without(8 * GIB) == memory


def test_a_pool_larger_than_what_is_free_is_refused() -> None:
    pool = KVCacheSize(num_blocks=2048, block_size=16, bytes_per_block=MIB, max_model_len=64, blocks_per_request=4)
    check_free(pool, 2 * GIB)
    with pytest.raises(ConfigError, match=r"2.00 GiB, 3.5 MiB of memory are free: give --num-kv-blocks 3 or .* 3M at"):
        check_free(pool, 7 * MIB // 2)
    with pytest.raises(ConfigError, match=r"not one block fits, lower --block-size$"):
        check_free(pool, MIB // 2)


def test_activations_grow_with_tokens_and_rows() -> None:
    arch = llama_arch()
    base = activation_bytes(arch, 100, 10, 4)
    assert activation_bytes(arch, 200, 10, 4) - base == 100 * 4 * (
        4 * arch.hidden_size + (2 * arch.num_heads + 4 * arch.num_kv_heads) * arch.head_dim + 3 * arch.intermediate_size
    )
    assert activation_bytes(arch, 100, 11, 4) - base == 16 * arch.vocab_size


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (0, 0)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert num_blocks_for(tokens, 16) == blocks


def test_layers_with_a_window_take_only_what_is_in_it() -> None:
    """Twelve layers, of which ten see 64 tokens: the rest decides how long a request can be."""
    groups = group_layers(([64] * 5 + [None]) * 2)
    hybrid, all_layers = KVNeeds(groups, 16, 32), KVNeeds(group_layers([None] * 12), 16, 32)
    share = groups.layers_per_block / 12  # of the bytes of a block that holds every layer
    assert hybrid.blocks(4096) * share < 0.5 * all_layers.blocks(4096)
    config = CacheConfig(num_kv_blocks=hybrid.blocks(4096))
    found = size_kv_cache(config, hybrid, MIB, 4096, 0, exact_len=True)
    assert (found.max_model_len, found.blocks_per_request) == (4096, hybrid.blocks(4096))
    assert found.num_tokens == 4096
    with pytest.raises(ConfigError, match=r"4112 takes \d+ blocks .* --max-model-len 4096 at most"):
        size_kv_cache(config, hybrid, MIB, 4112, 0, exact_len=True)


def test_a_pool_must_hold_a_block_of_every_group() -> None:
    hybrid = KVNeeds(group_layers(([64] * 5 + [None]) * 2), 16, 32)
    with pytest.raises(ConfigError, match=r"num_kv_blocks is 1, .*--num-kv-blocks"):
        size_kv_cache(CacheConfig(num_kv_blocks=1), hybrid, MIB, 512, 0, exact_len=False)
