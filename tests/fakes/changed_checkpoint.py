"""Copies of checkpoints that differ from what was saved: in their tensors, or in config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[dict[str, Tensor]], object]


def nothing(tensors: dict[str, Tensor]) -> None:
    """Leave the tensors."""


def changed(folder: Path, target: Path, change: Change = nothing, **config: Any) -> Path:
    """A copy with other tensors and other fields of the configuration."""
    copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    said = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(said | config))
    return target
