"""The cache of hub models that this user's tools share: what transformers or vLLM brought is not downloaded again.

    CACHE/models--org--name/blobs/DIGEST             contents, under their SHA-256 or git name
    CACHE/models--org--name/snapshots/COMMIT/FILE    links to them: one revision
    CACHE/models--org--name/refs/BRANCH              the commit that a branch means here
    .../snapshots/COMMIT/.pagefleet.json             our manifest: every file of this revision was verified

The layout is huggingface_hub's (`$HF_HOME/hub`). Contents are named by what they must come to, so they can be verified
without the hub. Names that come from a hub are never used before they are known to be names.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path

from pagefleet_download.errors import BadSettings, ModelNotFound
from pagefleet_download.manifest import (
    MANIFEST,
    STREAM_MANIFEST,
    TEXT_MANIFEST,
    InstalledFile,
    Manifest,
    decode,
    encode,
)
from pagefleet_download.open_source import read_file
from pagefleet_download.settings import Parts
from pagefleet_download.source import Algorithm, Digest, Listing, RemoteFile
from pagefleet_download.target_folder import read_small, regular_size, same_bytes, write_whole

_MANIFESTS: Mapping[Parts, str] = {"all": MANIFEST, "text": TEXT_MANIFEST, "small": STREAM_MANIFEST}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*(\.\.|//|@\{))[\w][\w./+=@-]{0,199}(?<![./])", re.ASCII)
_DIGESTS: Mapping[Algorithm, re.Pattern[str]] = {
    "sha256": re.compile(r"[0-9a-f]{64}"),
    "git-sha1": re.compile(r"[0-9a-f]{40}"),
}


class HubCache:
    """One repository in the cache, as a Target of downloads and, by `snapshot`, as a folder to load."""

    def __init__(
        self,
        root: Path,
        repository: str,
        revision: str | None,
        settled: bool = True,
        parts: Parts = "all",
        gguf: str | None = None,
    ) -> None:
        """`settled`: a branch keeps the commit that it means here. `parts`: it is finished with these; `gguf`: or with
        one of its models, as `choose_gguf` has it.

        Raises:
            BadSettings: the revision can be no name of a branch, a tag or a commit.
        """
        if revision and not _REVISION.fullmatch(revision):
            raise BadSettings(f"{revision[:80]!a} is no revision: give a branch, a tag or a commit")
        self._root = root
        self._repository = repository
        self._revision = revision or "main"
        self._settled = settled or bool(_COMMIT.fullmatch(self._revision))
        own = f".pagefleet.gguf-{hashlib.sha256(gguf.encode()).hexdigest()[:12]}.json" if gguf else None
        self._manifest_name = own or _MANIFESTS[parts]
        self.path = root / f"models--{repository.replace('/', '--')}"
        self.lock_path = root / ".locks" / self.path.name / "pagefleet.lock"

    def commit(self) -> str | None:
        """What the revision means here; None where it means nothing."""
        if _COMMIT.fullmatch(self._revision):
            return self._revision
        found = read_small(self.path / "refs" / self._revision)
        text = found.decode("ascii", errors="replace").strip() if found else ""
        return text if _COMMIT.fullmatch(text) else None

    def snapshot(self, commit: str) -> Path:
        """The folder of one revision.

        Raises:
            BadSettings: the hub gave something else than a commit.
        """
        if not _COMMIT.fullmatch(commit):
            raise BadSettings(f"the hub calls the revision {commit[:80]!a}, which is no commit: check the endpoint")
        return self.path / "snapshots" / commit

    def finished(self, source: str, revision: str | None) -> Manifest | None:
        commit = self.commit() if self._settled else None
        if commit is None:
            return None
        # A whole model has its text too.
        names = {self._manifest_name, *([MANIFEST] if self._manifest_name == TEXT_MANIFEST else [])}
        return next((found for name in names if (found := self._finished(source, commit, name))), None)

    def _finished(self, source: str, commit: str, name: str) -> Manifest | None:
        found = read_small(self.snapshot(commit) / name)
        manifest = decode(found, Manifest) if found else None
        if manifest is None or (manifest.source, manifest.facts.revision) != (source, commit):
            return None
        return manifest if all(self._is_there(commit, file) for file in manifest.files) else None

    def _is_there(self, commit: str, file: InstalledFile) -> bool:
        path = self.snapshot(commit) / file.folder / file.name
        content = self.content(path)
        return content is not None and content.stat().st_size == file.size and _blob_name(path) == _digest(file)

    def sweep(self) -> None:
        """Other tools work here too: what they left is theirs."""

    def create(self) -> None:
        for folder in (self.path / "blobs", self.path / "snapshots", self.path / "refs", self.lock_path.parent):
            folder.mkdir(parents=True, exist_ok=True)

    def recover(self) -> None:
        """Nothing is ever half done: contents come by renames, and the manifest comes last."""

    def manifest(self) -> Manifest | None:
        """None: what a content must come to is its name."""
        return None

    def refuse_strangers(self, manifest: Manifest | None, files: Iterable[RemoteFile]) -> None:
        """A revision has a folder of its own, so no weights of another lie in it."""

    def make_room(self, files: Iterable[RemoteFile]) -> None:
        """Parts of others stay: their runs may go on."""

    def present(self, manifest: Manifest | None, file: RemoteFile) -> InstalledFile | None:
        content = self.content(self._blob(file))
        if content is None or content.stat().st_size != file.size:
            return None
        return same_bytes(content, file)

    def part(self, file: RemoteFile) -> Path:
        # Not as other tools call theirs: two programs must not write one file.
        return self._blob(file).with_suffix(".pagefleet.incomplete")

    def part_size(self, file: RemoteFile) -> int:
        return min(file.size, regular_size(self.part(file)) or 0)

    def install(self, manifest: Manifest, before: Manifest | None) -> None:
        commit = manifest.facts.revision
        folder = self.snapshot(commit)
        folder.mkdir(exist_ok=True)
        for file in manifest.files:
            blob = self._blob_of(file)
            part = blob.with_suffix(".pagefleet.incomplete")
            if regular_size(part) is not None:
                part.replace(blob)
            path = folder / file.folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            link(path, Path(os.path.relpath(blob, path.parent)))
        if self._revision != commit:
            ref = self.path / "refs" / self._revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_whole(ref, commit.encode())
        write_whole(folder / self._manifest_name, encode(manifest))

    def local_copy(self) -> SnapshotSource:
        """What is here of the revision, read without the hub.

        Raises:
            ModelNotFound: nothing is.
        """
        commit = self.commit()
        if commit is None or not self.snapshot(commit).is_dir():
            at = "" if self._revision == "main" else f" at {self._revision}"
            raise ModelNotFound(f"{self._repository}{at} is not in {self._root}")
        return SnapshotSource(self, commit)

    def _blob(self, file: RemoteFile) -> Path:
        digest = file.digest
        if digest is None or not _DIGESTS.get(digest.algorithm, _COMMIT).fullmatch(digest.hexdigest):
            raise BadSettings(
                f"the hub gives no digest of {file.name[:80]}, so it cannot lie in the shared cache: "
                "pagefleet download MODEL FOLDER, then give the folder"
            )
        return self.path / "blobs" / digest.hexdigest

    def _blob_of(self, file: InstalledFile) -> Path:
        return self.path / "blobs" / _digest(file)

    def content(self, path: Path) -> Path | None:
        """The file that a path of the cache stands for.

        Raises:
            BadSettings: it leads out of the cache.
        """
        try:
            found = path.resolve(strict=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not found.is_relative_to(self._root.resolve()):
            raise BadSettings(f"{path} is a link that leads out of the cache {self._root}: remove it")
        return found if stat.S_ISREG(found.stat().st_mode) else None


class SnapshotSource:
    """A revision in the cache as a source: its files and what their contents must come to."""

    def __init__(self, cache: HubCache, commit: str) -> None:
        self._cache = cache
        self._commit = commit

    async def list_files(self) -> Listing:
        folder = self._cache.snapshot(self._commit)
        found = [file for name in names_in(folder) if (file := self._look(folder, name)) is not None]
        return Listing(self._commit, tuple(found))

    def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        return read_file(self._cache.snapshot(self._commit) / file.name, start, stop)

    def _look(self, folder: Path, name_there: str) -> RemoteFile | None:
        path = folder / name_there
        content = self._cache.content(path)
        if content is None:
            return None
        name = _blob_name(path)
        digest = next((Digest(kind, name) for kind, form in _DIGESTS.items() if form.fullmatch(name)), None)
        tag = f"{digest.algorithm}:{name}" if digest else ""
        return RemoteFile(name_there, content.stat().st_size, tag, digest)


def names_in(snapshot: Path) -> list[str]:
    """The files of a revision; of those in folders the ones in GGUF."""
    below = (path.relative_to(snapshot).as_posix() for path in snapshot.glob("*/**/*.gguf"))
    return sorted({*(name for name in os.listdir(snapshot) if not name.startswith(".")), *below})


def _digest(file: InstalledFile) -> str:
    return file.tag.partition(":")[2]


def _blob_name(path: Path) -> str:
    """What a link of a snapshot calls the content. Its end may lie elsewhere, where contents have other names."""
    return Path(os.readlink(path)).name if path.is_symlink() else ""


def link(path: Path, to: Path) -> None:
    """Have `path` be a link, whatever was there; never nothing."""
    if path.is_symlink() and Path(os.readlink(path)) == to:
        return
    new = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    new.symlink_to(to)
    try:
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
