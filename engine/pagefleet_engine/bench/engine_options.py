"""Which engine a benchmark measures: a model folder or a named shape, and any setting of the engine as a flag."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefleet_protocol.settings.program import add_flag

from pagefleet_engine.bench.shapes import named_shapes, write_shape
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.local_model import with_local_model
from pagefleet_engine.settings import ENGINE_SETTINGS, engine_config

if TYPE_CHECKING:
    from pagefleet_engine.llm import LLM

_OWN = frozenset({"model", "load_format"})
_OF_THE_MODEL = ("revision", "tokenizer", "tokenizer_revision", "hf_overrides", "download_dir", "hf_token")
"""Settings that a model's folder, or its configuration, depends on."""
_PREFIX = "engine_"
"""Of parsed flags that are settings of the engine: a benchmark may have a flag of the same name as one."""


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--shape`, and a flag for each setting of the engine."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="organization/name of the hub, a folder in its layout, or builtin://tiny.")
    which.add_argument("--shape", choices=named_shapes(), help="A model of this shape with random weights.")
    group = parser.add_argument_group("engine")
    for name, setting in ENGINE_SETTINGS.items():
        if name not in _OWN:
            add_flag(group, setting, _PREFIX + name)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by name."""
    return {name.removeprefix(_PREFIX): value for name, value in vars(arguments).items() if name.startswith(_PREFIX)}


@contextmanager
def model_folder(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The folder to load and the settings that go with it; a shape's folder is gone afterwards.

    Raises:
        ConfigError: neither a model nor a shape is given, or the model cannot be had.
    """
    if arguments.model:
        settings = engine_settings(arguments)
        named = {name: settings.pop(name) for name in _OF_THE_MODEL if name in settings}
        model = with_local_model(engine_config({"model": arguments.model, **named}), os.environ).model
        found = {name: getattr(model, name) for name in ("served_model_name", "tokenizer", "hf_overrides")}
        yield model.model, {**{name: value for name, value in found.items() if value}, **settings}
        return
    if not arguments.shape:
        raise ConfigError(f"no model is given: say --model MODEL or --shape, one of {', '.join(named_shapes())}")
    with tempfile.TemporaryDirectory(prefix="pagefleet-shape-") as folder:
        path = write_shape(arguments.shape, Path(folder))
        yield str(path), {"load_format": "dummy", **engine_settings(arguments)}


def load_engine(model: str, options: dict[str, Any]) -> LLM:
    """The engine in this process, without a tokenizer: benchmarks speak token ids."""
    from pagefleet_engine.llm import LLM  # noqa: PLC0415 --help must not wait for torch

    return LLM(model, skip_tokenizer_init=True, **options)
