"""From a configured model to its folder. Names of models were made folders before: `local_model`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.errors import ConfigError, ModelLoadError

_BUILTIN = "builtin://"
_FILE = "file://"


def resolve_model_folder(model: str) -> Path:
    """Return the model's folder, which exists and has a config.json.

    Args:
        model: a path, `file://PATH`, or `builtin://tiny`.

    Raises:
        ModelLoadError: one line with what is wrong and what to do.
    """
    if model.startswith(_BUILTIN):
        return _with_config(builtin_model_path(model.removeprefix(_BUILTIN)), model)
    folder = Path(unquote(model.removeprefix(_FILE)) if model.startswith(_FILE) else model).expanduser()
    if not folder.exists():
        raise ModelLoadError(f"{model}: no such folder; give a folder in Hugging Face layout, or builtin://tiny")
    if not folder.is_dir():
        raise ModelLoadError(
            f"{model}: is a file; give a .gguf file, or the folder that holds config.json and the .safetensors files"
        )
    return _with_config(folder, model)


def _with_config(folder: Path, model: str) -> Path:
    if not (folder / "config.json").is_file():
        hint = "the folder is empty" if not any(folder.iterdir()) else "it has no config.json"
        raise ModelLoadError(
            f"{model}: {hint}; give a folder in Hugging Face layout (config.json, .safetensors, tokenizer.json)"
        )
    return folder


def served_names(model: str, given: str | None) -> tuple[str, ...]:
    """Return the names that clients may use, the model's own first: as given, else the last part of the path.

    Raises:
        ConfigError: a name is empty.
    """
    if not given:
        return (Path(model.removeprefix(_BUILTIN).removeprefix(_FILE)).expanduser().resolve().name,)
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    if "" in names:
        raise ConfigError(f"served_model_name is {given[:80]!r}: give names with single commas between them")
    return names
