"""`modelscope://organization/name`: ModelScope, whose models have the names that they have on the Hugging Face Hub.

A listing with sizes and SHA-256, then bytes with Range. Each file is read at the commit that changed it last, as the
listing tells, so that a branch may move meanwhile. Source: ModelScope's own client, modelscope/hub.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import quote

import msgspec
from yarl import URL

from pagefleet_download.errors import AccessDenied, BadSettings, DownloadError, Interrupted, ModelNotFound, said
from pagefleet_download.guarded_http import GuardedHttp, open_guarded, retry_after
from pagefleet_download.hub import check_token, checked_endpoint
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import Digest, Listing, RemoteFile, digest_of_listing

WELL_KNOWN = "https://www.modelscope.cn"
_MAX_LISTING_BYTES = 64 << 20
_SHA256 = re.compile("[0-9a-f]{64}")


class _File(msgspec.Struct, rename="pascal"):
    path: str
    type: str = "blob"
    size: int = 0
    sha256: str = ""
    revision: str = ""


class _Data(msgspec.Struct, rename="pascal"):
    files: list[_File] | None = None


class _Answer(msgspec.Struct, rename="pascal"):
    code: int
    message: str = ""
    data: _Data | None = None


class ModelScopeSource:
    """One repository at one revision."""

    def __init__(self, endpoint: str, repository: str, revision: str, http: GuardedHttp) -> None:
        self._root = f"{endpoint}/api/v1/models/{repository}/repo"
        self._endpoint = endpoint
        self._repository = repository
        self._revision = revision
        self._http = http
        self._commits: Mapping[str, str] = {}
        """Of each file, the commit that changed it last."""

    async def list_files(self) -> Listing:
        """The revision is a digest of all names, sizes and SHA-256: no commit is told."""
        url = URL(f"{self._root}/files?Revision={quote(self._revision, safe='')}&Recursive=false", encoded=True)
        data = await self._http.read_all(url, _MAX_LISTING_BYTES, "the list of files", self._refusal)
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadSettings(
                f"{self._endpoint} does not answer as ModelScope does ({said(error)}): check MODELSCOPE_DOMAIN"
            ) from error
        if answer.code != 200 or answer.data is None:
            raise ModelNotFound(f"{self._endpoint} has no files of {self._at()} ({answer.message[:200]!a}): check both")
        found = [file for file in answer.data.files or () if file.type == "blob"]
        self._commits = {file.path: file.revision for file in found}
        files = tuple(_remote_file(file) for file in found)
        return Listing(digest_of_listing(files), files)

    def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        """Where a server ignores Range, what was not asked for is read and thrown away."""
        commit = self._commits.get(file.name) or self._revision
        query = f"Revision={quote(commit, safe='')}&FilePath={quote(file.name, safe='')}"
        headers = {} if (start, stop) == (0, file.size) else {"Range": f"bytes={start}-{stop - 1}"}
        return self._http.read(URL(f"{self._root}?{query}", encoded=True), headers, start, file.name, self._refusal)

    def _at(self) -> str:
        return f"{self._repository} at {self._revision}"

    def _refusal(self, status: int, headers: Mapping[str, str]) -> DownloadError | Interrupted:
        if status in (401, 403):
            return AccessDenied(
                f"{self._endpoint} refuses to give {self._repository}: put a token of an account that may read it into "
                "MODELSCOPE_API_TOKEN"
            )
        if status == 404:
            return ModelNotFound(
                f"{self._at()} does not exist on {self._endpoint}, or is private: check name and revision; if it is "
                "private, put a token that may read it into MODELSCOPE_API_TOKEN"
            )
        if status >= 500 or status in (408, 429):
            return Interrupted(f"{self._endpoint} answers {status}", retry_after(headers))
        return BadSettings(f"{self._endpoint} answers {status} for {self._repository}: check MODELSCOPE_DOMAIN")


@asynccontextmanager
async def open_modelscope(repository: str, settings: DownloadSettings) -> AsyncIterator[ModelScopeSource]:
    """Connect to ModelScope, or to the address that the settings name."""
    endpoint = settings.endpoint or WELL_KNOWN
    endpoint = checked_endpoint(endpoint if "://" in endpoint else f"https://{endpoint}")
    check_token(settings.token or "", "MODELSCOPE_API_TOKEN")
    if settings.offline:
        raise BadSettings("HF_HUB_OFFLINE is set, so nothing can be downloaded: unset it")
    credentials = {"Cookie": f"m_session_id={settings.token}"} if settings.token else {}
    async with open_guarded(endpoint, credentials) as http:
        yield ModelScopeSource(endpoint, repository, settings.revision or "master", http)


def _remote_file(file: _File) -> RemoteFile:
    sha256 = file.sha256.lower()
    digest = Digest("sha256", sha256) if _SHA256.fullmatch(sha256) else None
    return RemoteFile(file.path, max(0, file.size), f"sha256:{sha256}" if digest else file.revision, digest)
