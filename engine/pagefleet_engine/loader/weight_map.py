"""From a checkpoint's tensor names to the model's slots.

Slots are named as Hugging Face names tensors, except where several are merged into one:

    self_attn.{q,k,v}_proj.*   parts 0, 1, 2 of   self_attn.qkv_proj.*
    mlp.{gate,up}_proj.*       parts 0, 1 of      mlp.gate_up_proj.*
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagefleet_engine.layers.shard import Shard, shard_of
from pagefleet_engine.layers.weight import Weight, parts_of

_IGNORABLE = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".attn.bias",  # GPT-2's causal mask, and what is hidden by it
    ".attn.masked_bias",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".output_scale",
    ".g_idx",  # of layers that are elsewhere; one's own is looked at
    ".weight_shape",
    ".input_global_scale",  # of inputs in 4 bits, which are taken as they are
)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one checkpoint tensor goes."""

    weight: Weight
    part: int
    is_own: bool = False
    """Whether the tensor holds no more than what is kept of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        return self.own_shape if self.is_own else self.weight.stored_shapes[self.part]

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of what is kept of it."""
        return self.weight.part_shapes[self.part]

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What is kept of each of its dimensions."""
        return tuple(map(shard_of, self.own_shape)) if self.is_own else self.weight.shards[self.part]


def weight_map(weights: Iterable[tuple[str, Weight]]) -> dict[str, Destination]:
    """Every tensor that a checkpoint of the model must hold, by name."""
    destinations = {}
    for name, weight in weights:
        *path, layer, kind = name.split(".")
        for part, source in enumerate(parts_of(layer, len(weight.part_shapes))):
            destinations[".".join((*path, source, kind))] = Destination(weight, part)
    return destinations


def is_ignorable(name: str, passed_over: tuple[str, ...]) -> bool:
    """Tensors that some checkpoints carry and no model needs.

    Rotary tables, scales of a quantized attention that is not used, and what begins with one of `passed_over`.
    """
    return name.endswith(_IGNORABLE) or name.startswith(passed_over)
