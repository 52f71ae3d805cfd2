"""Weights in the form in which ranks keep them: a file, or a few, for each rank, which reads nothing else.

FOLDER/model-rank-0-part-0.safetensors ...   what each rank has of the checkpoint's tensors, by their names
FOLDER/sharded_state.json                    for which ranks; written last
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.weight_map import Destination
from pagefleet_engine.ranks.parallelism import Parallelism, RankPart

FACTS = "sharded_state.json"
FILE = "model-rank-{rank}-part-{part}.safetensors"
GIVE_THE_MODEL = "give the model that it was saved from"
"""To who writes another folder of it."""


class Shards(msgspec.Struct, frozen=True):
    """For which ranks a folder is."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layers: str | None

    @classmethod
    def of(cls, parallel: Parallelism) -> Shards:
        """Those of an engine."""
        return cls(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.pipeline_layers)


class OwnShard(NamedTuple):
    """One rank's."""

    shards: Shards
    rank: int

    @classmethod
    def of(cls, parallel: Parallelism, part: RankPart) -> OwnShard:
        """That of a rank of an engine."""
        return cls(Shards.of(parallel), part.stage * part.tensor_size + part.tensor)


def shard_files(folder: Path, own: OwnShard) -> list[Path]:
    """Return the files of a rank.

    Raises:
        ModelLoadError: the folder is not for such ranks, or not whole.
    """
    saved = _saved_for(folder)
    if saved is None:
        raise ModelLoadError(
            f"{folder} has no {FACTS}: it was not written by LLM(...).save_sharded_state(), or not to its end"
        )
    if saved != own.shards:
        layers = "" if saved.pipeline_layers is None else f" with pipeline_layers {saved.pipeline_layers}"
        raise ModelLoadError(
            f"{folder} was saved for tensor_parallel_size {saved.tensor_parallel_size} and pipeline_parallel_size "
            f"{saved.pipeline_parallel_size}{layers}: give these, or save it anew"
        )
    found = sorted(folder.glob(FILE.format(rank=own.rank, part="*")))
    if not found:
        raise ModelLoadError(f"{folder} has no {FILE.format(rank=own.rank, part=0)}: copy the folder again")
    return found


def check_whole(folder: Path, remedy: str = "give this, and --load-format sharded_state") -> None:
    """Refuse a folder whose files have parts of tensors, where whole ones are read.

    Raises:
        ModelLoadError: it is one.
    """
    saved = _saved_for(folder)
    if saved is not None and (size := saved.tensor_parallel_size) > 1:
        raise ModelLoadError(f"{folder} was saved by save_sharded_state() for tensor_parallel_size {size}: {remedy}")


def _saved_for(folder: Path) -> Shards | None:
    try:
        return msgspec.json.decode((folder / FACTS).read_bytes(), type=Shards)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def kept_alone(destinations: Mapping[str, Destination]) -> dict[str, Destination]:
    """The same places, for tensors that hold no more than the rank keeps."""
    return {name: replace(destination, is_own=True) for name, destination in destinations.items()}
