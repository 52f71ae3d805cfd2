"""Where a layer's tensors come from: a slot that the loader fills part by part, and that hands the whole to the layer.

A merged projection (query, key and value in one matrix) is one slot of several parts; the checkpoint holds each part
under a name of its own, of which a rank may need some rows or columns alone. A slot keeps nothing once it is full, so
the layer alone decides in which form weights live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

import torch
from pagefleet_kernels.native.attention import DTYPES
from pagefleet_kernels.native.blocks import new_memory
from pagefleet_kernels.native.library import Library
from torch import Tensor

from pagefleet_engine.layers.quantization_scheme import Quantization, Scheme
from pagefleet_engine.layers.shard import Shard, shard_of
from pagefleet_engine.ranks.group import Alone, RankGroup
from pagefleet_engine.ranks.parallelism import All2All
from pagefleet_engine.ranks.turns import Halves

MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
"""Layers that hold several of the checkpoint's in one matrix, in this order."""


class MovingExperts(Protocol):
    """Collects experts that move between ranks, layer by layer as they are built."""

    @property
    def num_redundant(self) -> int:
        """Slots of a layer beyond one for each expert."""
        ...

    def add(self, layer: object) -> None:
        """`layers.moe.balanced.BalancedExperts`, of which this module knows nothing."""
        ...


class InputObserver(Protocol):
    """Wants to know what a model's plain matrices multiply."""

    def watch(self, names: Sequence[str]) -> Callable[[Tensor], None]:
        """What gets the inputs [T, I] of each product of the matrix that the checkpoint has under these names."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Type and device of a model's tensors, who computes on them, and which of them are quantized."""

    dtype: torch.dtype
    device: torch.device
    use_kernels: bool
    """Norms, rotation and activation by pagefleet_kernels, as on a GPU; else by torch, faster on a CPU."""
    quantization: Quantization | None = None
    path: str = ""
    """Name of the layer that is placed, as in `model.layers.0.mlp`."""
    traceable: bool = False
    """For torch.compile: nothing but torch's own operations, on matrices as they are. Not together with kernels."""
    tensor: RankGroup = field(default_factory=Alone)
    """The ranks that layers are divided among."""
    sequence_parallel: bool = False
    """Each of them adds up and normalises tokens of its own."""
    data: RankGroup = field(default_factory=Alone)
    """The copies of the model that step together, by `ModelArch.steps_together` or for experts that they share."""
    halves: Halves | None = None
    """Where steps of these copies are computed in halves."""
    expert_parallel: bool = False
    """Ranks have some experts whole, not a part of each."""
    all2all_backend: All2All = "allgather_reducescatter"
    """How rows get to experts of other copies of the model."""
    balance: MovingExperts | None = None
    """Where experts move between ranks."""
    layers: range | None = None
    """Of the model, those of this rank's stage; the first has the embedding besides, the last the head. None: all."""
    machine: RankGroup | None = None
    """The ranks that load at the same time and share its memory; None: those of `tensor`."""
    transposed: bool = False
    """The checkpoint's matrices have a row for each input."""
    native: Library | None = None
    """The compiled kernels of a CPU."""
    observer: InputObserver | None = None
    """Who is told what matrices multiply, on a CPU and without `native`."""

    @property
    def native_layers(self) -> Library | None:
        """The same where norms and rotation are theirs: not traced, in a type that they take."""
        return None if self.traceable or self.dtype not in DTYPES else self.native

    def own_layers(self, num_layers: int) -> range:
        """Those of a model of so many that this rank's stage has."""
        return range(num_layers) if self.layers is None else self.layers

    def within(self, name: str) -> Placement:
        """The placement of a layer inside this one; of itself where the checkpoint has no name for it."""
        return self if not name else replace(self, path=f"{self.path}.{name}" if self.path else name)

    def scheme(self, num_parts: int) -> Scheme | None:
        """How the linear layer at `path` is quantized; it has `num_parts` projections of the checkpoint in it.

        Raises:
            ModelLoadError: these are quantized in different ways.
        """
        return None if self.quantization is None else self.quantization.scheme(self.part_names(num_parts))

    def part_names(self, num_parts: int) -> list[str]:
        """The checkpoint's names for the layer at `path`, which has so many of its projections in it."""
        *parents, layer = self.path.split(".")
        return [".".join((*parents, part)) for part in parts_of(layer, num_parts)]


def parts_of(layer: str, num_parts: int) -> tuple[str, ...]:
    """The checkpoint's names for a layer of so many parts."""
    parts = MERGED[layer] if num_parts > 1 else (layer,)
    assert len(parts) == num_parts, "a merged layer has a part for each of its sources"
    return parts


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays in memory of a tensor that was installed."""

    dtype: torch.dtype
    is_copy: bool = False
    """Nothing of the tensor's own memory is used once `install` returns."""
    numbers: int | Fraction = 1
    """Of that type, for each number of the tensor."""


class UnusableTensorError(Exception):
    """A tensor's numbers cannot be used; the message says why and what to do, in words that follow its name."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the numbers of a slot are, where not any will do."""

    check: Callable[[Tensor], None]
    """Raises UnusableTensorError where those of a part cannot be."""
    stand_in: Callable[[tuple[int, ...]], Tensor]
    """What a tensor of that shape holds in a model of random weights."""


class Weight:
    """One tensor of the model, in parts that are consecutive ranges of its rows (dimension 0).

    Each part is a tensor of the checkpoint, or what a rank needs of one.
    """

    __slots__ = (
        "_flat_shapes",
        "_install",
        "_missing",
        "_starts",
        "_whole",
        "content",
        "device",
        "dtype",
        "kept",
        "part_shapes",
        "shards",
        "stored_shapes",
    )

    def __init__(
        self,
        part_rows: tuple[int | Shard, ...],
        columns: int | Shard | tuple[Shard, ...] | None,
        placement: Placement,
        install: Callable[[Tensor], None],
        *,
        dtype: torch.dtype | None = None,
        kept: Kept | None = None,
    ) -> None:
        """`columns` is None for a vector, and a tuple where each part has its own; see `parts`. `install` gets the full
        tensor, once, when its last part has arrived.

        `dtype`: what is filled and installed, the placement's unless given. `kept`: what the layer makes of it, if
        not just that.
        """
        self.content: Content | None = None
        if isinstance(columns, tuple):
            of_parts: list[tuple[Shard, ...]] = [(one,) for one in columns]
        else:
            of_parts = [() if columns is None else (shard_of(columns),)] * len(part_rows)
        self.shards = tuple((shard_of(rows), *own) for rows, own in zip(part_rows, of_parts, strict=True))
        """Per part: what is kept of each dimension of the checkpoint's tensor."""
        self._flat_shapes = tuple(tuple(shard.whole for shard in shards) for shards in self.shards)
        self.stored_shapes = self._flat_shapes
        """Per part: the shape of the checkpoint's tensor."""
        self.part_shapes = tuple(tuple(shard.size for shard in shards) for shards in self.shards)
        self.dtype = dtype or placement.dtype
        self.kept = kept or Kept(self.dtype)
        self.device = placement.device
        sizes = [math.prod(shape) for shape in self.part_shapes]
        self._starts = tuple(sum(sizes[:part]) for part in range(len(sizes)))
        self._install = install
        self._missing = set(range(len(part_rows)))
        self._whole: Tensor | None = None

    def holding(self, content: Content | None) -> Weight:
        """The same, for such numbers alone."""
        self.content = content
        return self

    def stored_as(self, shape: tuple[int, ...]) -> Weight:
        """The same; the checkpoint has its only part in a tensor of that shape, of as many numbers."""
        assert len(self.shards) == 1, "a tensor is one part"
        assert math.prod(shape) == math.prod(self._flat_shapes[0]), "rows are divided, not changed"
        self.stored_shapes = (shape,)
        return self

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor as the layer keeps it."""
        return math.ceil(math.prod(self.shape) * self.kept.dtype.itemsize * self.kept.numbers)

    @property
    def is_complete(self) -> bool:
        """Whether every part has arrived."""
        return not self._missing

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor; of one dimension where parts have different columns."""
        if len({shape[1:] for shape in self.part_shapes}) > 1:
            return (sum(math.prod(shape) for shape in self.part_shapes),)
        return (sum(shape[0] for shape in self.part_shapes), *self.part_shapes[0][1:])

    def room(self, part: int, make: Callable[[Weight], Tensor] | None = None) -> Tensor:
        """Where the part's values belong: contiguous, of `dtype`, on `device`. Say `arrived` when they are there.

        `make` gives the memory for the whole tensor, new memory unless given.
        """
        assert part in self._missing, "each part is filled once"
        if self._whole is None:
            self._whole = make(self) if make is not None else new_tensor(self)
        return self._of_part(self._whole, part)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """The parts of the tensor that was installed."""
        return [self._of_part(whole, part) for part in range(len(self.part_shapes))]

    def _of_part(self, whole: Tensor, part: int) -> Tensor:
        shape = self.part_shapes[part]
        return whole.view(-1).narrow(0, self._starts[part], math.prod(shape)).view(shape)

    def arrived(self, part: int) -> Tensor | None:
        """The part's values are in its room; the last part installs the tensor.

        Returns the whole tensor where it was installed and copied: nobody needs its memory any more.

        Raises:
            UnusableTensorError: the values are not such as the slot takes.
        """
        if self.content is not None and self._whole is not None:
            self.content.check(self._of_part(self._whole, part))
        self._missing.remove(part)
        if not self.is_complete:
            return None
        whole, self._whole = self._whole, None
        assert whole is not None, "values arrive in the room that was made for them"
        self._install(whole)
        return whole if self.kept.is_copy else None

    def fill(self, part: int, source: Tensor) -> None:
        """Copy what is kept of `source`, the checkpoint's tensor in any type that converts and on any device, into the
        part; each part comes once."""
        room = self.room(part)
        assert same_shape(source.shape, self.stored_shapes[part]), "the loader checks shapes before it copies"
        kept = source.reshape(self._flat_shapes[part])
        for dimension, shard in enumerate(self.shards[part]):
            if shard.is_all:
                continue
            kept = torch.cat([kept.narrow(dimension, r.start, len(r)) for r in shard.ranges], dimension)
        room.copy_(kept)
        self.arrived(part)


def new_tensor(weight: Weight) -> Tensor:
    """Memory for all of a weight."""
    if weight.device.type != "cpu":
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    return new_memory(math.prod(weight.shape) * weight.dtype.itemsize).view(weight.dtype).view(weight.shape)


def same_shape(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes differ in dimensions of size 1 at most, which checkpoints write at will."""
    return [size for size in one if size != 1] == [size for size in other if size != 1]


class HasWeights(Protocol):
    """A layer or block with slots to fill."""

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every slot with its name relative to the layer, e.g. `qkv_proj.weight`."""
        ...


def prefixed(prefix: str, layer: HasWeights) -> Iterator[tuple[str, Weight]]:
    """The layer's slots, named from one level further up, or from the same where there is no prefix."""
    return ((f"{prefix}.{name}" if prefix else name, weight) for name, weight in layer.weights())
