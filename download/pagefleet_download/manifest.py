"""`.pagefleet.json`: what a finished folder holds, and where it came from. Without it a folder is not finished."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec
from pagefleet_protocol.model_facts import ModelFacts

MANIFEST = ".pagefleet.json"
TEXT_MANIFEST = ".pagefleet.text.json"
STREAM_MANIFEST = ".pagefleet.streamed.json"
"""Where what is finished has no weights, in a folder that may get some: text alone, or all but weights."""
FORMAT_VERSION = 1

T = TypeVar("T", "Manifest", "Journal")


class InstalledFile(msgspec.Struct, frozen=True):
    """One file, as it was when it was verified."""

    name: str
    size: int
    sha256: str
    tag: str
    """The store's: changes when the content does."""
    folder: str = ""
    """See RemoteFile."""

    @property
    def part_name(self) -> str:
        """Under which the file lies while it is incomplete."""
        return part_name(self.name, self.size, self.tag)


class Manifest(msgspec.Struct, frozen=True):
    """The whole folder."""

    source: str
    requested: str
    """The revision that was asked for, e.g. a branch; empty for the main one."""
    files: tuple[InstalledFile, ...]
    facts: ModelFacts
    streamed: bool = False
    """The weights stayed where they were, and are read from there."""
    format: int = FORMAT_VERSION

    def answers(self, source: str, revision: str | None) -> bool:
        """Whether this is what is asked for. A branch is settled once: it does not move under a finished folder."""
        return self.source == source and (revision or "") in (self.requested, self.facts.revision)


class Journal(msgspec.Struct, frozen=True):
    """A verified model on its way from the parts to the folder; whoever finds it finishes the move."""

    manifest: Manifest
    stale: tuple[str, ...]
    """Files of the model that was there before, to be removed."""
    format: int = FORMAT_VERSION


def part_name(name: str, size: int, tag: str) -> str:
    """One for each content: a part is never continued with bytes of another."""
    return f"{name}.{hashlib.sha256(f'{tag}-{size}'.encode()).hexdigest()[:16]}.part"


def encode(document: Manifest | Journal) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode(data: bytes, kind: type[T]) -> T | None:
    """As it was written; None for anything else, such as a newer format or a name that leads out of the folder."""
    try:
        document = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    known = document.format == FORMAT_VERSION and all(map(_lies_in_the_folder, _names(document)))
    return document if known else None


def streamed_from(folder: Path) -> Manifest | None:
    """Where the weights are of a model of which the folder has all else; None where it says nothing of the kind."""
    for name in (STREAM_MANIFEST, MANIFEST):
        path = folder / name
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        manifest = decode(data, Manifest)
        if manifest is not None and manifest.streamed:
            return manifest
    return None


def _names(document: Manifest | Journal) -> tuple[str, ...]:
    if isinstance(document, Journal):
        return (*_names(document.manifest), *document.stale)
    folders = {part for file in document.files for part in file.folder.split("/") if file.folder}
    return (*(file.name for file in document.files), *folders)


def _lies_in_the_folder(name: str) -> bool:
    """Others may write to a shared volume: a name there must not lead out of it."""
    return name not in ("", "..") and name == PurePosixPath(name).name and "\0" not in name
