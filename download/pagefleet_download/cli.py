"""`pagefleet download URI [FOLDER]`: brings a model into a folder, or with --inspect tells what it is."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec
from pagefleet_protocol.kube_names import LIVE_PATH
from pagefleet_protocol.model_facts import DownloadResult, Progress, encode_result
from pagefleet_protocol.model_uri import model_named
from pagefleet_protocol.settings.fields import HostName, Port
from pagefleet_protocol.settings.log import set_up_logging
from pagefleet_protocol.settings.program import Program
from pydantic_core import PydanticCustomError

from pagefleet_download.bring import refresh
from pagefleet_download.download import download, inspect
from pagefleet_download.errors import BadSettings
from pagefleet_download.progress import ProgressMeter, logged
from pagefleet_download.settings import settings_for

PROGRESS_PATH = "/progress"
_MAX_HEAD_BYTES = 8192
_PATIENCE_S = 5.0
_DESCRIPTION = """\
Brings the files of a model into FOLDER, verified and resumable, and prints one line of JSON: the facts that are needed
to plan for it, or why it failed. Takes safetensors, configurations and tokenizers; never code, never pickled weights.
Without FOLDER a model of the hub goes into the cache of the hub's tools (HF_HOME), where a branch then means what it
means on the hub today.

Credentials come from the environment: HF_TOKEN; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION or an instance's
identity; GOOGLE_APPLICATION_CREDENTIALS. Status: 0 done, 1 try again, 2 change something first."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadConfig:
    """What `pagefleet download` can be told."""

    uri: str
    """organization/name of the hub, s3://, gs://, https://, oci://, modelscope:// or a folder."""
    folder: Path | None = None
    """Where the files go."""
    revision: str | None = None
    """Branch, tag or commit of an hf:// repository."""
    endpoint: str | None = None
    """URL of a mirror of the hub, or of the store's own address."""
    inspect: bool = False
    """Only tell what the model is; writes nothing."""
    port: Port | None = None
    """Answer GET /progress and /livez here meanwhile."""
    host: HostName | None = None
    """Of --port; default: every address (it tells numbers only)."""
    termination_message: Path | None = None
    """Write the result there too, as Kubernetes reads it."""


DOWNLOAD = Program(
    name="pagefleet download",
    description=_DESCRIPTION,
    groups={"download": DownloadConfig},
    environment="PAGEFLEET_DOWNLOAD_",
    error=BadSettings,
    positional=("uri", "folder"),
)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config = DOWNLOAD.build(DownloadConfig, DOWNLOAD.read(sys.argv[1:] if argv is None else argv, os.environ))
    except BadSettings as error:
        return DOWNLOAD.tell(error)
    set_up_logging("download")
    try:
        result = asyncio.run(_run(config, os.environ))
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("pagefleet download: stopped; what has arrived is kept for the next run", file=sys.stderr)
        return 1
    _tell(result, config.termination_message)
    return result.exit_code


async def _run(config: DownloadConfig, environment: Mapping[str, str]) -> DownloadResult:
    try:
        uri = model_named(config.uri, os.path.isdir)
    except PydanticCustomError as error:
        return DownloadResult(reason="BadSettings", message=str(error))
    settings = settings_for(uri.text, config.revision, config.endpoint, environment)
    progress = ProgressMeter()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with logged(progress), _serving(config, progress):
            if config.inspect:
                return await inspect(uri.text, settings, progress)
            if config.folder is not None:
                return await download(uri.text, config.folder, settings, progress)
            return await refresh(uri, settings, environment, progress)
    except BadSettings as error:
        return DownloadResult(reason=error.reason, message=str(error))


@asynccontextmanager
async def _serving(config: DownloadConfig, progress: ProgressMeter) -> AsyncIterator[None]:
    if config.port is None:
        yield
        return
    async with serve_progress(config.host, config.port, progress.snapshot) as port:
        _log.info("progress at port %s", port)
        yield


def _tell(result: DownloadResult, termination_message: Path | None) -> None:
    line = encode_result(result)
    if termination_message is not None:
        try:
            termination_message.write_bytes(line)
        except OSError as error:
            print(f"pagefleet download: {termination_message}: {error.strerror}", file=sys.stderr)
    sys.stdout.write(line.decode())
    sys.stdout.flush()
    if result.reason:
        print(f"pagefleet download: {result.reason}: {result.message}", file=sys.stderr)


@asynccontextmanager
async def serve_progress(host: str | None, port: int, snapshot: Callable[[], Progress]) -> AsyncIterator[int]:
    """Answer for as long as the context lasts; `host` None listens on every address. Yields the port.

    Raises:
        BadSettings: the address cannot be listened on.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head.partition(b"\r\n")[0], snapshot))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, limit=_MAX_HEAD_BYTES)
    except OSError as error:
        raise BadSettings(f"port {port} cannot be listened on ({error.strerror}): give another --port") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _response(request_line: bytes, snapshot: Callable[[], Progress]) -> bytes:
    method, _, rest = request_line.decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        status, kind, body = HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET only\n"
    elif path == PROGRESS_PATH:
        status, kind, body = HTTPStatus.OK, "application/json", msgspec.json.encode(snapshot()) + b"\n"
    elif path == LIVE_PATH:
        status, kind, body = HTTPStatus.OK, "text/plain", b"ok\n"
    else:
        status, kind, body = HTTPStatus.NOT_FOUND, "text/plain", b"/progress and /livez are here\n"
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + (b"" if method == "HEAD" else body)


if __name__ == "__main__":
    sys.exit(main())
