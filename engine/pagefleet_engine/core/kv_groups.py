"""Which layers share block tables: one group for those that see the whole context, more for those with a window.

Every block of the pool has one size: it holds `layers_per_block` layers, and belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose K/V of one token lies in the same block."""

    layers: tuple[int, ...]
    window: int | None
    """Tokens that each token sees, itself included; None for all."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """All layers of a model, each in one group."""

    groups: tuple[KVGroup, ...]
    layers_per_block: int
    """At least the number of layers of the largest group; the rest of a smaller group's block is not used."""

    def __len__(self) -> int:
        return len(self.groups)

    def place(self, layer: int) -> tuple[int, int]:
        """The layer's group, and its index within that group's blocks."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise IndexError(f"layer {layer} is in no group")


def group_layers(windows: Sequence[int | None]) -> KVGroups:
    """Group layers by their windows (one per layer)."""
    layers = tuple(range(len(windows)))
    window = windows[0] if len(set(windows)) == 1 else None
    return KVGroups((KVGroup(layers, window),), len(layers))
