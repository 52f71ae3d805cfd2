"""A folder of a model that is written whole, or not at all."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from safetensors import SafetensorError

from pagefleet_engine.errors import ConfigError

_log = logging.getLogger(__name__)
_MODE = 0o644


def check_new(output: Path, setting: str = "") -> None:
    """Refuse to write over what is there; a folder may be if it is empty.

    Args:
        output: that somebody named.
        setting: by which, to begin the message with.

    Raises:
        ConfigError: something is there, or a volume, which nothing can take the place of.
    """
    told = f"{setting} {output}".lstrip()
    try:
        if os.path.lexists(output) and (output.is_symlink() or not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"{told} exists and is no empty folder: give a new folder")
    except OSError as error:
        raise _unwritable(told, error) from error
    if output.is_mount():
        raise ConfigError(f"{told} is where a volume is mounted: give a new folder in it")


@contextmanager
def new_folder(output: Path, needed_bytes: int, setting: str = "") -> Iterator[Path]:
    """A folder beside `output` that becomes it if all goes well, and is gone else; for all users to read.

    Raises:
        ConfigError: as `check_new`, or the disk has less room than is needed, or the folder cannot be written.
    """
    check_new(output, setting)
    told = f"{setting} {output}".lstrip()
    try:
        output = Path(os.path.abspath(output))
        output.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{output.name}-"
        for left in output.parent.glob(f"{escape(prefix)}*/{escape(output.name)}"):
            _log.warning("%s is of a run that was killed, unless one goes on: remove it", left.parent)
        free = shutil.disk_usage(output.parent).free
        if free < needed_bytes:
            raise ConfigError(
                f"{told} takes {needed_bytes / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB left: make "
                "room, or give a folder on another"
            )
        with tempfile.TemporaryDirectory(prefix=prefix, dir=output.parent) as scratch:
            folder = Path(scratch) / output.name
            folder.mkdir()
            yield folder
            for file in folder.iterdir():
                file.chmod(_MODE)  # the library leaves weights to their owner alone
            folder.rename(output)
    except (OSError, SafetensorError) as error:
        raise _unwritable(told, error) from error


def _unwritable(told: str, error: Exception) -> ConfigError:
    said = " ".join(str(getattr(error, "strerror", None) or error).split())[:160]
    return ConfigError(
        f"{told} cannot be written ({said}), and nothing is left of it: make room there, or give another folder"
    )
