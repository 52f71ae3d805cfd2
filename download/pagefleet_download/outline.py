"""What a model is before anything large is read: its files and its facts, from a listing and a few kilobytes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.gguf_config import ROPE_FACTORS, hf_config, kept_bytes
from pagefleet_protocol.model_config.quantized import quantized_as
from pagefleet_protocol.model_config.shape import UNEVEN_STAGES, ModelShape, read_shape
from pagefleet_protocol.model_facts import ModelFacts

from pagefleet_download.errors import BadModel, Interrupted
from pagefleet_download.gguf_outline import gguf_header
from pagefleet_download.reading import persist, read_json
from pagefleet_download.selection import (
    CONFIG,
    INDEX,
    MAX_INDEX_BYTES,
    check_config,
    check_tokenizer,
    choose_gguf,
    choose_weights,
    companions,
    is_gguf,
    is_weights,
    top_names,
)
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import Listing, ModelSource, RemoteFile
from pagefleet_download.stage_bytes import stage_facts
from pagefleet_download.tensor_bytes import expert_bytes, read_headers

_MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """The files to download, and what they come to."""

    files: tuple[RemoteFile, ...]
    facts: ModelFacts


async def outline(source: ModelSource, settings: DownloadSettings) -> ModelOutline:
    """Look at a model.

    Raises:
        DownloadError: it cannot be read, or is none that pagefleet runs.
    """
    listing = await persist(lambda: _list(source, settings), settings)
    names = top_names(file.name for file in listing.files)
    found = {file.name: file for file in listing.files}
    if settings.parts == "text":
        return _text_outline(listing.revision, names, found)
    if is_gguf(names):
        return await _gguf_outline(
            source, listing.revision, [found[name] for name in choose_gguf(names, None)], settings
        )
    check_config(names)
    config = await read_json(source, found[CONFIG], _MAX_CONFIG_BYTES, settings)
    shape, quantization = _read_config(config, CONFIG)
    weights = await _weights(source, names, found, settings)
    kept = tuple(weights) if settings.parts == "all" else ()
    wanted = tuple(found[name] for name in companions(names)) + kept
    apart = shape.num_experts > 0 or shape.model_type in UNEVEN_STAGES
    total, tensors = await read_headers(source, weights, settings, names=apart)
    facts = _facts(shape, quantization, listing.revision, len(wanted), (total, expert_bytes(tensors)))
    return ModelOutline(wanted, msgspec.structs.replace(facts, stages=stage_facts(shape, tensors)))


async def _gguf_outline(
    source: ModelSource, revision: str, files: list[RemoteFile], settings: DownloadSettings
) -> ModelOutline:
    """Of a model in GGUF, which has its configuration and its tokenizer in it: nothing else is wanted."""
    if settings.parts == "small":
        raise BadModel("GGUF is not streamed: leave out --load-format, and the file is downloaded")
    header = await gguf_header(source, files, settings)
    try:
        # What the factors are does not matter here, but that they are there.
        factors = {name: [1.0] for name in ROPE_FACTORS if name in header.tensors}
        shape, quantization = _read_config(hf_config(header, factors), header.source)
        experts = sum(one.num_bytes for name, one in header.tensors.items() if "_exps." in name)
        weights = sum(one.num_bytes for one in header.tensors.values())
        facts = _facts(shape, quantization, revision, len(files), (weights, experts))
        on_cpu, on_gpu = kept_bytes(header)
    except ModelConfigError as error:
        raise BadModel(str(error)) from None
    return ModelOutline(tuple(files), msgspec.structs.replace(facts, cpu_bytes=on_cpu, gpu_bytes=on_gpu))


def _facts(shape: ModelShape, quantization: str, revision: str, num_files: int, weights: tuple[int, int]) -> ModelFacts:
    """`weights`: bytes of all tensors, and of those of experts."""
    windows = [window for window in shape.kept_windows if window is not None]
    return ModelFacts(
        revision=revision,
        weights_bytes=weights[0],
        num_files=num_files,
        architecture=shape.model_type,
        dtype=shape.dtype,
        quantization=quantization,
        num_layers=shape.num_layers,
        num_window_layers=len(windows),
        window=max(windows, default=0),
        num_attention_heads=shape.num_heads,
        num_kv_heads=shape.kv.heads,
        head_dim=shape.kv.dim,
        kv_vectors=shape.kv.vectors,
        max_position_embeddings=shape.context_length,
        num_kv_shared_layers=shape.num_kv_shared_layers,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_bytes=weights[1],
        default_length=0 if shape.default_length == shape.context_length else shape.default_length,
    )


async def weights_of(source: ModelSource, settings: DownloadSettings) -> tuple[str, tuple[RemoteFile, ...]]:
    """Return the revision of a model, and the files of its weights.

    Raises:
        DownloadError: as `outline`.
    """
    listing = await persist(lambda: _list(source, settings), settings)
    found = {file.name: file for file in listing.files}
    return listing.revision, tuple(await _weights(source, top_names(found), found, settings))


async def _weights(
    source: ModelSource, names: list[str], found: Mapping[str, RemoteFile], settings: DownloadSettings
) -> list[RemoteFile]:
    index = await read_json(source, found[INDEX], MAX_INDEX_BYTES, settings) if INDEX in names else None
    return [found[name] for name in choose_weights(names, index)]


def _text_outline(revision: str, names: list[str], found: Mapping[str, RemoteFile]) -> ModelOutline:
    check_tokenizer(names)
    wanted = tuple(found[name] for name in companions(names) if not is_weights(name))
    facts = ModelFacts(revision, 0, len(wanted), "", "", "", *(0,) * 7)  # no model: there is nothing to plan for
    return ModelOutline(wanted, facts)


def _read_config(config: Mapping[str, Any], name: str) -> tuple[ModelShape, str]:
    try:
        shape = read_shape(config, name)
        return shape, quantized_as(shape.fields)
    except ModelConfigError as error:
        raise BadModel(str(error)) from None


async def _list(source: ModelSource, settings: DownloadSettings) -> Listing:
    stall = settings.patience.stall
    try:
        async with asyncio.timeout(stall):
            return await source.list_files()
    except TimeoutError as error:
        raise Interrupted(f"the list of files did not come within {stall:g} s") from error
