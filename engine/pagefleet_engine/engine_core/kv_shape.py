"""What the bytes of an engine's blocks mean: engines pair, and read each other's files, where that is equal.

Two checkpoints of one architecture give different K/V for one text, so the weights are part of it: not all of them,
which would take as long as loading them, but each file's name and size and its first and last bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

from pagefleet_download.manifest import streamed_from
from pagefleet_protocol.kv_blob import KvShape

from pagefleet_engine.config import STREAMED, EngineConfig
from pagefleet_engine.core.kv_cache import ONE_GROUP
from pagefleet_engine.core.kv_groups import KVGroups, stage_slots
from pagefleet_engine.loader.checkpoint import checkpoint_files
from pagefleet_engine.models.arch import ModelArch

LAYOUT = "block,layer,kv,head,token,dim"
"""Order of the axes of `pagefleet_kernels.layout.KVLayout`."""
LATENT_LAYOUT = "block,layer,token,dim"
"""The same, where one vector is kept of each token."""
SAMPLED_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as the worker holds it."""

    folder: Path
    arch: ModelArch
    """As the folder's configuration says."""
    scope: str
    """Name in the scope of cached blocks."""
    compute_dtype: str
    cache_dtype: str
    max_model_len: int
    """As it was asked for or resolved, whatever the KV pool holds."""


def kv_shape(config: EngineConfig, model: LoadedModel, groups: KVGroups = ONE_GROUP) -> KvShape:
    """Return the shape of the engine's blocks, which belong to these groups of layers.

    Raises:
        ModelLoadError: the weights' files cannot be found.
    """
    kv = model.arch.kv
    parts = tuple(len(slots) for slots in stage_slots(groups, model.arch.stage_layers(config.parallel)))
    return KvShape(
        model=_model_digest(config, model),
        cache_dtype=model.cache_dtype,
        compute_dtype=model.compute_dtype,
        block_size=config.cache.block_size,
        num_layers=len(model.arch.kept_windows),
        num_kv_heads=kv.heads,
        head_dim=kv.dim,
        layout=LATENT_LAYOUT if kv.is_latent else LAYOUT,
        windows=tuple(group.window for group in groups.groups),
        chunked=any(group.chunked for group in groups.groups),
        parts=parts if len(parts) > 1 and len(groups) > 1 else (),
    )


def _model_digest(config: EngineConfig, model: LoadedModel) -> str:
    arch = model.arch
    if any(rope.rope_type == "longrope" for rope in arch.ropes):  # its keys depend on the longest sequence served
        arch = arch.for_length(model.max_model_len)
    facts = [dataclasses.asdict(dataclasses.replace(arch, quantization=None)), repr(arch.quantization)]
    digest = hashlib.sha256(repr((facts, model.scope, config.model.quantization)).encode())
    if config.model.load_format == "dummy":
        digest.update(f"dummy weights of seed {config.model.seed}".encode())
        return digest.hexdigest()
    if config.model.load_format == STREAMED and (elsewhere := streamed_from(model.folder)) is not None:
        digest.update(f"{elsewhere.source} {elsewhere.facts.revision}".encode())
        return digest.hexdigest()
    for file in sorted(checkpoint_files(model.folder)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLED_BYTES))
            stream.seek(max(0, size - SAMPLED_BYTES))
            digest.update(stream.read(SAMPLED_BYTES))
    return digest.hexdigest()
