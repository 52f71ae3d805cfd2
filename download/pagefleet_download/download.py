"""`download` brings a model into a folder, `inspect` looks at it from afar. Both tell the outcome as a result.

Nothing here is about a process, and `Download` knows no folder but by its Protocol: the shared cache is another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from pagefleet_protocol.model_facts import DownloadResult, ModelFacts
from pagefleet_protocol.model_uri import ModelUri

from pagefleet_download.errors import DiskFull, DownloadError, disk_error
from pagefleet_download.manifest import InstalledFile, Manifest
from pagefleet_download.open_source import downloadable, open_source
from pagefleet_download.outline import ModelOutline, outline
from pagefleet_download.progress import ProgressMeter, amount
from pagefleet_download.reading import side_by_side
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import ModelSource, RemoteFile
from pagefleet_download.target import Target
from pagefleet_download.target_folder import TargetFolder, locked
from pagefleet_download.transfer import Transfer


async def download(uri: str, folder: Path, settings: DownloadSettings, progress: ProgressMeter) -> DownloadResult:
    """Bring the model's files into the folder, unless they are there already.

    Never raises for what others did: the result then has a reason. When cancelled, what has arrived stays for the next
    run. A folder that is the source itself is only looked at.
    """

    async def work() -> ModelFacts:
        source = downloadable(uri)
        if source.scheme == "file" and await asyncio.to_thread(_same_folder, source.local_path, folder):
            return await _look(source, settings)
        return await Download(source, TargetFolder(folder), settings, progress).run()

    return await outcome(work, folder, progress)


async def inspect(uri: str, settings: DownloadSettings, progress: ProgressMeter) -> DownloadResult:
    """Work out the facts from the listing, the configuration and the first bytes of the weights. Writes nothing."""

    async def work() -> ModelFacts:
        return await _look(downloadable(uri), settings)

    return await outcome(work, Path(uri), progress)


def _same_folder(one: str, other: Path) -> bool:
    return Path(one).resolve() == other.resolve()


async def _look(source: ModelUri, settings: DownloadSettings) -> ModelFacts:
    async with open_source(source, settings) as store:
        return (await outline(store, settings)).facts


async def outcome(work: Callable[[], Awaitable[ModelFacts]], place: Path, progress: ProgressMeter) -> DownloadResult:
    """Tell how work on files at `place` ended; it raises DownloadError and OSError."""
    try:
        try:
            facts = await work()
        except OSError as error:
            raise disk_error(Path(error.filename or place), error) from error
    except DownloadError as error:
        return DownloadResult(reason=error.reason, message=str(error))
    progress.begin("done")
    return DownloadResult(facts=facts)


class Download:
    """One model on its way to one place."""

    def __init__(self, source: ModelUri, target: Target, settings: DownloadSettings, progress: ProgressMeter) -> None:
        self._source = source
        self._uri = source.text
        self._folder = target
        self._settings = settings
        self._progress = progress

    async def run(self) -> ModelFacts:
        """Raises DownloadError, OSError."""
        if done := await self._finished():
            await asyncio.to_thread(self._folder.sweep)
            return done
        await asyncio.to_thread(self._folder.create)
        async with locked(self._folder.lock_path, self._settings):
            await _to_the_end(self._folder.recover)
            if done := await self._finished():  # by whoever held the lock before
                return done
            async with open_source(self._source, self._settings) as store:
                model = await outline(store, self._settings)
                return await self._bring(store, model)

    async def _finished(self) -> ModelFacts | None:
        if self._settings.parts == "small" and self._source.scheme != "hf":
            return None  # what the weights are read from later has to be what is here: no commit says so
        manifest = await asyncio.to_thread(self._folder.finished, self._uri, self._settings.revision)
        if manifest is None:
            return None
        num_bytes = sum(file.size for file in manifest.files)
        self._progress.expect(num_bytes, len(manifest.files))
        self._progress.add_found(num_bytes)
        self._progress.add_files(len(manifest.files))
        return manifest.facts

    async def _bring(self, store: ModelSource, model: ModelOutline) -> ModelFacts:
        folder, progress = self._folder, self._progress
        before = await asyncio.to_thread(folder.manifest)
        await asyncio.to_thread(folder.refuse_strangers, before, model.files)
        await _to_the_end(lambda: folder.make_room(model.files))
        progress.expect(sum(file.size for file in model.files), len(model.files))
        progress.begin("verifying")
        there: dict[str, InstalledFile] = {}
        for file in model.files:
            if found := await asyncio.to_thread(folder.present, before, file):
                there[file.name] = found
                progress.add_found(file.size)
                progress.add_files()
        missing = [file for file in model.files if file.name not in there]
        await asyncio.to_thread(self._check_space, missing)
        progress.begin("downloading")
        there |= await self._fetch(store, missing)
        progress.begin("verifying")
        files = tuple(there[file.name] for file in model.files)
        streamed = self._settings.parts == "small"
        manifest = Manifest(self._uri, self._settings.revision or "", files, model.facts, streamed)
        await _to_the_end(lambda: folder.install(manifest, before))
        return model.facts

    async def _fetch(self, store: ModelSource, files: list[RemoteFile]) -> dict[str, InstalledFile]:
        """The largest first: they take longest."""
        transfer = Transfer(store, self._settings, self._progress)
        arrived: dict[str, InstalledFile] = {}

        async def one(file: RemoteFile) -> None:
            arrived[file.name] = await transfer.fetch(file, self._folder.part(file))

        largest_first = sorted(files, key=lambda file: -file.size)
        await side_by_side(one, largest_first, self._settings.parallel_files)
        return arrived

    def _check_space(self, missing: list[RemoteFile]) -> None:
        whole = sum(file.size for file in missing)
        parts = sum(self._folder.part_size(file) for file in missing)
        free = self._settings.host.free_bytes(self._folder.path)
        if whole - parts > free:
            raise DiskFull(
                f"{self._folder.path} has {amount(free)} free, and {amount(whole - parts)} are missing "
                f"({amount(whole)} to download, {amount(parts)} of it here already; a model that is there stays until "
                f"the new one is complete): give the volume {amount(whole - parts - free)} more"
            )


async def _to_the_end(work: Callable[[], None]) -> None:
    """Change the folder in a thread. When cancelled, wait for it: the lock must not be given back before."""
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise
