"""`https://host/path`: a model's folder as a web server has it, such as `python -m http.server` or a CDN.

A web server lists nothing that a program could rely on. So the files are those that SHA256SUMS names, where the folder
has one (`sha256sum * > SHA256SUMS`), and their digests are known then; else those that a model may have are asked for.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import aiohttp
from yarl import URL

from pagefleet_download.errors import (
    AccessDenied,
    BadSettings,
    ChecksumMismatch,
    DownloadError,
    Interrupted,
    ModelNotFound,
    said,
)
from pagefleet_download.guarded_http import GuardedHttp, open_guarded, retry_after
from pagefleet_download.reading import read_json, side_by_side
from pagefleet_download.selection import CONFIG, INDEX, MAX_INDEX_BYTES, MAYBE, SINGLE, indexed, top_names
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import Digest, Listing, RemoteFile, digest_of_listing

SUMS = "SHA256SUMS"
_MAX_SUMS_BYTES = 1 << 20
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


class WebFolderSource:
    """The files of one folder of a web server."""

    def __init__(self, root: str, http: GuardedHttp, settings: DownloadSettings) -> None:
        self._root = root
        self._http = http
        self._settings = settings

    async def list_files(self) -> Listing:
        """The revision is a digest of all names, sizes and tags: a folder has none of its own."""
        sums = await self._sums()
        found = await self._there(sums or dict.fromkeys((CONFIG, INDEX, SINGLE, *MAYBE)))
        if not sums and (index := next((file for file in found if file.name == INDEX), None)):
            named = indexed(await read_json(self, index, MAX_INDEX_BYTES, self._settings))
            found += await self._there(dict.fromkeys(set(named) - {SINGLE}))
        if not found:
            raise ModelNotFound(
                f"{self._root} has neither {SUMS} nor {CONFIG}: give the URL of the folder that has the model's files"
            )
        files = tuple(sorted(found, key=lambda file: file.name))
        return Listing(digest_of_listing(files), files)

    async def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        """Only of the file that was listed: If-Match, or where there is no ETag If-Unmodified-Since."""
        headers = {} if (start, stop) == (0, file.size) else {"Range": f"bytes={start}-{stop - 1}"}
        if file.tag.startswith('"'):
            headers["If-Match"] = file.tag
        elif file.tag:
            headers["If-Unmodified-Since"] = file.tag
        async for chunk in self._http.read(self._url(file.name), headers, start, file.name, self._refusal):
            yield chunk

    async def _sums(self) -> dict[str, Digest | None]:
        try:
            data = await self._http.read_all(self._url(SUMS), _MAX_SUMS_BYTES, SUMS, self._refusal)
        except (ModelNotFound, AccessDenied):  # stores say the one or the other of what is not there
            return {}
        found: dict[str, Digest | None] = {}
        for line in data.decode(errors="replace").splitlines():
            if not (match := _SUM.fullmatch(line)):
                raise BadSettings(f"{self._root}/{SUMS} has a line that sha256sum would not write: write it anew")
            found[match[2]] = Digest("sha256", match[1].lower())
        return {name: found[name] for name in top_names(found)}

    async def _there(self, wanted: Mapping[str, Digest | None]) -> list[RemoteFile]:
        found: list[RemoteFile] = []

        async def look(name: str) -> None:
            if (head := await self._head(name)) is not None:
                found.append(RemoteFile(name, head.size, head.tag, wanted[name]))
            elif wanted[name] is not None:
                raise ModelNotFound(f"{self._root} lacks {name}, which its {SUMS} names: add it, or write {SUMS} anew")

        await side_by_side(look, wanted, 2 * self._settings.parallel_files)
        return found

    async def _head(self, name: str) -> _Head | None:
        try:
            async with self._http.get(self._url(name), {}, "HEAD") as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                if response.status >= 300:
                    refusal = self._refusal(response.status, headers)
                    if isinstance(refusal, ModelNotFound) or (isinstance(refusal, AccessDenied) and name != CONFIG):
                        return None
                    raise refusal
        except (aiohttp.ClientError, OSError) as error:
            raise Interrupted(f"{self._root}: {name}: {said(error)}") from error
        size = headers.get("content-length", "")
        if not size.isdecimal():
            raise BadSettings(f"{self._root} gives no sizes of files (Content-Length of HEAD): use another server")
        tag = headers.get("etag", "")
        return _Head(int(size), tag if tag.startswith('"') else headers.get("last-modified", ""))

    def _url(self, name: str) -> URL:
        return URL(f"{self._root}/{quote(name)}", encoded=True)

    def _refusal(self, status: int, headers: Mapping[str, str]) -> DownloadError | Interrupted:
        if status in (401, 403):
            return AccessDenied(f"{self._root} answers {status}: put its user and password into ~/.netrc")
        if status in (404, 410):
            return ModelNotFound(f"{self._root} does not exist: check the URL")
        if status == 412:
            return ChecksumMismatch(f"a file of {self._root} was replaced while it was read: start again")
        if status >= 500 or status in (408, 429):
            return Interrupted(f"{self._root} answers {status}", retry_after(headers))
        return BadSettings(f"{self._root} answers {status}: is it the URL of a folder of files?")


class _Head(NamedTuple):
    size: int
    tag: str


@asynccontextmanager
async def open_web_folder(url: str, settings: DownloadSettings) -> AsyncIterator[WebFolderSource]:
    """Connect to the server of a URL, which has no credentials in it."""
    parts = urlsplit(url)
    async with open_guarded(f"{parts.scheme}://{parts.netloc}", {}) as http:
        yield WebFolderSource(url.rstrip("/"), http, settings)
