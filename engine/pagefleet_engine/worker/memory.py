"""How many KV blocks fit: arithmetic only, the device is asked in `device`.

The pool is what the settings say, or else the share of memory that weights and activations leave.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_engine.config import CacheConfig
from pagefleet_engine.core.kv_groups import KVGroups, blocks_for_request, longest_request, num_blocks_for
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.worker.device import DeviceMemory

GIB = 1024**3

CPU_DEFAULT_BYTES = 4 * GIB
"""On a CPU the pool is no larger unless asked for (nor than `max_num_seqs` requests of the full context can fill), or
unless one such request needs more: the machine has other uses for its memory, and other replicas."""


@dataclass(frozen=True, slots=True)
class KVNeeds:
    """What requests take of the pool."""

    groups: KVGroups
    block_size: int
    chunk: int
    """Most tokens of a request in one step."""

    def blocks(self, num_tokens: int) -> int:
        """The most that a request of so many tokens holds at one time, over all groups."""
        return blocks_for_request(self.groups, num_tokens, self.block_size, self.chunk)

    def longest(self, num_blocks: int) -> int:
        """Tokens of the longest request that so many blocks hold."""
        return longest_request(self.groups, num_blocks, self.block_size, self.chunk)


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """The pool's size, and the longest request it must hold."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    blocks_per_request: int
    """Of `max_model_len` tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds, in requests of `max_model_len`; with windows, shorter ones take more for each."""
        whole = num_blocks_for(self.max_model_len, self.block_size) * self.block_size
        return self.num_blocks * whole // self.blocks_per_request

    def describe(self) -> str:
        """One line for the log."""
        at_once = self.num_blocks // self.blocks_per_request
        return (
            f"KV cache: {self.num_blocks * self.bytes_per_block / GIB:.2f} GiB, {self.num_blocks} blocks of "
            f"{self.block_size} tokens = {self.num_tokens} tokens, "
            f"{at_once} request{'' if at_once == 1 else 's'} of {self.max_model_len} tokens at once"
        )


def activation_bytes(
    arch: ModelArch, max_num_batched_tokens: int, max_num_seqs: int, itemsize: int, copies: int = 1
) -> int:
    """Rough upper bound of what one CPU step holds besides weights and KV cache.

    Per token the residual, its norm, attention's inputs and outputs and the MLP's three intermediates; for each of its
    experts the same three, a copy of its inputs and its outputs three times, once in float32, also for tokens of other
    `copies` of the model, which may all want the experts of this one; per row the logits in float32, with the copies
    that sampling makes.
    """
    attention = 2 * arch.num_heads * arch.head_dim + 2 * arch.kv.numbers
    if arch.latent is not None:  # queries as they are compared with latents, and keys and values made from some
        attention += 3 * arch.num_heads * arch.latent.spec.dim
    per_token = (4 * arch.hidden_size + attention + 3 * arch.intermediate_size) * itemsize
    if arch.altup is not None:
        # The stream, what is predicted of it, and the next one; inputs of layers, in three forms.
        widths = arch.altup.num_inputs * arch.hidden_size, arch.altup.num_layers * arch.altup.per_layer_size
        per_token += 3 * sum(widths) * itemsize
    if arch.experts is not None:
        each = (3 * arch.hidden_size + 3 * arch.experts.intermediate_size) * itemsize + 4 * arch.hidden_size
        per_token += copies * arch.experts.routing.top_k * each
    return max_num_batched_tokens * per_token + 4 * max_num_seqs * arch.vocab_size * 4


def size_kv_cache(
    config: CacheConfig, needs: KVNeeds, bytes_per_block: int, max_model_len: int, budget: int, *, exact_len: bool
) -> KVCacheSize:
    """Decide the number of blocks.

    Args:
        config: `num_kv_blocks` and `kv_cache_memory` decide if they are given, in this order.
        needs: of one request.
        bytes_per_block: over the layers of a group.
        max_model_len: longest request.
        budget: bytes to use otherwise.
        exact_len: `max_model_len` was asked for and must fit; otherwise it shrinks to what fits.

    Raises:
        ConfigError: not even one block fits, or not one request of `max_model_len`; says what to give instead.
    """
    if config.num_kv_blocks is not None:
        num_blocks, found = config.num_kv_blocks, f"num_kv_blocks is {config.num_kv_blocks}"
    elif config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // bytes_per_block
        found = f"kv_cache_memory is {_size(config.kv_cache_memory)}"
    else:
        num_blocks, found = (
            max(0, budget) // bytes_per_block,
            f"{_size(max(0, budget))} of memory are left for KV cache",
        )
    needed = needs.blocks(max_model_len)
    fits = needs.longest(num_blocks)
    if fits < 1 or (fits < max_model_len and exact_len):
        remedies = [f"give --max-model-len {fits} at most"] if fits > 0 else []
        remedies.append(_larger_pool(config, needed, needed * bytes_per_block))
        raise ConfigError(
            f"{found}, and one request of max_model_len {max_model_len} takes {needed} blocks "
            f"({_size(needed * bytes_per_block)}): {', or '.join(remedies)}"
        )
    longest = min(max_model_len, fits)
    return KVCacheSize(num_blocks, config.block_size, bytes_per_block, longest, needs.blocks(longest))


def check_free(size: KVCacheSize, free: int) -> None:
    """Raises ConfigError when the pool is larger than the memory that is left for it."""
    num_bytes = size.num_blocks * size.bytes_per_block
    if num_bytes > free:
        fits = free // size.bytes_per_block
        remedy = f"give --num-kv-blocks {fits} or --kv-cache-memory {free // 1024**2}M at most"
        raise ConfigError(
            f"a KV cache of {size.num_blocks} blocks takes {_size(num_bytes)}, {_size(free)} of memory are free: "
            f"{remedy if fits else 'not one block fits, lower --block-size'}"
        )


def memory_budget(memory: DeviceMemory, utilization: float, activations: int) -> int:
    """Bytes left for KV cache when this process may bring the device to `utilization` of its memory.

    `memory` is taken with the weights loaded. May be negative.
    """
    return int(memory.total * utilization) - (memory.total - memory.free) - activations


def cpu_budget(
    memory: DeviceMemory, utilization: float, activations: int, request_bytes: int, max_num_seqs: int
) -> int:
    """As `memory_budget`, within what a CPU engine takes unasked; `request_bytes` is a request of the full context."""
    unasked = min(CPU_DEFAULT_BYTES, max_num_seqs * request_bytes)
    return min(memory_budget(memory, utilization, activations), max(unasked, request_bytes))


def _larger_pool(config: CacheConfig, needed: int, needed_bytes: int) -> str:
    if config.num_kv_blocks is not None:
        return f"--num-kv-blocks {needed} at least"
    if config.kv_cache_memory is not None:
        return f"--kv-cache-memory {_round_up_mib(needed_bytes)}M at least"
    return "a machine with more memory (or a smaller --max-num-batched-tokens, or a higher --gpu-memory-utilization)"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 1024**2:.1f} MiB"


def _round_up_mib(num_bytes: int) -> int:
    return -(-num_bytes // 1024**2)
