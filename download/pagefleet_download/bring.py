"""From a model's name to its folder on this machine: what `serve`, `LLM`, `up` and `download` have in common.

Models of the hub lie in the cache that all of this user's tools share, those of buckets below ~/.cache/pagefleet.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from pagefleet_protocol.model_facts import DownloadResult, ModelFacts
from pagefleet_protocol.model_uri import ModelUri

from pagefleet_download.download import Download, download, outcome
from pagefleet_download.errors import BadModel, BadSettings, DownloadError, ModelNotFound, StoreUnreachable, disk_error
from pagefleet_download.hub_cache import HubCache, link, names_in
from pagefleet_download.open_source import ChosenGguf, downloadable, open_source
from pagefleet_download.outline import ModelOutline, outline
from pagefleet_download.progress import ProgressMeter, logged
from pagefleet_download.selection import choose_gguf
from pagefleet_download.settings import DownloadSettings, Patience, Wish, hub_home, settings_for
from pagefleet_download.target import Target
from pagefleet_download.target_folder import TargetFolder
from pagefleet_download.xet import HubXet

_log = logging.getLogger(__name__)
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_WAITING = Patience(attempts=3, backoff_first=0.5)
"""Of a program that somebody waits for."""
_LOOKING = Patience(attempts=1, stall=10)


@dataclass(frozen=True, slots=True)
class Caches:
    """Where models lie on this machine."""

    hub: Path
    """Shared with other tools, in huggingface_hub's layout."""
    models: Path
    """A folder for each model of a bucket."""


def caches_of(environment: Mapping[str, str]) -> Caches:
    """Return the folders of this user: $HF_HUB_CACHE, else $HF_HOME/hub; for buckets $XDG_CACHE_HOME, else ~/.cache."""
    hub = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Caches(
        hub=Path(hub).expanduser() if hub else hub_home(environment) / "hub",
        models=Path(caches).expanduser() / "pagefleet" / "models",
    )


def folder_name(uri: ModelUri, revision: str | None, endpoint: str | None) -> str:
    """Name a folder that this wish has for itself."""
    wish = "\n".join((uri.text, revision or "", endpoint or ""))
    return f"{uri.path.rstrip('/').rpartition('/')[2][:64]}-{hashlib.sha256(wish.encode()).hexdigest()[:12]}"


async def bring(uri: ModelUri, settings: DownloadSettings, caches: Caches, progress: ProgressMeter) -> Path:
    """Return the folder of a model, complete and verified, or the first file of one in GGUF that is one of several;
    downloaded if it was not.

    What is here is used without asking anybody: a branch keeps the commit that it means here. Where the hub cannot be
    asked, what other tools left in the cache will do if it is complete.

    Raises:
        DownloadError: it cannot be had; the message says what to do.
    """
    uri = downloadable(uri.text)
    if uri.scheme == "file":
        return Path(uri.local_path)
    if uri.scheme != "hf":
        name = folder_name(uri, settings.revision, settings.endpoint)
        folder = caches.models / (name if settings.parts == "all" else f"{name}-{settings.parts}")
        try:
            await Download(uri, TargetFolder(folder), settings, progress).run()
        except StoreUnreachable as failure:
            raise StoreUnreachable(
                f"{failure}: check the address, network and proxy (HTTPS_PROXY), or give the folder of a model"
            ) from failure
        except OSError as error:
            raise disk_error(Path(error.filename or folder), error) from error
        return folder
    folder, _ = await bring_from_hub(uri, settings, caches.hub, progress)
    progress.begin("done")
    if uri.gguf is None:
        return folder
    return folder / choose_gguf(names_in(folder), uri.gguf)[0]


async def bring_from_hub(
    uri: ModelUri, settings: DownloadSettings, hub: Path, progress: ProgressMeter, again: bool = False
) -> tuple[Path, ModelFacts]:
    """`bring` for hf:// alone, into the cache `hub`; `again`: ask what the branch means, though it is here."""
    cache = HubCache(hub, uri.repository, settings.revision, not again, settings.parts, uri.gguf)
    try:
        facts = await _in_cache(cache, uri, settings, progress)
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise disk_error(Path(error.filename or hub), error) from error
        if again:
            raise _not_ours(hub, error) from error
        try:
            facts = await _verified_copy(cache, uri, settings, progress)
        except DownloadError as unusable:
            raise _not_ours(hub, error, f", and {unusable}") from error
        except OSError:
            raise _not_ours(hub, error) from error
    return cache.snapshot(facts.revision), facts


async def _in_cache(cache: HubCache, uri: ModelUri, settings: DownloadSettings, progress: ProgressMeter) -> ModelFacts:
    if settings.offline and not await asyncio.to_thread(cache.finished, uri.text, settings.revision):
        with _told_offline():
            return await _verified_copy(cache, uri, settings, progress)
    try:
        return await Download(uri, cache, settings, progress).run()
    except StoreUnreachable as failure:
        try:
            facts = await _verified_copy(cache, uri, settings, progress)
        except DownloadError:
            raise _unreachable(failure, cache, uri) from failure
        _log.warning("%s; the copy in the cache is used, commit %s", failure, facts.revision)
        return facts


def _unreachable(failure: StoreUnreachable, cache: HubCache, uri: ModelUri) -> StoreUnreachable:
    return StoreUnreachable(
        f"{failure}, and {uri.repository} is not in {cache.path.parent}: check network and proxy (HTTPS_PROXY), name a "
        "mirror in HF_ENDPOINT, or give the folder of a model"
    )


async def _verified_copy(
    cache: HubCache, uri: ModelUri, settings: DownloadSettings, progress: ProgressMeter
) -> ModelFacts:
    """What other tools left in the cache, if it is a whole model and every content is what its name says."""
    model = await _whole_copy(cache, uri, settings)
    progress.expect(sum(file.size for file in model.files), len(model.files))
    progress.begin("verifying")
    for file in model.files:
        if file.digest and await asyncio.to_thread(cache.present, None, file) is None:
            raise ModelNotFound(f"{file.name} in {cache.path} is damaged: it has to be downloaded again")
        progress.add_found(file.size)
        progress.add_files()
    return model.facts


async def _whole_copy(cache: HubCache, uri: ModelUri, settings: DownloadSettings) -> ModelOutline:
    copy = cache.local_copy()
    try:
        return await outline(copy if uri.gguf is None else ChosenGguf(copy, uri.gguf), settings)
    except BadModel as error:
        raise ModelNotFound(f"what is in {cache.path} is no whole model: {error}") from error


@contextmanager
def _told_offline() -> Iterator[None]:
    try:
        yield
    except DownloadError as error:
        raise type(error)(
            f"{error}; HF_HUB_OFFLINE is set, so nothing is downloaded: unset it, or bring the model's cache here"
        ) from error


def _not_ours(root: Path, error: OSError, what_is_there: str = "") -> BadSettings:
    owner = f", which belongs to {name}," if (name := _owner(root)) else ""
    return BadSettings(
        f"{error.filename or root}: {error.strerror}: the cache {root}{owner} does not let this user in"
        f"{what_is_there}; set HF_HOME to a folder of yours, or give the folder of a model"
    )


def _owner(path: Path) -> str:
    """Whose a folder is; empty where that cannot be known."""
    try:
        return path.owner()
    except (OSError, KeyError):
        return ""


async def bring_as_user(wish: Wish, environment: Mapping[str, str], progress: ProgressMeter) -> Path:
    """`bring` into this user's caches, by the settings of the hub's own tools (HF_TOKEN, HF_ENDPOINT, HF_HOME).

    Raises:
        DownloadError: as `bring`.
    """
    settings = settings_for(wish.uri.text, wish.revision, None, environment)
    settings = replace(settings, patience=_WAITING, xet=HubXet(), parts=wish.parts)
    caches = Caches(wish.folder, wish.folder) if wish.folder else caches_of(environment)
    return await bring(wish.uri, settings, caches, progress)


def bring_and_wait(wish: Wish, environment: Mapping[str, str], progress: ProgressMeter, logs: bool = False) -> Path:
    """`bring` for programs without an event loop of their own, or within one. Ctrl-C ends it, and keeps what came.

    `logs`: with a line in the log now and then.

    Raises:
        DownloadError: as `bring`.
    """

    async def work() -> Path:
        async with logged(progress) if logs else nullcontext():
            return await bring_as_user(wish, environment, progress)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    return _in_a_thread(work)


async def refresh(
    uri: ModelUri, settings: DownloadSettings, environment: Mapping[str, str], progress: ProgressMeter
) -> DownloadResult:
    """Bring a model of the hub into the shared cache, by what its branch means on the hub today.

    Raises:
        BadSettings: another place than the hub needs a folder to go to.
    """
    if uri.scheme != "hf":
        raise BadSettings(f"say into which FOLDER {uri.text} shall go, or --inspect")
    hub = caches_of(environment).hub

    async def work() -> ModelFacts:
        folder, facts = await bring_from_hub(uri, replace(settings, xet=HubXet()), hub, progress, again=True)
        _log.info("the model is in %s", folder)
        return facts

    return await outcome(work, hub, progress)


def _in_a_thread(work: Callable[[], Coroutine[None, None, Path]]) -> Path:
    """For a caller within an event loop, as in a notebook."""
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Path]]] = []

    async def noted() -> Path:
        task = asyncio.ensure_future(work())
        running.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(asyncio.run, noted())
        try:
            return result.result()
        except KeyboardInterrupt:
            for loop, task in running:
                loop.call_soon_threadsafe(task.cancel)
            raise


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_shared(source: ModelUri) -> bool:
    """Whether a whole folder of the shared cache is the model, and nothing else lies there."""
    return source.scheme == "hf" and source.gguf is None


class FleetDownload:
    """`download` for a fleet on one machine: a model of the hub goes into the shared cache, and FOLDER links to it."""

    def __init__(self, hub: Path) -> None:
        self._hub = hub

    async def look(self, uri: str, folder: Path, settings: DownloadSettings) -> DownloadResult:
        """Say whether a download can work, by asking once for a few kilobytes; nobody is asked for what is here."""
        source = downloadable(uri)
        settings = replace(settings, patience=_LOOKING)

        async def work() -> ModelFacts:
            in_cache = _is_shared(source) and not await asyncio.to_thread(_is_real_folder, folder)
            cache = HubCache(self._hub, source.repository, settings.revision) if in_cache else None
            place: Target = cache or TargetFolder(folder)
            if manifest := await asyncio.to_thread(place.finished, source.text, settings.revision):
                return manifest.facts
            if cache is not None and settings.offline:
                with _told_offline():
                    return (await _whole_copy(cache, source, settings)).facts
            try:
                async with open_source(source, settings) as store:
                    return (await outline(store, settings)).facts
            except StoreUnreachable as failure:
                if cache is None:
                    raise
                try:
                    return (await _whole_copy(cache, source, settings)).facts
                except DownloadError:
                    raise _unreachable(failure, cache, source) from failure

        return await outcome(work, self._hub, ProgressMeter())

    async def __call__(
        self, uri: str, folder: Path, settings: DownloadSettings, progress: ProgressMeter
    ) -> DownloadResult:
        source = downloadable(uri)
        # A folder of its own is as earlier releases left it.
        if not _is_shared(source) or await asyncio.to_thread(_is_real_folder, folder):
            return await download(uri, folder, settings, progress)

        async def work() -> ModelFacts:
            found, facts = await bring_from_hub(source, replace(settings, xet=HubXet()), self._hub, progress)
            await asyncio.to_thread(folder.parent.mkdir, parents=True, exist_ok=True)
            await asyncio.to_thread(link, folder, found)
            return facts

        return await outcome(work, folder, progress)
