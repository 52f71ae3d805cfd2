"""`hf://organization/name`: the Hugging Face Hub, or a mirror of it.

`huggingface_hub` lists the files; the bytes come by plain HTTP with Range, so that a cut transfer goes on where it was.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
from pagefleet_protocol.version import VERSION
from yarl import URL

from pagefleet_operator.download.errors import BadSettings, Interrupted
from pagefleet_operator.download.hub_refusals import HubModel, hub_refusal
from pagefleet_operator.download.settings import DownloadSettings
from pagefleet_operator.download.source import Digest, Listing, RemoteFile

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo
    from huggingface_hub.hf_api import RepoSibling

DEFAULT_ENDPOINT = "https://huggingface.co"
_CONNECT_S = 20.0
_CHUNK = 1 << 20
_GIT_SHA1_LENGTH = 40


class HubSource:
    """One repository at one revision."""

    def __init__(self, model: HubModel, api: HfApi, session: aiohttp.ClientSession) -> None:
        self._model = model
        self._api = api
        self._session = session
        self._commit = model.revision

    async def list_files(self) -> Listing:
        """Settles the revision: all that is read afterwards is of the commit found here."""
        info = await asyncio.to_thread(self._ask)
        self._commit = info.sha or self._model.revision
        return Listing(self._commit, tuple(_remote_file(file, self._model) for file in info.siblings or ()))

    async def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        """Where a server ignores Range, what was not asked for is read and thrown away."""
        from huggingface_hub import hf_hub_url  # noqa: PLC0415 - see _new_api

        # Of the commit: a branch may have moved since it was listed.
        url = hf_hub_url(self._model.repository, file.name, revision=self._commit, endpoint=self._model.endpoint)
        headers = {} if (start, stop) == (0, file.size) else {"Range": f"bytes={start}-{stop - 1}"}
        try:
            async with self._session.get(URL(url, encoded=True), headers=headers) as response:
                if response.status >= 400:
                    named = {name.lower(): value for name, value in response.headers.items()}
                    raise hub_refusal(self._model, response.status, named)
                skip = _bytes_before(response, start)
                async for chunk in response.content.iter_chunked(_CHUNK):
                    yield chunk[skip:]  # also an empty one: something arrived
                    skip = max(0, skip - len(chunk))
        except (aiohttp.ClientError, OSError) as error:
            raise Interrupted(f"{self._model.endpoint}: {file.name}: {_said(error)}") from error
        except ValueError as error:
            # aiohttp takes credentials from there, and then does not know which to send.
            raise BadSettings(
                f"{self._model.endpoint} cannot be asked ({_said(error)}): is there an entry for it in ~/.netrc?"
            ) from error

    def _ask(self) -> ModelInfo:
        import httpx2  # noqa: PLC0415 - see _new_api
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled  # noqa: PLC0415

        model = self._model
        try:
            return self._api.model_info(
                model.repository, revision=model.revision, files_metadata=True, timeout=_CONNECT_S
            )
        except OfflineModeIsEnabled as error:
            raise BadSettings("HF_HUB_OFFLINE is set, so nothing can be downloaded: unset it") from error
        except HFValidationError as error:
            raise BadSettings(f"hf://{model.repository} is no name of a repository: {_said(error)}") from error
        except HfHubHTTPError as error:
            named = {name.lower(): value for name, value in error.response.headers.items()}
            raise hub_refusal(model, error.response.status_code, named) from error
        except httpx2.HTTPError as error:
            raise Interrupted(f"{model.endpoint}: {_said(error)}") from error
        except (httpx2.InvalidURL, ValueError, TypeError, KeyError) as error:
            # The library takes an answer apart without checking it.
            raise BadSettings(
                f"{model.endpoint} does not answer as a hub does ({_said(error)}): check the endpoint"
            ) from error


@asynccontextmanager
async def open_hub(repository: str, settings: DownloadSettings) -> AsyncIterator[HubSource]:
    """Connect to the hub, or to the mirror that the settings name."""
    endpoint = _checked(settings.endpoint or DEFAULT_ENDPOINT)
    _check_token(settings.token or "")
    model = HubModel(repository, settings.revision or "main", endpoint, has_token=bool(settings.token))
    headers = {"User-Agent": f"pagefleet/{VERSION}", "Accept-Encoding": "identity"}
    if settings.token:
        headers["Authorization"] = f"Bearer {settings.token}"  # aiohttp drops it when a redirect leaves the host
    async with aiohttp.ClientSession(
        headers=headers,
        auto_decompress=False,
        trust_env=True,  # proxies
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        read_bufsize=_CHUNK,
        requote_redirect_url=False,  # it is signed as it is
    ) as session:
        yield HubSource(model, await asyncio.to_thread(_new_api, endpoint, settings.token), session)


def _checked(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("https", "http") or not parts.hostname or "@" in parts.netloc:
        shown = endpoint.rpartition("@")[2][:80]
        raise BadSettings(f"the endpoint {shown} is no URL of a hub: give https://host, credentials in HF_TOKEN alone")
    return endpoint.rstrip("/")


def _check_token(token: str) -> None:
    # Libraries refuse such a header too, some in words that repeat it.
    if not token.isascii() or not token.isprintable() or " " in token:
        raise BadSettings("HF_TOKEN holds more than a token (a space, a line break?): put the token alone into it")


def _new_api(endpoint: str, token: str | None) -> HfApi:
    # The library reads this when it is imported; without it, each request tells what is installed here.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from huggingface_hub import HfApi  # noqa: PLC0415 - not before the line above, and it takes a while

    # False: it must not look for the token of whoever runs this.
    return HfApi(endpoint=endpoint, token=token or False, library_name="pagefleet", library_version=VERSION)


def _remote_file(file: RepoSibling, model: HubModel) -> RemoteFile:
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


def _bytes_before(response: aiohttp.ClientResponse, start: int) -> int:
    """How many bytes of the answer's body come before `start`."""
    if response.status != 206:
        return start
    if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise Interrupted(f"{response.url.host} sent another range than was asked for")
    return 0


def _said(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
