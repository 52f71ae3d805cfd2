"""From a model folder to a model that can run, and which floating type it computes in."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pagefleet_download.manifest import streamed_from
from pagefleet_protocol.model_config.gguf_names import HEAD
from torch import Tensor

from pagefleet_engine.config import STREAMED, DType, LoadFormat
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.quantization.form import Form, describe_forms, form_of
from pagefleet_engine.layers.quantization_scheme import STORAGE, BlockScheme
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.checkpoint import TensorFile, TensorSource
from pagefleet_engine.loader.memory import check_memory, free_bytes, weight_bytes
from pagefleet_engine.loader.safetensors import Count, ForeignNames, Reading, count_for_nobody, fill_from_safetensors
from pagefleet_engine.loader.sharded import OwnShard, check_whole, kept_alone, shard_files
from pagefleet_engine.loader.weight_map import Destination, weight_map
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.model import Model, build_model
from pagefleet_engine.ranks.group import Alone

_log = logging.getLogger(__name__)
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHECKPOINT_TYPES = ("float64", *_TYPES)
_STANDARD_DEVIATION = 0.02
# Numbers of quantized matrices have this deviation, within the range of either format, and their scales undo it.
_STORED_DEVIATION = 32.0
# The code of 2^-7, which gives random numbers of MXFP4 that deviation.
_MXFP4_SCALE = 120
# Normalised inputs are rarely larger than 8.
_INPUT_SCALE = 8.0 / 127.0


def fill_at_random(destinations: Mapping[str, Destination], seed: int, count: Count = count_for_nobody) -> None:
    """Fill every slot: matrices and biases normal around 0, norms 1; made where the weights are, as a GPU is faster.

    The same seed gives the same weights on any machine with the same kind of device, and on each rank its part of them:
    numbers depend on the tensor's name, not on which others are filled.
    """
    sizes = [math.prod(one.own_shape) * one.weight.dtype.itemsize for one in destinations.values()]
    done, total = itertools.accumulate(sizes), sum(sizes)
    for name, destination in destinations.items():
        content = destination.weight.content
        values = _at_random(name, destination, seed) if content is None else content.stand_in(destination.shape)
        destination.weight.fill(destination.part, values)
        count(next(done), total)


def _at_random(name: str, destination: Destination, seed: int) -> Tensor:
    device, shape, dtype = destination.weight.device, destination.shape, destination.weight.dtype
    kind = name.rpartition(".")[2]
    is_norm = name.endswith("norm.weight") or (kind == "weight" and len(shape) == 1)
    if is_norm or kind in ("k_scale", "v_scale"):
        return torch.ones(shape, device=device)
    if kind == "input_scale":
        return torch.full(shape, _INPUT_SCALE, device=device)
    if "scale" in kind:
        scale = _MXFP4_SCALE if dtype == torch.uint8 else _STANDARD_DEVIATION / _STORED_DEVIATION
        return torch.full(shape, scale, device=device)
    own_seed = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(own_seed))
    if dtype in (torch.uint8, torch.int32):
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype, device=device, generator=generator)
    deviation = _STORED_DEVIATION if dtype in STORAGE.values() else _STANDARD_DEVIATION
    return torch.empty(shape, device=device).normal_(0.0, deviation, generator=generator).clamp_(-127.0, 127.0)


@torch.inference_mode()
def load_model(
    folder: Path,
    arch: ModelArch,
    placement: Placement,
    form: LoadFormat | OwnShard,
    seed: int,
    count: Count = count_for_nobody,
) -> Model:
    """Build the model and fill it: from the folder's safetensors files, wherever it says that they are, from a rank's
    own, or for `dummy` with random weights of `seed`.

    What is quantized is up to the arch, not the placement. `count` is called as weights come.

    Raises:
        ModelLoadError: the weights are missing, damaged, of another model, or do not fit in memory.
    """
    placement = replace(placement, quantization=arch.quantization)
    if arch.tie_word_embeddings and _keeps_blocks_of_head(arch, placement):
        arch = replace(arch, tie_word_embeddings=False)
    if arch.quantization is not None:
        experts = () if arch.experts is None else (arch.experts.intermediate_size,)
        widths = (arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim, *experts)
        for line in describe_forms(arch.quantization, widths, placement):
            _log.info("%s", line)
    model = build_model(arch, placement)
    free = free_bytes(placement.device, placement.machine or placement.tensor)
    check_memory(weight_bytes(arch, model.weights(), placement), free, placement)
    destinations = weight_map(model.weights())
    if form == "dummy":
        fill_at_random(destinations, seed, count)
    else:
        names = foreign_names(arch, placement)
        if isinstance(form, OwnShard):
            destinations = kept_alone(destinations)
        with _files(folder, form) as files:
            fill_from_safetensors(
                folder, destinations, arch.tie_word_embeddings, count, names, Reading(files, native=placement.native)
            )
    return model


def _keeps_blocks_of_head(arch: ModelArch, placement: Placement) -> bool:
    """Whether a head that is the embedding is a matrix of its own, in a file's blocks: each step reads all of it."""
    scheme = None if arch.quantization is None else arch.quantization.scheme((HEAD,))
    return isinstance(scheme, BlockScheme) and form_of(scheme, arch.hidden_size, placement)[0] is Form.NATIVE


@contextmanager
def _files(folder: Path, form: LoadFormat | OwnShard) -> Iterator[Sequence[TensorSource] | None]:
    """Where the weights are; None: in the folder's checkpoint."""
    if isinstance(form, OwnShard):
        yield [TensorFile(path, None) for path in shard_files(folder, form)]
    elif form == STREAMED and streamed_from(folder) is not None:
        from pagefleet_engine.loader.streamed import streamed_files  # noqa: PLC0415 few need a downloader's libraries

        with streamed_files(folder) as files:
            yield files
    else:
        check_whole(folder)
        yield None


def foreign_names(arch: ModelArch, placement: Placement) -> ForeignNames:
    """What of a checkpoint has no place in the part of a model that is placed so."""
    has_all = placement.layers is None and not placement.expert_parallel
    elsewhere = () if has_all else weight_map(_whole(arch, placement).weights()).keys()
    return ForeignNames(arch.unused_weights, elsewhere)


def _whole(arch: ModelArch, placement: Placement) -> Model:
    """The model of which a rank has some layers, or some experts; it takes no memory as long as nothing is filled."""
    alone = Alone()
    return build_model(
        arch, replace(placement, layers=None, expert_parallel=False, tensor=alone, data=alone, balance=None)
    )


def resolve_dtype(
    requested: DType, checkpoint: str, device: torch.device, *, compiled_kernels: bool = False
) -> torch.dtype:
    """`requested`, or for `auto` the fastest type that keeps the checkpoint's precision in practice.

    auto on CUDA: the checkpoint's type, bfloat16 for float32 and float64. On a CPU: bfloat16 where it computes in it
    natively, or `compiled_kernels` multiply all matrices, which read half as much then; float32 elsewhere. That is also
    the better reading of a float16 checkpoint there.

    Raises:
        ModelLoadError: the checkpoint names a type that we cannot read.
    """
    stored = checkpoint_dtype(requested, checkpoint)
    if requested != "auto":
        return stored
    if device.type != "cpu":
        return torch.float16 if checkpoint == "float16" else torch.bfloat16
    return torch.bfloat16 if compiled_kernels or cpu_has_native_bfloat16() else torch.float32


def checkpoint_dtype(requested: DType, checkpoint: str) -> torch.dtype:
    """`requested`, or for `auto` the checkpoint's type; float32 of float64.

    Raises:
        ModelLoadError: the checkpoint names a type that we cannot read.
    """
    if checkpoint not in _CHECKPOINT_TYPES:
        raise ModelLoadError(f"config.json: dtype {checkpoint} is not supported; give {', '.join(_CHECKPOINT_TYPES)}")
    return _TYPES[requested] if requested != "auto" else _TYPES.get(checkpoint, torch.float32)


def cpu_has_native_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices in hardware (AVX512-BF16 or AMX-BF16), and oneDNN may use it:
    `ONEDNN_MAX_CPU_ISA` can forbid that."""
    mkldnn: Any = torch.backends.mkldnn
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_instructions and mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
