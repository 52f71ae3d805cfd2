"""Fill a model's slots from safetensors files. All headers are checked before a single number is read.

Threads read ahead, the caller's installs what is complete:

file    |--- tensor ---|------------ tensor ------------|-- tensor --|
pieces  |--------------|----------|----------|----------|------------|    read by many threads, in any order
slots            arrived               arrived              arrived       in the order of the file
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from pagefleet_kernels.native.library import Library
from torch import Tensor

from pagefleet_engine.cores import staying_free
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.shard import Shard, shard_of
from pagefleet_engine.layers.weight import Kept, Placement, UnusableTensorError, Weight, same_shape
from pagefleet_engine.loader import bitsandbytes, hqq, torchao
from pagefleet_engine.loader.checkpoint import TensorFile, TensorSource, checkpoint_files, name_some
from pagefleet_engine.loader.gguf import ENCODED, gguf_sources
from pagefleet_engine.loader.readers import PIECE_BYTES, Encoding, Readable, Reader, Stored, reader_for, stored_bytes
from pagefleet_engine.loader.weight_map import Destination, is_ignorable


@dataclass(frozen=True, slots=True)
class NameLayout:
    """How a checkpoint names the tensors of its text model, and which are not of it."""

    prefixes: tuple[tuple[str, str], ...] = ()
    """A prefix of ours, and what stands there in the checkpoint."""
    foreign: tuple[str, ...] = ()
    """Prefixes of what no text model needs."""

    def stored_name(self, name: str) -> str:
        """The checkpoint's name for our `name`."""
        for ours, theirs in self.prefixes:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name


@dataclass(frozen=True, slots=True)
class ForeignNames:
    """Our names of tensors of a checkpoint that have no place here."""

    unused: Sequence[str] = ()
    """Beginnings of what nobody needs."""
    elsewhere: Collection[str] = ()
    """What other stages of the model have."""


NONE_FOREIGN = ForeignNames()

Count = Callable[[int, int], None]
"""Called with the bytes of weights that are in place, and all of them."""


def count_for_nobody(done: int, total: int) -> None:
    """The default."""


_PLAIN = NameLayout()
_AROUND = NameLayout(
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    ("vision_tower.", "vision_model.", "multi_modal_projector."),
)
_WITHIN = NameLayout(
    (("model.", "model.language_model."),),
    (
        *(f"model.{foreign}" for foreign in _AROUND.foreign),
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
)


def layout_of(stored: Collection[str], ours: Collection[str]) -> NameLayout:
    """The layout of a checkpoint with these tensors, of a model with `ours`: with the text model as a part, on its own,
    or on its own without a head, as it was before it got one."""
    for name in stored:
        for layout in (_AROUND, _WITHIN):
            if name.startswith(layout.stored_name("model.")):
                return layout
    for base in _BASES:
        without = {name.removeprefix(base) for name in ours if name.startswith(base)}
        if not without.isdisjoint(stored) and not any(name.startswith(base) for name in stored):
            return NameLayout(((base, ""),))
    return _PLAIN


# What stands before all names of a model but its head's, where it has one
_BASES = ("transformer.", "model.")

# Of models that end in a classification.
_OTHER_HEADS = ("score.", "classifier.", "qa_outputs.")
_FLOATING = ("F64", "F32", "F16", "BF16")
_READ = (*_FLOATING, *ENCODED)
_PARTS_OF_MATRICES = ("weight_", "qweight", "qzeros", "scales", "g_idx")
"""Beginnings of what quantized ones have instead, or besides."""
# What fills a slot of such a type; others are filled from any floating type.
_ONLY = {torch.float8_e4m3fn: ("F8_E4M3",), torch.int8: ("I8",), torch.uint8: ("U8",), torch.int32: ("I32",)}


@dataclass(frozen=True, slots=True)
class Reading:
    """Which files are read, and by whom."""

    files: Sequence[TensorSource] | None = None
    """None: the checkpoint in the folder."""
    reader: Reader | None = None
    """None: that of the device."""
    native: Library | None = None
    """Who decodes what lies in blocks; None: torch."""


CHECKPOINT = Reading()


def fill_from_safetensors(
    folder: Path,
    destinations: Mapping[str, Destination],
    tied_head: bool,
    count: Count = count_for_nobody,
    foreign: ForeignNames = NONE_FOREIGN,
    reading: Reading = CHECKPOINT,
) -> None:
    """Check names, shapes and types of all files first, then copy. What is `foreign` is passed over.

    Raises:
        ModelLoadError: the files do not hold exactly what the model needs.
    """
    files = reading.files
    if files is None:
        raw = {name for name, destination in destinations.items() if destination.weight.dtype == torch.uint8}
        files = gguf_sources(folder, raw, reading.native)
    if not files:
        files = [TensorFile(path, wanted) for path, wanted in checkpoint_files(folder).items()]
    files = hqq.settled(bitsandbytes.settled(files, destinations))
    stored = {name for file in files for name in file.names}
    layout = layout_of(stored, destinations)
    destinations = {layout.stored_name(name): destination for name, destination in destinations.items()}
    destinations = {_name_in(stored, name): destination for name, destination in destinations.items()}
    passed_over = [layout.stored_name(name) for name in (*foreign.unused, *(("lm_head.",) if tied_head else ()))]
    others = {layout.stored_name(name) for name in foreign.elsewhere}
    others |= _packed_biases(others)
    files = torchao.settled(files, destinations.keys() | others)
    destinations |= _zero_biases(files, destinations) | _neighbours(files, destinations)
    _check_names(folder, files, destinations, (*layout.foreign, *passed_over), others)
    for file in files:
        for name in file.names:
            if name in destinations:
                _check_form(file, name, destinations[name])
    reader = reading.reader or reader_for(next(iter(destinations.values())).weight.device)
    with ExitStack() as stack:
        opened = [(file, stack.enter_context(file.opened())) for file in files]
        tensors = [
            (_stored(file, name, descriptor), destinations[name])
            for file, descriptor in opened
            for name in file.names
            if name in destinations
        ]
        transfer(tensors, reader, count)


def _name_in(stored: Collection[str], name: str) -> str:
    """Where a checkpoint has a scale of K/V: by itself, or with the projection as ModelOpt does, and Quark."""
    layer, _, kind = name.rpartition(".")
    if kind not in ("k_scale", "v_scale"):
        return name
    within = (f"{layer}.{kind[0]}_proj.{own}" for own in (kind, "output_scale"))
    return next((one for one in within if one in stored), name)


def _zero_biases(files: Sequence[TensorSource], destinations: Mapping[str, Destination]) -> dict[str, Destination]:
    """Slots for biases of packed layers that have none: AutoGPTQ gave each layer one, of zeros."""
    biases = _packed_biases(destinations) - destinations.keys()
    device = next(iter(destinations.values())).weight.device
    return {
        name: _looked_at(file.shape(name), torch.float32, device, _check_zero)
        for file in files
        for name in biases.intersection(file.names)
    }


def _neighbours(files: Sequence[TensorSource], destinations: Mapping[str, Destination]) -> dict[str, Destination]:
    """Slots for the groups of inputs that GPTQ's layers tell where config.json says that these are of neighbours."""
    found = {}
    for file in files:
        for name in file.names:
            layer, _, kind = name.rpartition(".")
            scales = destinations.get(f"{layer}.scales")
            if kind == "g_idx" and name not in destinations and scales is not None:
                check = partial(_check_neighbours, scales.shape[0])
                found[name] = _looked_at(file.shape(name), torch.int32, scales.weight.device, check)
    return found


def _looked_at(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, check: Callable[[Tensor], None]
) -> Destination:
    """Of a tensor that is read, checked and left."""
    place = Placement(dtype, device, use_kernels=False)
    weight = Weight((math.prod(shape),), None, place, check, kept=Kept(dtype, is_copy=True))
    return Destination(weight.stored_as(shape), 0)


def _packed_biases(names: Collection[str]) -> set[str]:
    """What the biases of these layers in GPTQ's and AWQ's numbers would be called."""
    return {f"{name.removesuffix('.qweight')}.bias" for name in names if name.endswith(".qweight")}


def _check_zero(bias: Tensor) -> None:
    if bias.any():
        raise UnusableTensorError("is a bias, and the model has none there: config.json is of another model")


def _check_neighbours(num_groups: int, groups: Tensor) -> None:
    # Zeros alone are what some tools write where there is no order.
    if groups.any() and not torch.equal(groups, torch.arange(len(groups)).to(groups) * num_groups // len(groups)):
        raise UnusableTensorError(
            "has inputs in groups otherwise than as neighbours, and config.json's desc_act is false: give desc_act "
            "true there, or download the checkpoint again"
        )


def _stored(file: TensorSource, name: str, descriptor: Readable) -> StoredTensor:
    return StoredTensor(f"{file.path}: {name}", descriptor, file.offset(name), *file.form(name))


def _check_names(
    folder: Path,
    files: Sequence[TensorSource],
    destinations: Mapping[str, Destination],
    passed_over: tuple[str, ...],
    others: Collection[str],
) -> None:
    seen: dict[str, Path] = {}
    floats: set[str] = set()
    for file in files:
        for name in file.names:
            if name in seen:
                raise ModelLoadError(f"{file.path} and {seen[name]} both hold {name}: keep one set of files")
            seen[name] = file.path
            if file.dtype(name) in _FLOATING:
                floats.add(name)
    known = destinations.keys() | others
    extra = sorted(name for name in seen if name not in known and not is_ignorable(name, passed_over))
    if quantized := sorted(destinations.keys() & set(map(_matrix_of, extra)) - floats):
        raise ModelLoadError(
            f"{seen[extra[0]]}: the weights have {name_some(quantized)} quantized, where the model has floats: "
            "repair quantization_config in config.json, or give a checkpoint that leaves routers in floats"
        )
    missing = sorted(destinations.keys() - seen.keys())
    if missing:
        heads = sorted(name for name in seen if name.startswith(_OTHER_HEADS))
        if heads and all("lm_head." in name for name in missing):
            raise ModelLoadError(
                f"{folder}: the weights have {name_some(heads)} and no {name_some(missing)}: this model classifies or "
                "scores text and generates none; give one that was saved as ...ForCausalLM"
            )
        if plain := sorted(floats & set(map(_matrix_of, missing))):
            raise ModelLoadError(
                f"{folder}: the weights have {name_some(plain)} in a float type, and config.json a quantized one: name "
                "such layers there (ignore, modules_to_not_convert, llm_int8_skip_modules), or give another checkpoint"
            )
        where = files[0].path if len(files) == 1 else folder
        raise ModelLoadError(f"{where}: the weights lack {name_some(missing)}: download the checkpoint again")
    if extra:
        raise ModelLoadError(
            f"{seen[extra[0]]}: no place in the model for {name_some(extra)}: the config.json beside it is of another "
            "model"
        )


def _matrix_of(name: str) -> str:
    """The matrix that a tensor of this name is a part of, as it is called in floats; else the name itself."""
    layer, dot, kind = name.rpartition(".")
    return f"{layer}.weight" if dot and kind.startswith(_PARTS_OF_MATRICES) else name


def _check_form(file: TensorSource, name: str, destination: Destination) -> None:
    shape, dtype = file.shape(name), file.dtype(name)
    if not same_shape(shape, destination.shape):
        raise ModelLoadError(
            f"{file.path}: {name} is {list(shape)}, config.json makes it {list(destination.shape)}: the two files are "
            "not of the same model"
        )
    accepted = _ONLY.get(destination.weight.dtype, _READ)
    if dtype not in accepted:
        quantized = "" if accepted == _READ else "config.json says that it is quantized: "
        raise ModelLoadError(
            f"{file.path}: {name} is of type {dtype}; {quantized}give a checkpoint in "
            f"{', '.join(_FLOATING if accepted == _READ else accepted)}"
        )
    numbers, columns = file.form(name).numbers, destination.shards[-1]
    if isinstance(numbers, Encoding) and any(
        len(r) % numbers.numbers or r.start % numbers.numbers for r in columns.ranges
    ):
        raise ModelLoadError(
            f"{file.path}: {name} is in blocks of {numbers.numbers} numbers, which ranks would cut: give a smaller "
            "--tensor-parallel-size"
        )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's numbers lie."""

    name: str
    """Of file and tensor, for errors."""
    file: Readable
    offset: int
    numbers: Stored
    head_dim: int | None = None
    """See StoredForm."""

    def num_bytes(self, count: int) -> int:
        """Of so many numbers."""
        return stored_bytes(self.numbers, count)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A tensor that is on its way."""

    name: str
    destination: Destination
    pieces: list[Future[None]]
    num_bytes: int


def transfer(
    tensors: Sequence[tuple[StoredTensor, Destination]], reader: Reader, count: Count = count_for_nobody
) -> None:
    """Fill every destination, in order; `count` is called after each.

    Raises:
        ModelLoadError: a file cannot be read; the model is not usable then.
    """
    on_the_way: deque[_Arrival] = deque()
    num_bytes = done = 0
    total = sum(tensor.num_bytes(math.prod(destination.own_shape)) for tensor, destination in tensors)

    def install() -> int:
        nonlocal done
        arrival = on_the_way.popleft()
        _install(arrival, reader)
        done += arrival.num_bytes
        count(done, total)
        return arrival.num_bytes

    pool = ThreadPoolExecutor(reader.num_threads, "load")
    try:
        for tensor, destination in tensors:
            arrival = _send_for(tensor, destination, reader, pool)
            on_the_way.append(arrival)
            num_bytes += arrival.num_bytes
            while num_bytes > reader.ahead_bytes or (on_the_way and _is_here(on_the_way[0])):
                num_bytes -= install()
        while on_the_way:
            install()
    finally:
        pool.shutdown(cancel_futures=True)


def _send_for(tensor: StoredTensor, destination: Destination, reader: Reader, pool: ThreadPoolExecutor) -> _Arrival:
    room = reader.room(destination)
    pieces = [
        pool.submit(staying_free, reader.read, tensor.file, tensor.offset + start, tensor.numbers, piece, stride)
        for start, piece, stride in _pieces(destination.shards, tensor, room)
    ]
    return _Arrival(tensor.name, destination, pieces, tensor.num_bytes(room.numel()))


def _pieces(shards: tuple[Shard, ...], tensor: StoredTensor, room: Tensor) -> Iterator[tuple[int, Tensor, int | None]]:
    """What one call reads: the byte in the tensor where it begins, where it goes, and the stride of its rows.

    `shards`: what of the stored tensor's rows and columns goes to the room.
    """
    rows, *more = shards
    (columns,) = more or (shard_of(1),)
    numbers, head_dim = tensor.numbers, tensor.head_dim
    block = numbers.numbers if isinstance(numbers, Encoding) else 1
    done = 0
    for kept in rows.ranges:
        of_rows, first = room[done : done + len(kept)], kept.start * columns.whole
        done += len(kept)
        stride = None
        if head_dim is not None and columns.is_all:  # pieces of whole heads, in the order of the file
            parts = [(0, of_rows.view(-1, 2, head_dim // 2, *of_rows.shape[1:]).transpose(1, 2))]
            numbers_apart = head_dim * columns.whole
        elif columns.is_all:
            parts, numbers_apart = [(0, of_rows.view(-1, block) if block > 1 else of_rows.view(-1))], block
        else:
            starts = itertools.accumulate(map(len, columns.ranges), initial=0)
            parts = [
                (own.start, of_rows[:, to : to + len(own)]) for own, to in zip(columns.ranges, starts, strict=False)
            ]
            numbers_apart, stride = columns.whole, tensor.num_bytes(columns.whole)
        for column, part in parts:
            at_once = max(1, PIECE_BYTES // tensor.num_bytes(math.prod(part.shape[1:])))
            for start in range(0, len(part), at_once):
                yield tensor.num_bytes(first + column + start * numbers_apart), part[start : start + at_once], stride


def _is_here(arrival: _Arrival) -> bool:
    return all(piece.done() for piece in arrival.pieces)


def _install(arrival: _Arrival, reader: Reader) -> None:
    try:
        for piece in arrival.pieces:
            piece.result()
    except (OSError, EOFError) as error:
        raise ModelLoadError(
            f"{arrival.name} cannot be read ({error}): check disk or store, or download again"
        ) from error
    try:
        reader.settle(arrival.destination)
    except UnusableTensorError as error:
        raise ModelLoadError(f"{arrival.name} {error}") from None
