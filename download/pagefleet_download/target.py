"""Where a model's files go, as a download sees it: a folder of its own, or the hub's shared cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from pagefleet_download.manifest import InstalledFile, Manifest
from pagefleet_download.source import RemoteFile


class Target(Protocol):
    """Its methods wait for the disk: call them from a thread, and only while the lock is held. They raise OSError."""

    @property
    def path(self) -> Path:
        """A folder on the volume that the files fill."""
        ...

    @property
    def lock_path(self) -> Path: ...

    def finished(self, source: str, revision: str | None) -> Manifest | None:
        """What is here, if it is what is asked for and every file has its size; needs no lock."""
        ...

    def sweep(self) -> None:
        """Remove what a killed run left beside a finished model; needs no lock."""
        ...

    def create(self) -> None:
        """Make what is missing of the place; needs no lock."""
        ...

    def recover(self) -> None:
        """Finish what another run could not."""
        ...

    def manifest(self) -> Manifest | None:
        """Of the model that was here before, whatever has happened to its files since."""
        ...

    def refuse_strangers(self, manifest: Manifest | None, files: Iterable[RemoteFile]) -> None:
        """Raise BadSettings where weights lie that nobody downloaded."""
        ...

    def make_room(self, files: Iterable[RemoteFile]) -> None:
        """Prepare for parts of these files."""
        ...

    def present(self, manifest: Manifest | None, file: RemoteFile) -> InstalledFile | None:
        """The file, if it is here with the content of `file`."""
        ...

    def part(self, file: RemoteFile) -> Path:
        """Where the file lies until the model is complete."""
        ...

    def part_size(self, file: RemoteFile) -> int:
        """How much of the file is here already."""
        ...

    def install(self, manifest: Manifest, before: Manifest | None) -> None:
        """Put a complete model in place."""
        ...
