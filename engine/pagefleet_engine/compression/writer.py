"""Writes a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.checkpoint import TensorFile

_FILE_BYTES = 2 << 30
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_TERMS = ("LICENSE", "NOTICE", "USE_POLICY")
_INDEX = "model.safetensors.index.json"
REPORT = "quantization_report.json"


class CheckpointWriter:
    """Puts tensors into files of a folder as they come; `finish` names the files and makes the index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._parts: list[list[str]] = []
        self.num_bytes = 0
        """Of all tensors so far."""

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors, each once."""
        for name, tensor in tensors.items():
            self._waiting[name] = tensor.contiguous()
            self.num_bytes += tensor.nbytes
            if sum(waiting.nbytes for waiting in self._waiting.values()) >= _FILE_BYTES:
                self._flush()

    def copy(self, files: Sequence[TensorFile], names: frozenset[str]) -> None:
        """Take tensors as they are in other files."""
        for file in files:
            for name in file.names:
                if name in names:
                    self.add({name: _read(file.path, name)})

    def finish(self) -> None:
        """All tensors are here."""
        self._flush()
        count = len(self._parts)
        names = ["model.safetensors"]
        if count > 1:
            names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
            places = {name: file for file, part in zip(names, self._parts, strict=True) for name in part}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
            write_json(self._folder / _INDEX, index)
        for number, name in enumerate(names):
            self._part(number).rename(self._folder / name)

    def _flush(self) -> None:
        if self._waiting:
            save_file(self._waiting, self._part(len(self._parts)), {"format": "pt"})
            self._parts.append(list(self._waiting))
            self._waiting = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def _read(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path}: {name} cannot be read ({error}): download the file again") from None


def write_config(source: Path, folder: Path, section: Mapping[str, Any]) -> None:
    """The model's other files, and its config.json with `quantization_config`."""
    for file in sorted(source.iterdir()):
        is_other = file.name.startswith(".") or file.name.endswith(".index.json") or file.name == REPORT
        is_wanted = file.suffix in _COPIED or file.name.startswith(_TERMS)
        if is_wanted and not is_other and file.is_file():
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", {**config, "quantization_config": section})


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Indented, with a line feed at the end."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
