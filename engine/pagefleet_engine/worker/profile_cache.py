"""Remembers on disk how much memory a step takes, so that the next start of the same model need not measure it.

A file holds one measurement and the facts that it depends on: model, types, limits, graphs, device, versions. It is
found by their hash, and whatever is not exactly what was written counts as not there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.ranks.parallelism import WHOLE, RankPart
from pagefleet_engine.worker.profile import StepMemory

_FORMAT = 1
_DISTRIBUTIONS = ("torch", "triton", "pagefleet-kernels", "pagefleet-engine")
_OF_EXPERTS = ("enable_expert_parallel", "data_ranks", "all2all_backend", "enable_eplb", "num_redundant_experts")
"""Of `Parallelism`: who sees which rows."""
_log = logging.getLogger(__name__)


def profile_facts(
    config: EngineConfig,
    arch: ModelArch,
    dtype: torch.dtype,
    max_model_len: int,
    device: Mapping[str, Any],
    part: RankPart = WHOLE,
) -> dict[str, Any]:
    """All that a step's memory depends on, as JSON would give it back. `device`: see `device_facts`; `part`: of the
    model, that is computed.

    What the model computes is in it, where its files lie is not.
    """
    facts = {
        "arch": dataclasses.asdict(arch),
        "ranks": config.parallel.world_size,
        "experts": [getattr(config.parallel, name) for name in _OF_EXPERTS],
        "stage": [part.stage, part.num_stages],
        "dtype": str(dtype),
        "max_model_len": max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "block_size": config.cache.block_size,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "execution": {
            name: value
            for name, value in dataclasses.asdict(config.execution).items()
            if name not in ("profile_cache", "cache_dir")
        },
        "device": dict(device),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS} | {"python": platform.python_version()},
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def device_facts(device: torch.device) -> dict[str, Any]:
    """What tells one GPU from another, where memory is concerned."""
    if device.type != "cuda":
        return {"name": device.type, "memory": 0}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "cuda": torch.version.cuda,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }


class ProfileCache:
    """One measurement, in a file of its own under `folder`."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._facts = dict(facts)
        text = json.dumps(self._facts, sort_keys=True)
        self.path = folder / "profiles" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self) -> StepMemory | None:
        """What was measured under the same facts; None where there is no such file, or a damaged one."""
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be read (%s): measuring again", self.path, error)
            return None
        found = self._read(content)
        if found is None:
            _log.warning("%s is not what was written there: measuring again", self.path)
        return found

    def store(self, memory: StepMemory) -> None:
        """Write the measurement, in one piece; a folder that cannot be written costs the next start its time."""
        content = {"format": _FORMAT, "facts": self._facts, "step_memory": dataclasses.asdict(memory)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as scratch:  # gone, whatever happens
                file = Path(scratch) / self.path.name
                file.write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")
                os.replace(file, self.path)
        except OSError as error:
            _log.warning("what a step takes of memory was not kept (%s): the next start measures again", error)

    def _read(self, content: Any) -> StepMemory | None:
        if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("facts") != self._facts:
            return None
        memory = content.get("step_memory")
        names = {field.name for field in dataclasses.fields(StepMemory)}
        if not isinstance(memory, dict) or memory.keys() != names:
            return None
        if not all(type(value) is int and 0 <= value <= self._most() for value in memory.values()):
            return None
        return StepMemory(**memory)

    def _most(self) -> int:
        return int(self._facts["device"]["memory"])


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
