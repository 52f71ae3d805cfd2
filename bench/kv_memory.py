"""KV memory of one long request where some layers have a window: with groups of layers, and as if all saw everything.

No model and no device: the engine's own block accounting computes a prompt in chunks and then decodes, and what it
holds is counted in bytes of bf16.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.kv_groups import KVGroups, blocks_for_request, group_layers, num_blocks_for
from pagefleet_engine.core.request import Request
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

from bench.report import write_report

BLOCK_SIZE = 16
BYTES_PER_VALUE = 2
DECODED_TOKENS = 64
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model its KV cache depends on."""

    num_layers: int
    window: int
    full_every: int
    """Every so many layers the last one sees everything."""
    num_kv_heads: int
    head_dim: int

    @property
    def windows(self) -> list[int | None]:
        """One per layer."""
        return [
            None if layer % self.full_every == self.full_every - 1 else self.window for layer in range(self.num_layers)
        ]

    @property
    def bytes_per_layer_block(self) -> int:
        """Of keys and values, for the tokens of one block in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * BLOCK_SIZE * BYTES_PER_VALUE


SHAPES = {
    "gemma-3-27b": Shape(62, 1024, 6, 16, 128),
    "gemma-3-4b": Shape(34, 1024, 6, 4, 256),
    "gemma-2-9b": Shape(42, 4096, 2, 8, 256),
}
CONTEXTS = {"gemma-3-27b": (8, 32, 128), "gemma-3-4b": (8, 32, 128), "gemma-2-9b": (8,)}
"""In units of 1,024 tokens, up to the model's context."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks of one request."""

    peak: int
    decoding: int


def hold(groups: KVGroups, num_tokens: int, chunk: int) -> Holding:
    """Compute a prompt of `num_tokens` less what is decoded after it, and count the blocks that are held."""
    cache = KVCache(blocks_for_request(groups, num_tokens, BLOCK_SIZE, chunk), BLOCK_SIZE, True, groups, chunk)
    request = Request("long", range(num_tokens - DECODED_TOKENS), SamplingParams(), (0,), PrefixScope("bench"))
    if cache.admit(request, 0) is None:
        raise RuntimeError("a pool of the request's own size has no room for it")
    peak = 0
    while request.num_computed_tokens < num_tokens:
        num_new = min(chunk, request.num_tokens - request.num_computed_tokens)
        if cache.grow(request, num_new) is None:
            raise RuntimeError("a pool of the request's own size has no room for it")
        request.num_computed_tokens += num_new
        cache.publish_computed(request, request.num_computed_tokens)
        peak = max(peak, cache.num_blocks - cache.num_free_blocks)
        if request.num_computed_tokens == request.num_tokens < num_tokens:
            request.token_ids.append(0)
    cache.check_integrity([request])
    return Holding(peak, cache.num_blocks - cache.num_free_blocks)


def measure(shape: Shape, num_tokens: int, chunk: int) -> dict[str, float]:
    """Return GiB of one request, and the share that groups save of what it would hold without them."""
    groups = group_layers(shape.windows)
    held = hold(groups, num_tokens, chunk)
    bytes_per_block = groups.layers_per_block * shape.bytes_per_layer_block
    plain = num_blocks_for(num_tokens, BLOCK_SIZE) * shape.num_layers * shape.bytes_per_layer_block
    return {
        "all_layers_full_gib": round(plain / GIB, 3),
        "decoding_gib": round(held.decoding * bytes_per_block / GIB, 3),
        "peak_in_prompt_gib": round(held.peak * bytes_per_block / GIB, 3),
        "saved_decoding": round(1 - held.decoding * bytes_per_block / plain, 3),
        "saved_peak": round(1 - held.peak * bytes_per_block / plain, 3),
    }


def main() -> None:
    """Print a table; with --json, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    chunk = SchedulerConfig().max_num_batched_tokens
    parser.add_argument("--chunk", type=int, default=chunk, help="tokens per step (default: %(default)s, the engine's)")
    parser.add_argument("--json", metavar="PATH", help="write the figures with machine, commit and command")
    options = parser.parse_args()
    print(f"GiB of KV of one request, bf16, blocks of {BLOCK_SIZE} tokens, prompt in chunks of {options.chunk}")
    print(f"{'model':<14}{'context':>9}{'no groups':>11}{'decoding':>10}{'peak':>8}{'saved':>8}{'at peak':>9}")
    models = {}
    for name, shape in SHAPES.items():
        groups = group_layers(shape.windows)
        contexts = {}
        for thousands in CONTEXTS[name]:
            figures = measure(shape, thousands * 1024, options.chunk)
            contexts[f"{thousands}k"] = figures
            sizes = (
                f"{figures['all_layers_full_gib']:>11}{figures['decoding_gib']:>10}{figures['peak_in_prompt_gib']:>8}"
            )
            print(
                f"{name:<14}{f'{thousands}k':>9}{sizes}{figures['saved_decoding']:>8.0%}{figures['saved_peak']:>9.0%}"
            )
        models[name] = {
            "groups": len(groups),
            "layers_per_block": groups.layers_per_block,
            "padding_share": round(groups.padding_share, 3),
            "contexts": contexts,
        }
    if options.json:
        write_report(options.json, "kv_memory", {"block_size": BLOCK_SIZE, "chunk": options.chunk, "models": models})


if __name__ == "__main__":
    main()
