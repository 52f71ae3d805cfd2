"""The folder that engines read, and how a model gets into it.

    FOLDER/*                the model's files: complete, verified, of one revision
    FOLDER/.pagefleet.json  the manifest; as long as it is missing, the folder is not finished
    FOLDER/.pagefleet.lock  held by the process that works here
    FOLDER/.incoming/       parts of the next revision, until all of them are complete and verified
    FOLDER/.compiled/       empty: a place for what engines compile

All lies inside FOLDER because a mounted volume cannot be renamed. Between two revisions the folder is without manifest
for the few renames that replace one by the other; a crash there is mended by the next run, from the journal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from pagefleet_protocol.kube_names import COMPILED_FOLDER

from pagefleet_download.errors import BadSettings
from pagefleet_download.manifest import MANIFEST, InstalledFile, Journal, Manifest, decode, encode, part_name
from pagefleet_download.selection import is_weights, name_some
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import RemoteFile

_log = logging.getLogger(__name__)
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})
_INCOMING = ".incoming"
_JOURNAL = "journal.json"
_LOCK = ".pagefleet.lock"
_MAX_MANIFEST_BYTES = 16 << 20
_CHUNK = 1 << 22


class TargetFolder:
    """Its methods wait for the disk: call them from a thread, and only while the lock is held. They raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_path = path / _LOCK
        self._incoming = path / _INCOMING

    def create(self) -> None:
        """Make the folder where there is none; needs no lock."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._make_compiled()

    def finished(self, source: str, revision: str | None) -> Manifest | None:
        """The manifest, if the folder has what is asked for and every file its size; needs no lock."""
        manifest = self.manifest()
        if manifest is None or not manifest.answers(source, revision):
            return None
        whole = all(regular_size(self.path / file.name) == file.size for file in manifest.files)
        return manifest if whole else None

    def recover(self) -> None:
        """Finish what another run could not: the move of a verified model into the folder."""
        if self._incoming.is_symlink():
            raise BadSettings(f"{self._incoming} is a link: remove it")
        found = read_small(self._incoming / _JOURNAL)
        if journal := decode(found, Journal) if found else None:
            self._move(journal)

    def sweep(self) -> None:
        """Remove parts that a killed run left in a folder that is finished without them; needs no lock.

        Whoever works here now keeps its parts.
        """
        self._make_compiled()
        if self._incoming.is_symlink() or not self._incoming.is_dir():
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not (self._incoming / _JOURNAL).exists():
                    shutil.rmtree(self._incoming, ignore_errors=True)
            finally:
                os.close(descriptor)

    def manifest(self) -> Manifest | None:
        """As the last run wrote it, whatever has happened to the files since."""
        found = read_small(self.path / MANIFEST)
        return decode(found, Manifest) if found else None

    def present(self, manifest: Manifest | None, file: RemoteFile) -> InstalledFile | None:
        """The file in the folder, if it has the content of `file`: by the manifest, else by its bytes."""
        path = self.path / file.name
        if regular_size(path) != file.size:
            return None
        for installed in manifest.files if manifest else ():
            if file.tag and (installed.name, installed.size, installed.tag) == (file.name, file.size, file.tag):
                return installed
        return same_bytes(path, file) if file.digest else None

    def refuse_strangers(self, manifest: Manifest | None, files: Iterable[RemoteFile]) -> None:
        """Weights that nobody downloaded would be served beside the model's, or instead of them.

        Raises:
            BadSettings: there are some.
        """
        ours = {file.name for file in files} | {file.name for file in (manifest.files if manifest else ())}
        strangers = sorted(name for name in os.listdir(self.path) if is_weights(name) and name not in ours)
        if strangers:
            raise BadSettings(
                f"{self.path} has {name_some(strangers)}, which are not of this model and were not downloaded by "
                "pagefleet: remove them, or give an empty folder"
            )

    def part(self, file: RemoteFile) -> Path:
        """Where the file lies until the model is complete."""
        return self._incoming / part_name(file.name, file.size, file.tag)

    def part_size(self, file: RemoteFile) -> int:
        """How much of the file is here already; 0 where that cannot be known to be of the same content."""
        return min(file.size, regular_size(self.part(file)) or 0) if file.tag else 0

    def make_room(self, files: Iterable[RemoteFile]) -> None:
        """Prepare for parts of these files; parts of other contents go."""
        self._incoming.mkdir(exist_ok=True)
        wanted = {self.part(file).name for file in files}
        for entry in list(os.scandir(self._incoming)):
            if entry.name not in wanted and not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)

    def install(self, manifest: Manifest, before: Manifest | None) -> None:
        """Put a complete model in place of what was there before."""
        names = {file.name for file in manifest.files}
        stale = tuple(file.name for file in (before.files if before else ()) if file.name not in names)
        journal = Journal(manifest, stale)
        write_whole(self._incoming / _JOURNAL, encode(journal))
        self._move(journal)

    def _make_compiled(self) -> None:
        with contextlib.suppress(OSError):  # a folder that is finished and read-only needs none
            (self.path / COMPILED_FOLDER).mkdir(exist_ok=True)

    def _move(self, journal: Journal) -> None:
        """Every step may be done already."""
        (self.path / MANIFEST).unlink(missing_ok=True)
        for file in journal.manifest.files:
            part = self._incoming / file.part_name
            if regular_size(part) is not None:
                part.replace(self.path / file.name)
        for name in journal.stale:
            (self.path / name).unlink(missing_ok=True)
        _sync_folder(self.path)
        write_whole(self.path / MANIFEST, encode(journal.manifest))
        for entry in list(os.scandir(self._incoming)):
            os.unlink(entry.path)
        self._incoming.rmdir()


def regular_size(path: Path) -> int | None:
    """Of a file that is not a link; None where there is none."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def same_bytes(path: Path, file: RemoteFile) -> InstalledFile | None:
    """The file at `path`, if its bytes are those of `file`, which has a digest."""
    assert file.digest is not None
    own, sha256 = file.digest.hasher(file.size), hashlib.sha256()
    with path.open("rb") as opened:
        while data := opened.read(_CHUNK):
            own.update(data)
            sha256.update(data)
    if own.hexdigest() != file.digest.hexdigest:
        return None
    return InstalledFile(file.name, file.size, sha256.hexdigest(), file.tag, file.folder)


def read_small(path: Path) -> bytes | None:
    """What a file holds that is no link and no larger than a manifest; None where there is no such file."""
    size = regular_size(path)
    return path.read_bytes() if size is not None and size <= _MAX_MANIFEST_BYTES else None


def write_whole(path: Path, data: bytes) -> None:
    """Whole or not at all, also when the machine loses power."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with new.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@asynccontextmanager
async def locked(path: Path, settings: DownloadSettings) -> AsyncIterator[None]:
    """Hold an exclusive lock on a file, which stays. The system gives it back when a process dies.

    Raises:
        BadSettings: the folder's file system has no locks.
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        waited = False
        while not _try_lock(descriptor, path):
            if not waited:
                _log.info("another process works in %s: waiting until it is done", path.parent)
            waited = True
            await settings.host.sleep(settings.patience.lock_poll)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise BadSettings(
                f"the file system of {path.parent} has no file locks ({error.strerror}): use a volume that has them"
            ) from error
        raise
    return True
