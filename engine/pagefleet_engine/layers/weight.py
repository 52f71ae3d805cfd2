"""Where a layer's tensors come from: a slot that the loader fills part by part, and that hands the whole to the layer.

A merged projection (query, key and value in one matrix) is one slot of several parts; the checkpoint holds each part
under a name of its own. A slot keeps nothing once it is full, so the layer alone decides in which form weights live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """Type and device of a model's tensors, and who computes on them."""

    dtype: torch.dtype
    device: torch.device
    use_kernels: bool
    """Norms, rotation and activation by pagefleet_kernels, as on a GPU; else by torch, faster on a CPU."""


class Weight:
    """One tensor of the model, in parts that are consecutive ranges of its rows (dimension 0)."""

    __slots__ = ("_install", "_missing", "_starts", "_whole", "part_shapes", "placement")

    def __init__(
        self, part_rows: tuple[int, ...], columns: int | None, placement: Placement, install: Callable[[Tensor], None]
    ) -> None:
        """`columns` is None for a vector. `install` gets the full tensor, once, when its last part has arrived."""
        self.part_shapes = tuple((rows,) if columns is None else (rows, columns) for rows in part_rows)
        self.placement = placement
        self._starts = tuple(sum(part_rows[:part]) for part in range(len(part_rows)))
        self._install = install
        self._missing = set(range(len(part_rows)))
        self._whole: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in its final type."""
        elements = sum(math.prod(shape) for shape in self.part_shapes)
        return elements * self.placement.dtype.itemsize

    @property
    def is_complete(self) -> bool:
        """Whether every part has arrived."""
        return not self._missing

    def fill(self, part: int, source: Tensor) -> None:
        """Copy `source`, of any floating type and on any device, into the part; each part comes once."""
        assert part in self._missing, "each part is filled once"
        assert tuple(source.shape) == self.part_shapes[part], "the loader checks shapes before it copies"
        if self._whole is None:
            rows = sum(shape[0] for shape in self.part_shapes)
            shape = (rows, *self.part_shapes[0][1:])
            self._whole = torch.empty(shape, dtype=self.placement.dtype, device=self.placement.device)
        start = self._starts[part]
        self._whole[start : start + source.shape[0]].copy_(source)
        self._missing.remove(part)
        if self.is_complete:
            whole, self._whole = self._whole, None
            self._install(whole)


class HasWeights(Protocol):
    """A layer or block with slots to fill."""

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every slot with its name relative to the layer, e.g. `qkv_proj.weight`."""
        ...


def prefixed(prefix: str, layer: HasWeights) -> Iterator[tuple[str, Weight]]:
    """The layer's slots, named from one level further up."""
    return ((f"{prefix}.{name}", weight) for name, weight in layer.weights())
