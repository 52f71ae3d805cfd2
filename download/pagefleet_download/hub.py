"""`hf://organization/name`: the Hugging Face Hub, or a mirror of it.

Plain HTTP: a listing with sizes and digests, then bytes with Range, so that a cut transfer goes on where it was.
Source: the documentation of the Hub's API.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec
from yarl import URL

from pagefleet_download.errors import (
    AccessDenied,
    BadSettings,
    DownloadError,
    Interrupted,
    ModelNotFound,
    said,
)
from pagefleet_download.guarded_http import GuardedHttp, bearer, open_guarded, retry_after
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import Digest, Listing, RemoteFile
from pagefleet_download.xet import LARGE, WELL_KNOWN_HUB, fetch_by_xet

_MAX_LISTING_BYTES = 64 << 20
_GIT_SHA1_LENGTH = 40
_REPOSITORY = re.compile(r"(?!.*(--|\.\.))[\w.-]{1,96}/[\w.-]{1,96}(?<!\.git)(?<![-.])", re.ASCII)
_TOKEN = "HF_TOKEN or `hf auth login` (in a cluster: a key of the Secret that spec.model.secretRef names)"  # noqa: S105


class _Lfs(msgspec.Struct):
    sha256: str
    size: int


class _File(msgspec.Struct, rename={"blob_id": "blobId"}):
    rfilename: str
    size: int | None = None
    blob_id: str | None = None
    lfs: _Lfs | None = None


class _Repository(msgspec.Struct):
    """What the API says of one at a revision."""

    sha: str
    siblings: list[_File] = []


class HubSource:
    """One repository at one revision."""

    def __init__(self, model: HubModel, http: GuardedHttp, settings: DownloadSettings) -> None:
        self._model = model
        self._http = http
        self._settings = settings
        self._commit = model.revision

    async def list_files(self) -> Listing:
        """Settles the revision: all that is read afterwards is of the commit found here."""
        model = self._model
        url = self._url(f"api/models/{model.repository}/revision/{quote(model.revision, safe='')}?blobs=true")
        data = await self._http.read_all(url, _MAX_LISTING_BYTES, "the list of files", self._refusal)
        try:
            found = msgspec.json.decode(data, type=_Repository)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadSettings(
                f"{model.endpoint} does not answer as a hub does ({said(error)}): check the endpoint"
            ) from error
        self._commit = found.sha
        return Listing(found.sha, tuple(_remote_file(file, model) for file in found.siblings))

    def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        """Where a server ignores Range, what was not asked for is read and thrown away."""
        headers = {} if (start, stop) == (0, file.size) else {"Range": f"bytes={start}-{stop - 1}"}
        return self._http.read(self._url(self._path(file)), headers, start, file.name, self._refusal)

    async def fetch(self, file: RemoteFile, path: Path, add_bytes: Callable[[int], None]) -> int | None:
        """By Xet, where the well-known hub is asked."""
        xet, token = self._settings.xet, self._settings.token
        if xet is None or self._model.endpoint != WELL_KNOWN_HUB or file.size < LARGE:
            return None
        return await fetch_by_xet(xet, f"{WELL_KNOWN_HUB}/{self._path(file)}", path, file.size, token, add_bytes)

    def _path(self, file: RemoteFile) -> str:
        # Of the commit: a branch may have moved since it was listed.
        return f"{self._model.repository}/resolve/{quote(self._commit, safe='')}/{quote(file.name)}"

    def _url(self, path: str) -> URL:
        return URL(f"{self._model.endpoint}/{path}", encoded=True)

    def _refusal(self, status: int, headers: Mapping[str, str]) -> DownloadError | Interrupted:
        return hub_refusal(self._model, status, headers)


@asynccontextmanager
async def open_hub(repository: str, settings: DownloadSettings) -> AsyncIterator[HubSource]:
    """Connect to the hub, or to the mirror that the settings name."""
    endpoint = checked_endpoint(settings.endpoint or WELL_KNOWN_HUB)
    check_token(settings.token or "", "HF_TOKEN")
    if settings.offline:
        raise BadSettings("HF_HUB_OFFLINE is set, so nothing can be downloaded: unset it")
    if not _REPOSITORY.fullmatch(repository):
        raise BadSettings(f"hf://{repository} is no name of a repository: check the name")
    model = HubModel(repository, settings.revision or "main", endpoint, has_token=bool(settings.token))
    async with open_guarded(endpoint, bearer(settings.token)) as http:
        yield HubSource(model, http, settings)


def checked_endpoint(endpoint: str) -> str:
    """Return the URL of a hub without the slash at its end.

    Raises:
        BadSettings: it is none, or has credentials in it.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("https", "http") or not parts.hostname or "@" in parts.netloc:
        shown = endpoint.rpartition("@")[2][:80]
        raise BadSettings(f"the endpoint {shown} is no URL of a hub: give https://host, credentials in HF_TOKEN alone")
    return endpoint.rstrip("/")


def check_token(token: str, variable: str) -> None:
    """Refuse what is none: libraries refuse such a header too, some in words that repeat it."""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise BadSettings(f"{variable} holds more than a token (a space, a line break?): put the token alone into it")


def _remote_file(file: _File, model: HubModel) -> RemoteFile:
    size = file.lfs.size if file.lfs else file.size
    if size is None:
        raise BadSettings(f"{model.endpoint} gives no sizes of files, so it is no full mirror of a hub: use another")
    digest = None
    if file.lfs:
        digest = Digest("sha256", file.lfs.sha256)
    elif file.blob_id and len(file.blob_id) == _GIT_SHA1_LENGTH:
        digest = Digest("git-sha1", file.blob_id)
    tag = f"{digest.algorithm}:{digest.hexdigest}" if digest else file.blob_id or ""
    return RemoteFile(file.rfilename, size, tag, digest)


@dataclass(frozen=True, slots=True)
class HubModel:
    """What was asked for."""

    repository: str
    revision: str
    endpoint: str
    has_token: bool


def hub_refusal(model: HubModel, status: int, headers: Mapping[str, str]) -> DownloadError | Interrupted:
    """The error for an answer with `status` of 300 or more; header names in lower case.

    The hub names its reasons in the header X-Error-Code; a mirror may not.
    """
    code = headers.get("x-error-code", "")
    if code in ("GatedRepo", "RevisionNotFound", "RepoNotFound") or status == 404:
        return _missing_or_closed(model, code)
    if status in (401, 403):
        return AccessDenied(f"{model.endpoint} refuses to give {model.repository}: {_token_remedy(model)}")
    if status == 429:
        remedy = "use a mirror (--endpoint)" if model.has_token else "a token in HF_TOKEN raises the limit"
        return Interrupted(f"{model.endpoint} answers 429 Too Many Requests; {remedy}", retry_after(headers))
    if status >= 500 or status == 408:
        return Interrupted(f"{model.endpoint} answers {status}", retry_after(headers))
    return BadSettings(f"{model.endpoint} answers {status} for {model.repository}: is it the URL of a hub?")


def _missing_or_closed(model: HubModel, code: str) -> DownloadError:
    match code:
        case "GatedRepo":
            return AccessDenied(f"the repository {model.repository} is gated: {_gated_remedy(model)}")
        case "RevisionNotFound":
            return ModelNotFound(
                f"the repository {model.repository} has no revision {model.revision}: give one of its branches, tags "
                "or commits"
            )
        case "EntryNotFound":
            return ModelNotFound(f"{model.repository} at {model.revision} has lost a file that it listed: start again")
        case _:
            return ModelNotFound(
                f"the repository {model.repository} does not exist on {model.endpoint}, or is private: check the name; "
                f"if it is private, put a token that may read it into {_TOKEN}"
            )


def _gated_remedy(model: HubModel) -> str:
    page = f"{model.endpoint}/{model.repository}"
    if model.has_token:
        return f"the account of the given token has no access; accept the licence at {page}, or give another token"
    return f"accept the licence at {page}, then put a token of that account into {_TOKEN}"


def _token_remedy(model: HubModel) -> str:
    if model.has_token:
        return f"the token is wrong, has expired or may not read it; put another one into {_TOKEN}"
    return f"put a token that may read it into {_TOKEN}"
