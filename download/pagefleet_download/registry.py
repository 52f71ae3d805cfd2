"""`oci://registry/repository:tag`: a model that lies in a container registry as files, as `oras push` and ModelPack put
them there: each file is a blob under its own name and SHA-256.

An image, whose layers are archives, is for a cluster to mount. Source: the OCI distribution and image specifications,
the token authentication of the Distribution project, the CNCF's model specification.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from yarl import URL

from pagefleet_download.errors import (
    AccessDenied,
    BadModel,
    BadSettings,
    ChecksumMismatch,
    DownloadError,
    Interrupted,
    ModelNotFound,
    said,
)
from pagefleet_download.guarded_http import GuardedHttp, bearer, open_guarded, retry_after
from pagefleet_download.source import Digest, Listing, RemoteFile

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_MAX_MANIFEST_BYTES = 4 << 20
_MAX_TOKEN_BYTES = 1 << 20
_NAMES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
"""Annotations of a layer that is a file."""
_ARCHIVES = (".tar", "+gzip", ".gzip", "+zstd", ".zstd", "+tar")
_SHA256 = re.compile("sha256:([0-9a-f]{64})")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_REMEDY = "`docker login` or `oras login` first (auths of ~/.docker/config.json; credential helpers are not asked)"


class _Layer(msgspec.Struct, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] | None = None


class _Manifest(msgspec.Struct, rename="camel"):
    layers: list[_Layer] | None = None
    manifests: list[_Layer] | None = None


class RegistrySource:
    """The files of one artifact."""

    def __init__(self, registry: str, repository: str, reference: str, http: GuardedHttp, login: str) -> None:
        """`reference` is a tag or a digest; `login` the header's value for the registry's own account, or empty."""
        self._name = f"{registry}/{repository}"
        self._root = f"{_address(registry)}/v2/{repository}"
        self._repository = repository
        self._reference = reference
        self._http = http
        self._login = login
        self._challenge = ""
        """What the registry wants of who comes without a token."""

    async def list_files(self) -> Listing:
        """Settles the tag: the revision is the SHA-256 of the manifest that it means."""
        data = await self._get(f"manifests/{self._reference}", {"Accept": _MANIFEST})
        found = hashlib.sha256(data).hexdigest()
        wanted = _SHA256.fullmatch(self._reference)
        if wanted and wanted[1] != found:
            raise ChecksumMismatch(f"{self._name} has another manifest than {self._reference}: look at proxies")
        try:
            manifest = msgspec.json.decode(data, type=_Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadSettings(f"{self._name} does not answer as a registry does ({said(error)}): check it") from error
        if manifest.layers is None:
            raise BadModel(f"{self._name} is an index of images: give the digest of one of its manifests")
        files = tuple(file for layer in manifest.layers if (file := _remote_file(layer)) is not None)
        if not files:
            raise BadModel(
                f"{self._name} is an image, whose layers are archives, which a cluster mounts: push the files "
                "themselves (`oras push` with the folder's files), or give a folder"
            )
        return Listing(found[:40], files)

    async def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        """Where a registry ignores Range, what was not asked for is read and thrown away."""
        if not self._http.credentials and self._challenge:
            await self._log_in()
        headers = {} if (start, stop) == (0, file.size) else {"Range": f"bytes={start}-{stop - 1}"}
        url = URL(f"{self._root}/blobs/{file.tag}", encoded=True)
        async for chunk in self._http.read(url, headers, start, file.name, self._expired):
            yield chunk

    async def _get(self, path: str, headers: Mapping[str, str]) -> bytes:
        url = URL(f"{self._root}/{path}", encoded=True)
        try:
            return await self._http.read_all(url, _MAX_MANIFEST_BYTES, "the manifest", self._wanting, headers)
        except _Challenged:
            await self._log_in()
            return await self._http.read_all(url, _MAX_MANIFEST_BYTES, "the manifest", self._refusal, headers)

    async def _log_in(self) -> None:
        """Get what the registry wants: its account's header, or a token from where it says."""
        kind, _, rest = self._challenge.partition(" ")
        if kind.lower() == "basic" and self._login:
            self._http.credentials = {"Authorization": self._login}
            return
        fields = dict(_CHALLENGE.findall(rest))
        if kind.lower() != "bearer" or "realm" not in fields:
            raise self._refusal(401, {})
        scope = fields.get("scope") or f"repository:{self._repository}:pull"
        query = {"scope": scope, "service": fields.get("service", "")}
        headers = {"Authorization": self._login} if self._login else {}
        place = self._http.elsewhere(fields["realm"]).update_query(query)
        data = await self._http.read_all(place, _MAX_TOKEN_BYTES, "a token", self._refusal, headers)
        try:
            answer = msgspec.json.decode(data, type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer = {}
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise BadSettings(f"{self._name}: {place.host} gives no token: check the registry")
        self._http.credentials = bearer(token)

    def _wanting(self, status: int, headers: Mapping[str, str]) -> DownloadError | Interrupted:
        if status == 401:
            self._challenge = headers.get("www-authenticate", "")
            return _Challenged()
        return self._refusal(status, headers)

    def _expired(self, status: int, headers: Mapping[str, str]) -> DownloadError | Interrupted:
        if status == 401 and self._challenge:
            self._http.credentials = {}  # tokens last for minutes: the next attempt gets another
            return Interrupted(f"{self._name}: the token has expired")
        return self._refusal(status, headers)

    def _refusal(self, status: int, headers: Mapping[str, str]) -> DownloadError | Interrupted:
        if status in (401, 403):
            return AccessDenied(f"{self._name} refuses to give {self._reference}: {_REMEDY}")
        if status == 404:
            return ModelNotFound(f"{self._name} has no {self._reference}: check repository and tag")
        if status >= 500 or status in (408, 429):
            return Interrupted(f"{self._name} answers {status}", retry_after(headers))
        return BadSettings(f"{self._name} answers {status}: is it a registry?")


class _Challenged(DownloadError):
    """The registry wants a token."""

    reason = "AccessDenied"


@asynccontextmanager
async def open_registry(path: str) -> AsyncIterator[RegistrySource]:
    """Connect to the registry of `registry/repository:tag` or `registry/repository@sha256:...`."""
    named, _, digest = path.partition("@")
    registry, _, rest = named.partition("/")
    repository, _, tag = rest.partition(":")
    async with open_guarded(_address(registry), {}) as http:
        yield RegistrySource(registry, repository, digest or tag or "latest", http, _login(registry, os.environ))


def _address(registry: str) -> str:
    host = "registry-1.docker.io" if registry == "docker.io" else registry
    is_here = host.partition(":")[0] in ("localhost", "127.0.0.1")  # as Docker's tools do
    return f"{'http' if is_here else 'https'}://{host}"


def _login(registry: str, environment: Mapping[str, str]) -> str:
    """What `docker login` stored for the registry, as a header's value; empty where there is nothing."""
    folder = Path(environment.get("DOCKER_CONFIG") or "~/.docker").expanduser()
    key = "https://index.docker.io/v1/" if registry == "docker.io" else registry
    try:
        stored = msgspec.json.decode((folder / "config.json").read_bytes(), type=_DockerConfig).auths.get(key)
        text = stored.auth if stored else ""
        base64.b64decode(text, validate=True)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return ""
    return f"Basic {text}" if text else ""


class _Auth(msgspec.Struct):
    auth: str = ""


class _DockerConfig(msgspec.Struct):
    auths: dict[str, _Auth] = {}


def _remote_file(layer: _Layer) -> RemoteFile | None:
    """None: the layer is no file."""
    name = next((found for key in _NAMES if (found := (layer.annotations or {}).get(key))), None)
    digest = _SHA256.fullmatch(layer.digest)
    if name is None or digest is None or layer.media_type.endswith(_ARCHIVES):
        return None
    return RemoteFile(name, max(0, layer.size), layer.digest, Digest("sha256", digest[1]))
