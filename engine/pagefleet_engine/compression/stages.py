"""A model layer by layer, each as a stage of a pipeline of its own: so no more than one is in memory.

Shapes: T tokens, D hidden size, S sequences, B blocks of a sequence, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from pagefleet_kernels.layout import KVLayout
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep, BatchGeometry, Pages
from pagefleet_engine.attention.torch_backend import TorchBackend
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization_scheme import Quantization
from pagefleet_engine.layers.weight import InputObserver, Placement, Weight
from pagefleet_engine.loader.checkpoint import TensorFile, checkpoint_files
from pagefleet_engine.loader.load import checkpoint_dtype, foreign_names
from pagefleet_engine.loader.safetensors import Reading, fill_from_safetensors, layout_of
from pagefleet_engine.loader.weight_map import Destination, weight_map
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.model import Model, build_model

_BLOCK_SIZE = 16
_BATCH_TOKENS = 2048
_LOGIT_ROWS = 256
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
KV_SCALES = (".k_scale", ".v_scale")
"""How their names end."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that go through a layer together."""

    token_ids_T: Tensor
    """int64"""
    lengths: list[int]

    def positions(self) -> Tensor:
        """Of each token in its sequence, int64 [T]."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def geometry(self) -> BatchGeometry:
        """Blocks follow each other, sequence by sequence."""
        counts = [-(-length // _BLOCK_SIZE) for length in self.lengths]
        firsts = list(itertools.accumulate(counts, initial=0))
        table_SB = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        slots = []
        for row, (first, count, length) in enumerate(zip(firsts, counts, self.lengths, strict=False)):
            table_SB[row, :count] = torch.arange(first, first + count)
            slots.append(torch.arange(first * _BLOCK_SIZE, first * _BLOCK_SIZE + length))
        return BatchGeometry(
            query_start_loc_S1=torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32),
            seq_lens_S=torch.tensor(self.lengths, dtype=torch.int32),
            block_tables=(table_SB,),
            slot_mappings=(torch.cat(slots),),
            max_query_len=max(self.lengths),
            query_lens=list(self.lengths),
            seq_lens=list(self.lengths),
        )

    @property
    def num_blocks(self) -> int:
        """That the geometry takes."""
        return sum(-(-length // _BLOCK_SIZE) for length in self.lengths)


def in_batches(sequences: Iterable[Sequence[int]]) -> list[Batch]:
    """Sequences in their order, as many in a batch as are not too many tokens."""
    batches: list[list[Sequence[int]]] = []
    room = 0
    for sequence in sequences:
        if not batches or len(sequence) > room:
            batches.append([])
            room = _BATCH_TOKENS
        batches[-1].append(sequence)
        room -= len(sequence)
    return [
        Batch(torch.tensor(list(itertools.chain(*batch))), [len(sequence) for sequence in batch]) for batch in batches
    ]


class Stages:
    """Reads and builds one layer of a model in a folder after another."""

    def __init__(self, folder: Path, arch: ModelArch, dtype: torch.dtype) -> None:
        """`dtype`: of what is computed. Raises ModelLoadError for a damaged checkpoint, and for a model whose layers
        need each other's keys and values."""
        if arch.altup is not None or arch.num_kv_shared_layers:
            raise ModelLoadError(
                f"{folder}: layers of {arch.model_type} are not computed one by one: this is not quantized"
            )
        self.arch, self._folder = arch, folder
        self.files = [TensorFile(path, wanted) for path, wanted in checkpoint_files(folder).items()]
        self.stored_dtype = checkpoint_dtype("auto", arch.dtype)
        """Of the checkpoint, and of scales."""
        self._place = Placement(dtype, torch.device("cpu"), use_kernels=False)

    def placement(self, layer: int | None, quantization: Quantization | None = None) -> Placement:
        """Of a layer, and of what stands before the first or behind the last; None: of all."""
        layers = None if layer is None else range(layer, layer + 1)
        return replace(self._place, layers=layers, quantization=quantization)

    def shapes(self, quantization: Quantization | None = None) -> dict[str, tuple[int, ...]]:
        """Of each tensor of a checkpoint, by our name.

        Raises:
            ModelLoadError: what is to be quantized cannot be.
        """
        model = build_model(self.arch, self.placement(None, quantization))
        return {name: place.shape for name, place in weight_map(model.weights()).items()}

    def stored_names(self, quantization: Quantization | None = None) -> dict[str, str]:
        """The checkpoint's names of the model's tensors, by ours; and those of scales of keys and values."""
        stored, ours = {name for file in self.files for name in file.names}, self.shapes()
        layout = layout_of(stored, ours)
        scales = [name for name in self.shapes(quantization) if name.endswith(KV_SCALES)]
        return {name: layout.stored_name(name) for name in (*ours, *scales)}

    def kv_scale_names(self, layer: int, quantization: Quantization) -> list[str]:
        """Of a layer's scales of keys and values, by our names; none where it is not quantized so."""
        model = build_model(self.arch, self.placement(layer, quantization))
        return [name for name in weight_map(model.weights()) if name.endswith(KV_SCALES)]

    def read(self, layer: int) -> dict[str, Tensor]:
        """The layer's tensors by our names, in the checkpoint's type.

        Raises:
            ModelLoadError: they are missing, of another form, or no numbers.
        """
        place = replace(self.placement(layer), dtype=self.stored_dtype)
        tensors: dict[str, Tensor] = {}
        # As they are stored: the layer's own slots put rows in another order where it wants them so.
        destinations = {
            name: Destination(_whole(place, own.shape, own.weight.dtype, partial(tensors.__setitem__, name)), 0)
            for name, own in weight_map(build_model(self.arch, place).weights()).items()
        }
        fill_from_safetensors(
            self._folder,
            destinations,
            self.arch.tie_word_embeddings,
            foreign=foreign_names(self.arch, place),
            reading=Reading(self.files),
        )
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise ModelLoadError(f"{self._folder}: {name} holds what is no finite number: download the model again")
        return tensors

    def build(
        self,
        layer: int,
        tensors: Mapping[str, Tensor],
        quantization: Quantization | None = None,
        observer: InputObserver | None = None,
    ) -> Model:
        """The layer with these tensors, of which it may have more than it needs."""
        place = replace(self.placement(layer, quantization), observer=observer)
        model = build_model(self.arch, place)
        for name, destination in weight_map(model.weights()).items():
            destination.weight.fill(destination.part, tensors[name])
        return model

    def run(
        self,
        model: Model,
        entering: Sequence[Tensor],
        batches: Sequence[Batch],
        *,
        kv_dtype: torch.dtype | None = None,
        largest: LargestKV | None = None,
    ) -> list[Tensor]:
        """What a layer makes of what entered it, batch by batch: of tokens, or of hidden states [T, D].

        `kv_dtype`: of what is kept of tokens, None: the model's. `largest`: who looks at it.
        """
        kv, groups = model.arch.kv, group_layers(model.arch.windows, chunked=model.arch.chunked)
        num_blocks = max(batch.num_blocks for batch in batches)
        layout = KVLayout(num_blocks, groups.layers_per_block, kv.heads, _BLOCK_SIZE, kv.dim, vectors=kv.vectors)
        backend = TorchBackend(torch.zeros(layout.shape, dtype=kv_dtype or self._place.dtype), layout, groups)
        left = []
        for tensor, batch in zip(entering, batches, strict=True):
            step: AttentionStep = backend.begin(batch.geometry())
            if largest is not None:
                step = _WatchedStep(step, largest)
            left.append(model.forward(tensor.clone(), batch.positions(), step))
        return left


@dataclass(slots=True)
class LargestKV:
    """The largest key and the largest value of a layer that were seen; the sign does not count."""

    k: float = 0.0
    v: float = 0.0

    def scales(self) -> tuple[float, float]:
        """By which all that was seen fits e4m3; of latents there are no values, and their scale counts for nothing."""
        k, v = (one / _LARGEST if one > 0.0 else 1.0 for one in (self.k, self.v))
        return k, v


class _WatchedStep:
    """Implements `AttentionStep`."""

    def __init__(self, step: AttentionStep, largest: LargestKV) -> None:
        self._step, self._largest = step, largest

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See AttentionStep."""
        self._largest.k = max(self._largest.k, _largest_of(k_TKH))
        if v_TKH is not None:
            self._largest.v = max(self._largest.v, _largest_of(v_TKH))
        self._step.write(spec, k_TKH, v_TKH)

    def pages(self, spec: AttentionSpec) -> Pages:
        """See AttentionStep."""
        return self._step.pages(spec)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See AttentionStep."""
        return self._step.attend(spec, q_TNH)


def _largest_of(numbers: Tensor) -> float:
    """Infinite also where one is no number, which no comparison would keep."""
    return float(numbers.abs().nan_to_num(nan=math.inf, posinf=math.inf).amax())


def _whole(place: Placement, shape: tuple[int, ...], dtype: torch.dtype, take: Callable[[Tensor], None]) -> Weight:
    """A slot for a tensor of the checkpoint that hands it on as it is."""
    flat = Weight((math.prod(shape),), None, place, lambda tensor: take(tensor.view(shape)), dtype=dtype)
    return flat.stored_as(shape)


def negative_log_likelihood(model: Model, hidden: Sequence[Tensor], batches: Sequence[Batch]) -> float:
    """Of each token under those before it in its sequence, the mean. `hidden`: behind the last layer."""
    total, count = 0.0, 0
    for hidden_TD, batch in zip(hidden, batches, strict=True):
        # The last token of a sequence predicts nothing that is known, and the first is predicted by nothing.
        ends_S = torch.tensor(batch.lengths).cumsum(0)
        predicts_T = torch.ones(len(hidden_TD), dtype=torch.bool)
        predicts_T[ends_S - 1] = False
        rows_SD, expected_S = hidden_TD[predicts_T], batch.token_ids_T[1:][predicts_T[:-1]]
        for part_SD, part_S in zip(
            torch.split(rows_SD, _LOGIT_ROWS), torch.split(expected_S, _LOGIT_ROWS), strict=True
        ):
            total += float(F.cross_entropy(model.logits(part_SD).float(), part_S, reduction="sum"))
        count += len(expected_S)
    return total / count
