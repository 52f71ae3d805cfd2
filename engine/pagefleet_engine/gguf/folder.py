"""A GGUF file as the folder that everything else reads: configuration and tokenizer written out, weights linked.

CACHE/gguf/NAME-DIGEST/config.json, tokenizer.json ...   as Hugging Face has them
CACHE/gguf/NAME-DIGEST/*.gguf                            links to the file, or to its parts
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.gguf_config import ROPE_FACTORS, hf_config
from pagefleet_protocol.model_config.gguf_header import first_part, is_beside_a_model
from pagefleet_protocol.model_config.shape import read_shape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.file import GgufModel, read_gguf
from pagefleet_engine.gguf.tokenizer import tokenizer_files

_SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_WRITING = 6
"""Counts up when what is written changes: folders of before are left alone."""
_MOST_FACTORS = 1 << 16


def gguf_at(path: Path) -> Path | None:
    """The file that is meant by its own path, or by that of a folder that has no other weights; None: none is.

    Raises:
        ModelLoadError: the folder has several models.
    """
    if path.is_file():
        return path if path.suffix == _SUFFIX else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = [file for file in path.glob(f"*{_SUFFIX}") if not is_beside_a_model(file.name)]
    found = sorted(file for file in files if file.name == first_part(file.name))
    if len(found) > 1:
        raise ModelLoadError(
            f"{path} has {len(found)} models in GGUF ({found[0].name}, {found[1].name}): name one of them"
        )
    return found[0] if found else None


def plain_name(file: Path) -> str:
    """A file's name without its end and the number of its part."""
    return _PART.sub("", file.stem)


def folder_of(file: Path, cache: Path, *, with_tokenizer: bool) -> Path:
    """Return the folder of a file, written unless it is there; `with_tokenizer`: unless another was named.

    Raises:
        ModelLoadError: the file is damaged or of a kind that is not run, or the folder cannot be written.
    """
    file = Path(os.path.abspath(file))
    model = read_gguf(file)
    told = [
        f"{_WRITING} {with_tokenizer}",
        *(f"{part} {part.stat().st_size} {part.stat().st_mtime_ns}" for part in model.files),
    ]
    folder = cache / "gguf" / f"{plain_name(file)[:64]}-{hashlib.sha256(chr(10).join(told).encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    contents = contents_of(model, with_tokenizer=with_tokenizer)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        begun = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
        try:
            for name, content in contents.items():
                (begun / name).write_text(content, encoding="utf-8")
            for part in model.files:
                (begun / part.name).symlink_to(part)
            begun.chmod(0o755)
            begun.rename(folder)
        except OSError:
            shutil.rmtree(begun, ignore_errors=True)
            if not folder.is_dir():  # else another process was first
                raise
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be written ({error.strerror}): give another --cache-dir") from None
    return folder


def contents_of(model: GgufModel, *, with_tokenizer: bool) -> dict[str, str]:
    """The small files, by name.

    Raises:
        ModelLoadError: the model is of a kind that is not run, or lacks something.
    """
    try:
        config = hf_config(model, _rope_factors(model))
        read_shape(config, model.source)
    except ModelConfigError as error:
        raise ModelLoadError(str(error)) from None
    return {"config.json": json.dumps(config, indent=1), **(tokenizer_files(model) if with_tokenizer else {})}


def _rope_factors(model: GgufModel) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name in ROPE_FACTORS:
        tensor = model.tensors.get(name)
        if tensor is None:
            continue
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FACTORS:
            raise ModelLoadError(f"{tensor.path}: {name} is no list of numbers: download the file again")
        found[name] = np.fromfile(tensor.path, np.float32, tensor.shape[0], offset=tensor.start).tolist()
    return found
