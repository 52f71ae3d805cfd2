"""`pagefleet download URI [FOLDER]`: brings a model into a folder, or with --inspect tells what it is."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from pagefleet_protocol.model_facts import DownloadResult, encode_result

from pagefleet_operator.download.download import amount, download, inspect
from pagefleet_operator.download.errors import BadSettings
from pagefleet_operator.download.progress import ProgressMeter
from pagefleet_operator.download.progress_server import serve_progress
from pagefleet_operator.download.settings import settings_for

_DESCRIPTION = """\
Brings the files of a model into FOLDER, verified and resumable, and prints one line of JSON: the facts that are needed
to plan for it, or why it failed. Takes safetensors, configurations and tokenizers; never code, never pickled weights.

Credentials come from the environment: HF_TOKEN; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION or an instance's
identity; GOOGLE_APPLICATION_CREDENTIALS. Status: 0 done, 1 try again, 2 change something first."""
_REPORT_S = 10.0

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells every request
    try:
        result = asyncio.run(_run(arguments, os.environ))
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("pagefleet download: stopped; what has arrived is kept for the next run", file=sys.stderr)
        return 1
    _tell(result, arguments.termination_message)
    return result.exit_code


async def _run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> DownloadResult:
    settings = settings_for(arguments.uri, arguments.revision or None, arguments.endpoint, environment)
    progress = ProgressMeter()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with _reporting(progress), _serving(arguments, progress):
            if arguments.inspect:
                uri = arguments.uri
                return await inspect(uri, settings, progress)
            if arguments.folder is None:
                raise BadSettings("say into which FOLDER, or --inspect")
            return await download(arguments.uri, arguments.folder, settings, progress)
    except BadSettings as error:
        return DownloadResult(reason=error.reason, message=str(error))


@asynccontextmanager
async def _serving(arguments: argparse.Namespace, progress: ProgressMeter) -> AsyncIterator[None]:
    if arguments.port is None:
        yield
        return
    async with serve_progress(arguments.host, arguments.port, progress.snapshot) as port:
        _log.info("progress at port %s", port)
        yield


@asynccontextmanager
async def _reporting(progress: ProgressMeter) -> AsyncIterator[None]:
    """A line in the log now and then."""

    async def report() -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            now = progress.snapshot()
            _log.info(
                "%s: %s of %s, %s of %s files",
                *(now.phase, amount(now.bytes_done), amount(now.bytes_total), now.files_done, now.files_total),
            )

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagefleet download", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("uri", metavar="URI", help="hf://organization/name, s3://, gs:// or file:///folder")
    parser.add_argument("folder", metavar="FOLDER", type=Path, nargs="?", help="where the files go")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of an hf:// repository")
    parser.add_argument("--endpoint", metavar="URL", help="a mirror of the hub, or the store's own address")
    parser.add_argument("--inspect", action="store_true", help="only tell what the model is; writes nothing")
    parser.add_argument("--port", type=_port, metavar="PORT", help="answer GET /progress and /livez here meanwhile")
    parser.add_argument("--host", metavar="ADDRESS", help="of --port (default: every address; it tells numbers only)")
    parser.add_argument(
        "--termination-message", type=Path, metavar="FILE", help="write the result there too, as Kubernetes reads it"
    )
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
