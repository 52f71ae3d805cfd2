"""A model that is named becomes a folder on this machine, before anything is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TextIO

from pagefleet_download.errors import DownloadError
from pagefleet_download.progress import DownloadProgress, ProgressMeter
from pagefleet_protocol.model_uri import ModelUri, model_named
from pydantic_core import PydanticCustomError
from tqdm import tqdm

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.errors import ConfigError, ModelLoadError

_LOOK_S = 0.1
_BAR = "{desc}: {percentage:3.0f} %|{bar}| {n_fmt}B of {total_fmt}B {postfix}"
_BUILTIN = "builtin://"


def with_local_model(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    """Return the configuration with the model's folder for its name; a model of a store is downloaded if need be.

    Clients call a model of the hub as the hub does, and by the last part of its name. A download draws a bar where
    stderr is a terminal, and is told in the log elsewhere.

    Args:
        config: its model is as somebody wrote it.
        environment: HF_HOME, HF_TOKEN and the like.

    Raises:
        ModelLoadError: the model cannot be had; one line with what to do.
        ConfigError: a revision is given of what has none.
    """
    uri = named_model(config)
    if not uri.remote:
        return config
    with _told(config):
        return _in_folder(config, uri, _brought(uri, config.model.revision, environment))


async def bring_local_model(
    config: EngineConfig, environment: Mapping[str, str], progress: ProgressMeter
) -> EngineConfig:
    """`with_local_model` in an event loop, where somebody else looks at the progress and tells it.

    Raises:
        ModelLoadError, ConfigError: as there.
    """
    uri = named_model(config)
    if not uri.remote:
        return config
    from pagefleet_download.bring import bring_as_user  # noqa: PLC0415 only a download needs its libraries

    with _told(config):
        return _in_folder(config, uri, await bring_as_user(uri, config.model.revision, environment, progress))


@contextmanager
def _told(config: EngineConfig) -> Iterator[None]:
    name = config.model.model
    try:
        yield
    except DownloadError as error:
        hint = "" if "://" in name else f" (there is no folder {name} here either)"
        raise ModelLoadError(f"{name}: {error}{hint}") from error


def _in_folder(config: EngineConfig, uri: ModelUri, folder: Path) -> EngineConfig:
    model = config.model
    last = uri.path.rstrip("/").rpartition("/")[2]
    names = model.served_model_name or (f"{uri.path},{last}" if uri.scheme == "hf" else last)
    return replace(config, model=replace(model, model=str(folder), served_model_name=names))


def _brought(uri: ModelUri, revision: str | None, environment: Mapping[str, str]) -> Path:
    from pagefleet_download.bring import bring_and_wait  # noqa: PLC0415 only a download needs its libraries

    progress = ProgressMeter()
    if not sys.stderr.isatty():
        return bring_and_wait(uri, revision, environment, progress, logs=True)
    with drawn(progress, uri.path, sys.stderr):
        return bring_and_wait(uri, revision, environment, progress)


@contextmanager
def drawn(progress: DownloadProgress, name: str, stream: TextIO) -> Iterator[None]:
    """Draw a download in a line of a terminal, for as long as the context lasts; nothing where nothing is fetched."""
    over = Event()

    def draw() -> None:
        while progress.snapshot().phase not in ("downloading", "verifying"):
            if over.wait(_LOOK_S):
                return
        with tqdm(
            desc=name, file=stream, leave=False, unit="B", unit_scale=True, unit_divisor=1024, bar_format=_BAR
        ) as bar:
            while not over.wait(_LOOK_S):
                now = progress.snapshot()
                bar.total, bar.n = now.bytes_total, min(now.bytes_done, now.bytes_total)
                speed = tqdm.format_sizeof(progress.bytes_per_second(), "B/s", 1024)
                bar.set_postfix_str(f"{now.phase}, {speed}" if now.phase == "downloading" else now.phase)

    drawing = Thread(target=draw, name="download bar", daemon=True)
    drawing.start()
    try:
        yield
    finally:
        over.set()
        drawing.join()


def named_model(config: EngineConfig) -> ModelUri:
    """Return which model is meant; nothing is downloaded.

    Raises:
        ModelLoadError, ConfigError: it can be none, or none with a revision.
    """
    model = config.model.model
    try:
        is_builtin = model.startswith(_BUILTIN)
        uri = ModelUri("builtin", model.removeprefix(_BUILTIN)) if is_builtin else model_named(model, os.path.exists)
    except PydanticCustomError as error:
        raise ModelLoadError(str(error)) from None
    if uri.scheme != "hf":
        _check_revision(config)
    if not uri.remote:
        _check_mounted(uri)
    return uri


def _check_revision(config: EngineConfig) -> None:
    if config.model.revision is not None:
        raise ConfigError(
            f"revision is {config.model.revision[:80]!r}, and {config.model.model} is no model of the hub, which alone "
            "has revisions: leave it out"
        )


def _check_mounted(uri: ModelUri) -> None:
    if uri.scheme in ("pvc", "oci"):
        raise ModelLoadError(f"{uri.text}: only a cluster mounts {uri.scheme}://; give a folder or a model of the hub")
