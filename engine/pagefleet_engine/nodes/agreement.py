"""Whether the machines of one engine were started alike. Pure, but for reading a model's small files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from pagefleet_kv.config import KVTransferConfig
from pagefleet_protocol.version import VERSION

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.nodes.messages import Hello, Present

_INDEX = "model.safetensors.index.json"
_COMMIT = re.compile("[0-9a-f]{40}")


def refusal_of(hello: Hello, own: EngineConfig) -> str | None:
    """Say why a follower does not belong to this leader's engine; None: it does."""
    if hello.version != VERSION:
        return f"it runs pagefleet {hello.version[:40]}, and the leader {VERSION}: install one version on all nodes"
    try:
        theirs = msgspec.msgpack.decode(hello.config, type=EngineConfig)
    except (msgspec.DecodeError, ConfigError):
        return "its settings cannot be read by the leader's code: install one version of pagefleet on all nodes"
    for name, value, expected in differences(theirs, own):
        return f"{name} is {value!r:.80} there, and {expected!r:.80} at the leader: give all nodes the same settings"
    return None


def differences(one: EngineConfig, other: EngineConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the settings in which two nodes differ that must not: name, the one's value, the other's."""
    flat, others = (dict(_flat(msgspec.to_builtins(_shared(config)))) for config in (one, other))
    for name, value in flat.items():
        if others.get(name) != value:
            yield name, value, others.get(name)


def _shared(config: EngineConfig) -> EngineConfig:
    """Leave out what each node may have in its own way: paths on its disks, its number."""
    model = replace(
        config.model,
        model="",
        revision=None,  # the leader tells its commit
        tokenizer=None,
        tokenizer_revision=None,
        served_model_name=None,
        download_dir=None,
        hf_token=None,
    )
    return replace(
        config,
        model=model,
        # Which copy of the model this is, the leader knows by its port.
        parallel=replace(config.parallel, node_rank=0, data_parallel_rank=None),
        # What connects is the leader's; where it listens, and whom it asks, is nothing to the others.
        kv_transfer=KVTransferConfig(kv_connector=config.kv_transfer.kv_connector),
        execution=replace(config.execution, cache_dir=None),
    )


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value


def model_digest(folder: Path) -> str:
    """Return what differs where a model's shape or its checkpoint's files do; weights are not read."""
    told = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("*.gguf"))):
        told.update(f"{file.name} {file.stat().st_size}\n".encode())
    if (folder / _INDEX).is_file():
        told.update((folder / _INDEX).read_bytes())
    return told.hexdigest()


def commit_of(folder: Path) -> str | None:
    """Return the commit of a model in the hub's cache; None of any other folder."""
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None


def unlike_model(present: Present, own: Present) -> str | None:
    """Say why what a follower has does not fit what the leader has; None: it does."""
    if present.device != own.device:
        return f"its ranks would compute on {present.device}, and the leader's on {own.device}: make them alike"
    if present.model != own.model:
        return "its files of the model are not the leader's: give both the same model and revision, downloaded anew"
    return None
