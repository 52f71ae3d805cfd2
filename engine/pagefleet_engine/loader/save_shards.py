"""Write a model's folder for `load_format` sharded_state: one rank's weights after the other, on this machine's CPU."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import checkpoint_dtype, foreign_names
from pagefleet_engine.loader.new_folder import new_folder
from pagefleet_engine.loader.readers import HostReader
from pagefleet_engine.loader.safetensors import Reading, fill_from_safetensors
from pagefleet_engine.loader.sharded import FACTS, FILE, GIVE_THE_MODEL, Shards, check_whole
from pagefleet_engine.loader.weight_map import Destination, weight_map
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.model import build_model
from pagefleet_engine.ranks.group import Alone

_COPIED = (".json", ".txt", ".model", ".jinja")
_INDEX = ".index.json"
_FILE_BYTES = 5 << 30


def save_shards(config: EngineConfig, arch: ModelArch, folder: Path, out: Path, file_bytes: int = _FILE_BYTES) -> None:
    """Write what each rank of an engine keeps of a model, and the model's small files.

    Args:
        config: of the engine; its `load_format` does not count.
        arch: of the model.
        folder: of the model.
        out: as `new_folder` has it.
        file_bytes: after which another file is begun; so much memory is needed, and a tensor more.

    Raises:
        ConfigError: `out` holds something or cannot be written, or such weights cannot be saved so.
        ModelLoadError: the model cannot be read.
    """
    parallel = config.parallel
    if arch.quantization is not None or parallel.enable_expert_parallel:
        what = "whole experts on ranks" if arch.quantization is None else "a quantized checkpoint"
        raise ConfigError(f"{what}: this is not saved in shards; load the model as it is")
    check_whole(folder, GIVE_THE_MODEL)
    dtype = checkpoint_dtype(config.model.dtype, arch.dtype)
    places = [
        Placement(
            dtype,
            torch.device("cpu"),
            use_kernels=False,
            tensor=_Seat(parallel.tensor_parallel_size, tensor),
            layers=None if parallel.pipeline_parallel_size == 1 else layers,
        )
        for layers in arch.stage_layers(parallel)
        for tensor in range(parallel.tensor_parallel_size)
    ]
    with new_folder(out, sum(_num_bytes(_destinations(arch, place)) for place in places)) as scratch:
        for rank, place in enumerate(places):
            _save_rank(folder, arch, place, _Files(scratch, rank).write, file_bytes)
        for file in sorted(folder.iterdir()):
            if file.suffix in _COPIED and not file.name.startswith(".") and not file.name.endswith(_INDEX):
                shutil.copyfile(file, scratch / file.name)
        (scratch / FACTS).write_bytes(msgspec.json.encode(Shards.of(parallel)))


class _Seat(Alone):
    """A rank as layers see it that are built and never run: nobody exchanges anything."""

    def __init__(self, size: int, index: int) -> None:
        self.size = size
        self.index = index


class _Files:
    def __init__(self, out: Path, rank: int) -> None:
        self._out = out
        self._rank = rank
        self._num = 0

    def write(self, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, self._out / FILE.format(rank=self._rank, part=self._num), {"format": "pt"})
        self._num += 1


def _destinations(arch: ModelArch, place: Placement) -> dict[str, Destination]:
    return weight_map(build_model(arch, place).weights())


def _num_bytes(destinations: Mapping[str, Destination]) -> int:
    return sum(math.prod(one.own_shape) * one.weight.dtype.itemsize for one in destinations.values())


def _save_rank(
    folder: Path, arch: ModelArch, place: Placement, write: Callable[[dict[str, Tensor]], None], file_bytes: int
) -> None:
    destinations = _destinations(arch, place)
    collector = Collector(destinations, write, file_bytes)
    names = foreign_names(arch, place)
    fill_from_safetensors(
        folder, destinations, arch.tie_word_embeddings, foreign=names, reading=Reading(reader=collector)
    )
    collector.flush()


class Collector(HostReader):
    """Keeps what a rank needs of tensors, and hands it over with names; no layer gets any."""

    def __init__(
        self, names: Mapping[str, Destination], write: Callable[[dict[str, Tensor]], None], file_bytes: int
    ) -> None:
        super().__init__()
        self._names = {(id(one.weight), one.part): name for name, one in names.items()}
        self._rooms: dict[tuple[int, int], Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._write = write
        self._file_bytes = file_bytes

    def room(self, destination: Destination) -> Tensor:
        """See Reader."""
        room = torch.empty(destination.own_shape, dtype=destination.weight.dtype)
        self._rooms[id(destination.weight), destination.part] = room
        return room

    def settle(self, destination: Destination) -> None:
        """See Reader."""
        key = id(destination.weight), destination.part
        self._kept[self._names[key]] = self._rooms.pop(key)
        if sum(tensor.nbytes for tensor in self._kept.values()) >= self._file_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand over what is here."""
        if self._kept:
            self._write(self._kept)
            self._kept = {}
