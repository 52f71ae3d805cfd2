"""What a folder of blobs says about itself: `manifest.json`, with the shape that all its blocks have.

A folder belongs to one shape. So an engine with another model, type or block size is told so when it starts, and never
finds a folder full of blocks that it cannot use.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

import msgspec
from pagefleet_protocol.kv_blob import KvShape

from pagefleet_kv.errors import KVConfigError

MANIFEST = "manifest.json"
MANIFEST_LOCK = f"{MANIFEST}.lock"
"""Held by whoever makes the manifest, for as long as that takes."""
FOLDER_VERSION = 1
MAX_MANIFEST_BYTES = 64 * 1024


class _Version(msgspec.Struct, frozen=True):
    """Read before the rest, which another version may spell differently."""

    pagefleet_kv_folder: int


class _Manifest(_Version, frozen=True, kw_only=True, forbid_unknown_fields=True):
    shape: KvShape


class FolderClaim:
    """A folder that is known to be of this engine's shape; while it is held alone, nobody else can claim it.

    The claim is a lock on the open manifest: the system gives it back when the process ends, however that happens.
    """

    def __init__(self, folder: Path, file_descriptor: int) -> None:
        self.folder = folder
        self._file_descriptor: int | None = file_descriptor

    def release(self) -> None:
        """Let others have it; may be called twice."""
        if self._file_descriptor is not None:
            os.close(self._file_descriptor)
            self._file_descriptor = None


def claim_folder(folder: Path, shape: KvShape, *, alone: bool) -> FolderClaim:
    """Make the folder one of this shape, or check that it is.

    Args:
        folder: it is made where it does not exist, and must be empty or such a folder where it does.
        shape: of this engine's blocks.
        alone: share it with nobody, for one who counts what is in it.

    Raises:
        KVConfigError: it cannot be used; the message says why and what to do.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST).exists():
            _make_manifest(folder, shape)
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise KVConfigError(f"kv_offload_dir {folder} cannot be used ({error.strerror}): give another folder") from None
    claim = FolderClaim(folder, descriptor)
    try:
        _check_manifest(folder, descriptor, shape)
        _lock(folder, descriptor, alone=alone)
    except KVConfigError:
        claim.release()
        raise
    return claim


def _make_manifest(folder: Path, shape: KvShape) -> None:
    """Write it, unless another engine does meanwhile: claims lock that file, so none in place is ever replaced."""
    _refuse_foreign(folder)
    descriptor = os.open(folder / MANIFEST_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not (folder / MANIFEST).exists():
            _write_manifest(folder, shape)
    finally:
        os.close(descriptor)


def _refuse_foreign(folder: Path) -> None:
    # Another engine may be writing its manifest now, or have ended amid that.
    names = (name for name in sorted(os.listdir(folder)) if not name.startswith(MANIFEST))
    foreign = next((name for name in names if name != "lost+found"), None)
    # Its blocks come after its manifest: where that is here by now, they are no stranger's.
    if foreign is not None and not (folder / MANIFEST).exists():
        raise KVConfigError(f"kv_offload_dir {folder} holds other files ({foreign}): give an empty or a new folder")


def _write_manifest(folder: Path, shape: KvShape) -> None:
    encoded = msgspec.json.encode(_Manifest(FOLDER_VERSION, shape=shape))
    unfinished = folder / f"{MANIFEST}.{secrets.token_hex(8)}"
    unfinished.write_bytes(msgspec.json.format(encoded) + b"\n")
    unfinished.replace(folder / MANIFEST)


def _check_manifest(folder: Path, descriptor: int, shape: KvShape) -> None:
    data = os.read(descriptor, MAX_MANIFEST_BYTES)
    try:
        version = msgspec.json.decode(data, type=_Version).pagefleet_kv_folder
        if version != FOLDER_VERSION:
            raise KVConfigError(
                f"kv_offload_dir {folder} is of version {version}, this engine's is {FOLDER_VERSION}: "
                "give another folder, or delete it"
            )
        theirs = msgspec.json.decode(data, type=_Manifest).shape
    except msgspec.MsgspecError as error:
        raise KVConfigError(f"kv_offload_dir {folder}: {MANIFEST} is damaged ({error}): delete the folder") from None
    if theirs != shape:
        raise KVConfigError(
            f"kv_offload_dir {folder} holds K/V of another model or setting ({shape.differences(theirs)}): "
            "give another folder, or delete it"
        )


def _lock(folder: Path, descriptor: int, *, alone: bool) -> None:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise KVConfigError(
            f"kv_offload_dir {folder} is used by another engine or connector: give each a folder of its own"
        ) from None
    except OSError as error:
        raise KVConfigError(
            f"kv_offload_dir {folder} is on a file system without file locks ({error.strerror}): give another folder"
        ) from None
