"""`s3://bucket/path` and `gs://bucket/path`: object stores, and services that speak as they do (MinIO, Ceph).

Through obstore: one library without dependencies that finds credentials as each cloud's own tools do (environment, web
identity, instance). It does not retry here: `attempts` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, cast

from pagefleet_protocol.version import VERSION

from pagefleet_download.errors import (
    AccessDenied,
    BadSettings,
    ChecksumMismatch,
    DownloadError,
    Interrupted,
    ModelNotFound,
    said,
)
from pagefleet_download.selection import CONFIG
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import Digest, Listing, RemoteFile, digest_of_listing

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSStore, RetryConfig, S3Config, S3Store

_CHUNK = 1 << 18
_SAMPLE_BYTES = 1 << 20
_MD5_LENGTH = 32
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (in a cluster: keys of these names in the Secret that "
    "spec.model.secretRef names), or AWS_SKIP_SIGNATURE=true where everybody may read",
    "gs": "the file that GOOGLE_APPLICATION_CREDENTIALS names (in a cluster: key.json in the Secret that "
    "spec.model.secretRef names), or GOOGLE_SKIP_SIGNATURE=true where everybody may read",
}
_S3_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
    "AWS_REGION": "region",
}
_IDENTITY_HOSTS = ("169.254.", "metadata.google.internal")
_STATUS = re.compile(r"status code: (\d{3})")


class ObjectStoreSource:
    """The objects directly under one prefix of one bucket."""

    def __init__(self, scheme: Literal["s3", "gs"], path: str, store: S3Store | GCSStore) -> None:
        """`path` is the bucket and the prefix in it."""
        self._scheme = scheme
        self._uri = f"{scheme}://{path}"
        self._prefix = path.partition("/")[2].strip("/")
        self._store = store

    async def list_files(self) -> Listing:
        """The revision is a digest of all names, sizes and tags: stores have none of their own."""
        import obstore  # noqa: PLC0415 - slow, and not needed for other sources
        from obstore.exceptions import BaseError  # noqa: PLC0415

        try:
            found = await obstore.list_with_delimiter_async(self._store, self._prefix)
        except (BaseError, ValueError) as error:
            raise self._meaning(error) from error
        files = []
        for entry in found["objects"]:
            name = entry["path"].removeprefix(self._prefix).lstrip("/")
            files.append(_remote_file(name, entry["size"], entry["e_tag"] or ""))
        if not files:
            raise ModelNotFound(f"{self._uri} holds no object: check bucket and path, and that the model is there")
        if not await self._tags_are_md5(files):
            files = [replace(file, digest=None) for file in files]
        return Listing(digest_of_listing(files), tuple(files))

    async def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        """Only of the object that was listed: If-Match."""
        import obstore  # noqa: PLC0415
        from obstore.exceptions import BaseError, PreconditionError  # noqa: PLC0415

        try:
            found = await obstore.get_async(
                self._store,
                f"{self._prefix}/{file.name}".lstrip("/"),
                options={"range": (start, stop), **({"if_match": file.tag} if file.tag else {})},
            )
            async for chunk in found.stream(min_chunk_size=_CHUNK):
                yield bytes(chunk)
        except PreconditionError as error:
            raise ChecksumMismatch(
                f"{self._uri}/{file.name} was replaced while it was read: start again once nobody writes there"
            ) from error
        except (BaseError, ValueError) as error:
            raise self._meaning(error) from error

    async def _tags_are_md5(self, files: list[RemoteFile]) -> bool:
        """Whether tags that look like MD5 are: objects encrypted with a customer's key have other tags of that length.

        The configuration is read and compared. What differs in the same way twice was not damaged on the way.
        """
        sample = next((file for file in files if file.name == CONFIG and file.digest), None)
        if sample is None or sample.digest is None or not 0 < sample.size <= _SAMPLE_BYTES:
            return True
        first = await self._digest(sample, sample.digest)
        if first == sample.digest:
            return True
        if await self._digest(sample, sample.digest) != first:
            raise Interrupted(f"{self._uri}/{sample.name} arrived damaged")
        return False

    async def _digest(self, file: RemoteFile, like: Digest) -> Digest:
        hasher = like.hasher(file.size)
        async for chunk in self.read(file, 0, file.size):
            hasher.update(chunk)
        return Digest(like.algorithm, hasher.hexdigest())

    def _meaning(self, error: Exception) -> DownloadError | Interrupted:
        from obstore.exceptions import InvalidPathError, NotFoundError, PermissionDeniedError, UnauthenticatedError  # noqa: PLC0415

        text = said(error)
        status = _status(text)  # of a listing the library tells no more than that it failed
        if any(host in text for host in _IDENTITY_HOSTS):
            message = (
                f"{self._uri}: no credentials are in the environment, and this machine has no identity to get some by: "
                f"put them into {_CREDENTIALS[self._scheme]} ({text})"
            )
            return AccessDenied(message) if 400 <= status < 500 else Interrupted(message)
        if isinstance(error, NotFoundError) or status == 404:
            return ModelNotFound(f"{self._uri} does not exist: check bucket and path ({text})")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
            return AccessDenied(
                f"the store refuses to give {self._uri}: put credentials that may list and read it into "
                f"{_CREDENTIALS[self._scheme]} ({text})"
            )
        if isinstance(error, InvalidPathError | ValueError):
            return BadSettings(f"{self._uri} is no path of objects ({text}): correct it")
        if "configured region" in text:
            return BadSettings(f"{self._uri} is in another region: set AWS_REGION ({text})")
        return Interrupted(f"{self._uri}: {text}")


@asynccontextmanager
async def open_object_store(
    scheme: Literal["s3", "gs"], path: str, settings: DownloadSettings
) -> AsyncIterator[ObjectStoreSource]:
    """Find the credentials in the environment, and the bucket."""
    from obstore.exceptions import BaseError  # noqa: PLC0415
    from obstore.store import GCSStore, S3Store  # noqa: PLC0415

    bucket = path.partition("/")[0]
    endpoint = (settings.endpoint or "").rstrip("/")
    client: ClientConfig = {
        "user_agent": f"pagefleet/{VERSION}",
        "timeout": timedelta(days=30),  # of a whole transfer; a stalled one is noticed elsewhere
        "connect_timeout": timedelta(seconds=20),
    }
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    no_retries: RetryConfig = {"max_retries": 0}
    try:
        store: S3Store | GCSStore
        if scheme == "s3":
            config = _s3_config(endpoint, os.environ)
            if settings.web_identity:
                config["skip_signature"] = False
            store = S3Store(
                bucket,
                config=config,
                client_options=client,
                retry_config=no_retries,
            )
        else:
            store = GCSStore(
                bucket,
                config={"base_url": endpoint} if endpoint else {},
                client_options=client,
                retry_config=no_retries,
            )
    except (BaseError, ValueError) as error:
        raise BadSettings(
            f"{scheme}://{path} cannot be opened ({said(error)}): check credentials and endpoint"
        ) from error
    yield ObjectStoreSource(scheme, path, store)


def _s3_config(endpoint: str, environment: Mapping[str, str]) -> S3Config:
    """The endpoint, and the credentials without the line end that a Secret of a file has: the library panics there.

    Raises:
        BadSettings: a variable cannot be what it should; its value is not repeated.
    """
    found = {"endpoint": endpoint} if endpoint else {}
    for variable, key in _S3_VARIABLES.items():
        value = environment.get(variable, "").strip()
        if not value.isascii() or not value.isprintable() or " " in value:
            raise BadSettings(
                f"{variable} holds more than one value (a space, a line break?): put the value alone into it"
            )
        if value:
            found[key] = value
    return cast("S3Config", found)


def _remote_file(name: str, size: int, tag: str) -> RemoteFile:
    bare = tag.strip('"')
    # Objects that were uploaded in parts have "<digest of digests>-<parts>": nothing to compare the bytes with.
    is_md5 = len(bare) == _MD5_LENGTH and all(letter in "0123456789abcdef" for letter in bare)
    return RemoteFile(name, size, tag, Digest("md5", bare) if is_md5 else None)


def _status(text: str) -> int:
    found = _STATUS.search(text)
    return int(found[1]) if found else 0
