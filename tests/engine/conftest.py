"""Checkpoints that the engine's tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import save_checkpoint


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_checkpoint("qwen3", dtype=..., shard_size=..., **config)`: a folder, made once a session; only read it."""
    made: dict[str, Path] = {}

    def make(arch_name: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB", **overrides: Any) -> Path:
        key = json.dumps([arch_name, str(dtype), shard_size, overrides], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(arch_name)
            save_checkpoint(folder, arch_name, dtype, shard_size, overrides)
            made[key] = folder
        return made[key]

    return make
