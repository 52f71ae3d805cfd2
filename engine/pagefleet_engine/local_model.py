"""A model that is named becomes a folder on this machine, before anything is loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import TextIO

from pagefleet_download.errors import DownloadError
from pagefleet_download.progress import DownloadProgress, ProgressMeter
from pagefleet_download.settings import Parts, Wish
from pagefleet_protocol.model_uri import ModelUri, model_named
from pydantic_core import PydanticCustomError
from tqdm import tqdm

from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.config import STREAMED, EngineConfig, default_cache_dir
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.gguf.file import read_gguf
from pagefleet_engine.gguf.folder import contents_of, folder_of, gguf_at, plain_name

_LOOK_S = 0.1
_BAR = "{desc}: {percentage:3.0f} %|{bar}| {n_fmt}B of {total_fmt}B {postfix}"
_BUILTIN = "builtin://"
_BY_MODELSCOPE = "VLLM_USE_MODELSCOPE"


def with_local_model(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    """Return the configuration with the folders of model and tokenizer for their names; what a store has is downloaded
    if need be.

    Clients call a model of the hub as the hub does, and by the last part of its name. A download draws a bar where
    stderr is a terminal, and is told in the log elsewhere.

    Args:
        config: model and tokenizer are as somebody wrote them.
        environment: HF_HOME, HF_TOKEN and the like.

    Raises:
        ModelLoadError: the model cannot be had; one line with what to do.
        ConfigError: a revision is given of what has none.
    """
    for order in _orders(config, environment):
        with _told(order):
            config = order.filled(config, _brought(order.wish, _environment(config, environment)))
    return _settled(config, environment)


async def bring_local_model(
    config: EngineConfig, environment: Mapping[str, str], progress: ProgressMeter
) -> EngineConfig:
    """`with_local_model` in an event loop, where somebody else looks at the progress and tells it.

    Raises:
        ModelLoadError, ConfigError: as there.
    """
    for order in _orders(config, environment):
        from pagefleet_download.bring import bring_as_user  # noqa: PLC0415 only a download needs its libraries

        with _told(order):
            folder = await bring_as_user(order.wish, _environment(config, environment), progress)
            config = order.filled(config, folder)
    return _settled(config, environment)


def _environment(config: EngineConfig, environment: Mapping[str, str]) -> Mapping[str, str]:
    return {**environment, "HF_TOKEN": config.model.hf_token} if config.model.hf_token else environment


def _settled(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    config = _with_folder_of_gguf(config, environment)
    tokenizer = local_tokenizer(config, environment)
    if tokenizer is None:
        return without_token(config)
    return without_token(replace(config, model=replace(config.model, tokenizer=str(tokenizer))))


def _with_folder_of_gguf(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    # A revision is of the name that the folder was brought by.
    file = named_gguf(replace(config, model=replace(config.model, revision=None)), environment)
    if file is None:
        return config
    names = config.model.served_model_name or plain_name(file)
    cache = default_cache_dir(config.execution.cache_dir)
    folder = folder_of(file, cache, with_tokenizer=config.model.tokenizer is None)
    return replace(config, model=replace(config.model, model=str(folder), served_model_name=names))


def named_gguf(config: EngineConfig, environment: Mapping[str, str]) -> Path | None:
    """Return the GGUF file that is the model, or is in its folder; None: it is no such model.

    Raises:
        ModelLoadError, ConfigError: as `named_model`, or the folder has several models.
    """
    uri = named_model(config, environment)
    return gguf_at(Path(uri.local_path)) if uri.scheme == "file" else None


def check_gguf(file: Path, *, with_tokenizer: bool) -> None:
    """Read what a GGUF file says beside its weights, of its tokenizer as well.

    Raises:
        ModelLoadError: it is damaged, or no model that runs.
    """
    contents_of(read_gguf(file), with_tokenizer=with_tokenizer)


def without_token(config: EngineConfig) -> EngineConfig:
    """Return what other processes and machines may see, of which none downloads."""
    return replace(config, model=replace(config.model, hf_token=None)) if config.model.hf_token else config


@dataclass(frozen=True, slots=True)
class _Order:
    """What a configuration wants downloaded."""

    name: str
    """As somebody wrote it."""
    wish: Wish

    def filled(self, config: EngineConfig, folder: Path) -> EngineConfig:
        """Return the configuration with the folder for the name."""
        model, uri = config.model, self.wish.uri
        if self.wish.parts == "text":
            return replace(config, model=replace(model, tokenizer=str(folder), tokenizer_revision=None))
        last = re.split("[:@]", uri.path.rstrip("/").rpartition("/")[2])[0]  # of an image without its tag
        names = model.served_model_name or (f"{uri.path},{last}" if uri.has_revisions else last)
        return replace(config, model=replace(model, model=str(folder), served_model_name=names))


def _orders(config: EngineConfig, environment: Mapping[str, str]) -> list[_Order]:
    """Return what is not on this machine, the least first: a mistake in its name is seen soon.

    Raises:
        ModelLoadError, ConfigError: a name can be none, or none with a revision.
    """
    model, found = config.model, []
    folder = Path(model.download_dir).expanduser() if model.download_dir else None
    whole: Parts = "small" if model.load_format == STREAMED else "all"
    wanted: list[tuple[str, ModelUri | None, str | None, Parts]] = [
        (model.tokenizer or model.model, named_tokenizer(config, environment), model.tokenizer_revision, "text"),
        (model.model, named_model(config, environment), model.revision, whole),
    ]
    for name, uri, revision, parts in wanted:
        if uri is not None and uri.fetchable:
            found.append(_Order(name, Wish(uri=uri, revision=revision, parts=parts, folder=folder)))
    if whole == "small" and model.hf_token:
        raise ConfigError("hf_token is not passed on to who streams weights: set the variable HF_TOKEN instead")
    return found


@contextmanager
def _told(order: _Order) -> Iterator[None]:
    name = order.name
    try:
        yield
    except DownloadError as error:
        hint = "" if "://" in name else f" (there is no folder {name} here either)"
        what = "tokenizer " if order.wish.parts == "text" else ""
        raise ModelLoadError(f"{what}{name}: {error}{hint}") from error


def _brought(wish: Wish, environment: Mapping[str, str]) -> Path:
    from pagefleet_download.bring import bring_and_wait  # noqa: PLC0415 only a download needs its libraries

    progress = ProgressMeter()
    if not sys.stderr.isatty():
        return bring_and_wait(wish, environment, progress, logs=True)
    with drawn(progress, wish.uri.path, sys.stderr):
        return bring_and_wait(wish, environment, progress)


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


def named_model(config: EngineConfig, environment: Mapping[str, str]) -> ModelUri:
    """Return which model is meant; nothing is downloaded. A name is one of ModelScope where VLLM_USE_MODELSCOPE is set.

    Raises:
        ModelLoadError, ConfigError: it can be none, or none with a revision.
    """
    return _named(config.model.model, "", config.model.revision, environment)


def named_tokenizer(config: EngineConfig, environment: Mapping[str, str]) -> ModelUri | None:
    """Return where the tokenizer is; None: with the model.

    Raises:
        ModelLoadError, ConfigError: it can be nowhere, or not with a revision.
    """
    model = config.model
    if model.tokenizer is None and model.tokenizer_revision in (None, model.revision):
        return None
    return _named(model.tokenizer or model.model, "tokenizer", model.tokenizer_revision, environment)


def local_tokenizer(config: EngineConfig, environment: Mapping[str, str]) -> Path | None:
    """Return the folder of a tokenizer that is named and is on this machine.

    Raises:
        ModelLoadError, ConfigError: there is no such folder, or as `named_tokenizer`.
    """
    uri = named_tokenizer(config, environment)
    if uri is None or uri.fetchable:
        return None
    folder = builtin_model_path(uri.path) if uri.scheme == "builtin" else Path(uri.local_path)
    if not folder.is_dir():
        raise ModelLoadError(f"tokenizer {folder}: no such folder; give one that holds tokenizer.json")
    return folder


def _named(name: str, what: str, revision: str | None, environment: Mapping[str, str]) -> ModelUri:
    try:
        is_builtin = name.startswith(_BUILTIN)
        uri = ModelUri("builtin", name.removeprefix(_BUILTIN)) if is_builtin else model_named(name, os.path.exists)
    except PydanticCustomError as error:
        raise ModelLoadError(f"{what} {error}".lstrip()) from None
    if uri.scheme == "hf" and "://" not in name and environment.get(_BY_MODELSCOPE, "").lower() in ("1", "true"):
        uri = ModelUri("modelscope", uri.path)
    if revision is not None and not uri.has_revisions:
        setting = f"{what}_revision".lstrip("_")
        raise ConfigError(
            f"{setting} is {revision[:80]!r}, and {name} is no model of the hub, which alone has revisions: leave it "
            "out"
        )
    if uri.scheme == "pvc":
        raise ModelLoadError(f"{uri.text}: only a cluster mounts pvc://; give a folder or a model of the hub")
    return uri
