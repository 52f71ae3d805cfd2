"""All InferenceServices of a manifest on this machine, kept as the manifest says while it is edited."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable, Sequence

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.pasted_command import pasted

from pagefleet_operator.errors import ManifestError, PortError
from pagefleet_operator.local.launcher import Launcher
from pagefleet_operator.local.machine import Gpus, find_gpus, num_cores
from pagefleet_operator.local.manifest import Manifest, Source, parse_manifest, read_sources
from pagefleet_operator.local.model_fetch import model_order, refusals
from pagefleet_operator.local.preflight import find_mistakes
from pagefleet_operator.local.reporter import Reporter
from pagefleet_operator.local.service import ServiceRunner
from pagefleet_operator.local.settings import LocalSettings
from pagefleet_operator.local.state_dir import StateDir
from pagefleet_operator.local.supervisor import World
from pagefleet_operator.local.wanted import Wanted, check_gpus, ignored_fields, read_wanted
from pagefleet_operator.plan.autoscaling import most_engines


class ManifestWatch:
    """Tells when a manifest was edited; an edit counts once two looks in a row see the same."""

    def __init__(self, settings: LocalSettings) -> None:
        self._path = settings.manifest
        self._applied: object = None
        self._seen: object = None

    def first(self) -> Manifest:
        """Return the manifest as it is now.

        Raises:
            ManifestError: it cannot be used.
        """
        sources = read_sources(self._path)
        self._applied = self._seen = sources
        return parse_manifest(sources)

    def look(self) -> Manifest | None:
        """Return the manifest when it was edited since the last that was returned or refused, else None.

        Raises:
            ManifestError: the edit cannot be used; told once.
        """
        found: tuple[Source, ...] | tuple[str, ...]
        try:
            found = read_sources(self._path)
        except ManifestError as error:
            found = error.problems
        stable, self._seen = found == self._seen, found
        if not stable or found == self._applied:
            return None
        self._applied = found
        sources = tuple(one for one in found if isinstance(one, Source))
        if not sources:
            raise ManifestError(str(one) for one in found)
        return parse_manifest(sources)


class Fleet:
    """Runs until it is stopped; constructed with everything it acts on."""

    def __init__(
        self, settings: LocalSettings, state: StateDir, reporter: Reporter, gpus: Sequence[str] | None = None
    ) -> None:
        self._settings = settings
        self._reporter = reporter
        self._launcher = Launcher(settings, state, Gpus(find_gpus(os.environ) if gpus is None else gpus), num_cores())
        self._changed = asyncio.Event()
        jitter = random.Random()  # noqa: S311 - spreads restarts, keeps no secret
        self._world = World(settings, os.environ, self._launcher, state, reporter, self._changed.set, jitter.random)
        self._watch = ManifestWatch(settings)
        self._runners: dict[str, ServiceRunner] = {}
        self._wanted: dict[str, Wanted] = {}
        self._announced: set[str] = set()
        self._stopping = False
        self._killed = False

    def stop(self) -> None:
        """Let everything finish and end; called again, end it now."""
        if self._stopping:
            self._killed = True
            self._reporter.say("ends everything now")
            for runner in self._runners.values():
                runner.kill()
        else:
            self._stopping = True
            self._reporter.say("stops: running requests may finish; once more Ctrl-C ends them")
        self._changed.set()

    async def run(self) -> int:
        """Run until stopped. Returns the exit status: 0 after a clean stop, 130 when it had to be now.

        Raises:
            ManifestError: the manifest cannot be used from the start.
            PortError: the first address cannot be listened on.
        """
        manifest = self._watch.first()
        wanted = self._read(manifest)
        self._claim_ports(wanted)
        mistakes = await self._refused_models(wanted) | await self._mistakes(wanted)
        if len(mistakes) == len(wanted):
            raise ManifestError(mistakes.values())
        for mistake in mistakes.values():  # its engines say so again, once; the rest of the fleet runs
            self._reporter.say(mistake)
        async with asyncio.TaskGroup() as tasks:
            self._accept(manifest, wanted, tasks)
            watching = tasks.create_task(self._follow_edits(tasks))
            try:
                self._reconcile(tasks)
                while not self._stopping or self._runners:
                    await self._wait_for_change()
                    self._reconcile(tasks)
            finally:
                watching.cancel()
        self._reporter.say("stopped")
        return 130 if self._killed else 0

    async def _follow_edits(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping:
            await asyncio.sleep(self._settings.timing.file_poll)
            try:
                manifest = await asyncio.to_thread(self._watch.look)
                if manifest is not None:
                    wanted = self._read(manifest)
                    if mistakes := await self._mistakes(one for one in wanted if one != self._wanted.get(one.name)):
                        raise ManifestError(mistakes.values())
                    self._claim_ports(wanted)
                    self._accept(manifest, wanted, tasks)
            except (ManifestError, PortError) as error:
                self._reporter.say(f"{error}\nthe edit is not used; everything keeps running as before")

    def _read(self, manifest: Manifest) -> tuple[Wanted, ...]:
        try:
            wanted = read_wanted(manifest, os.environ)
            if problems := check_gpus(wanted, self._launcher.gpus.total):
                raise ManifestError(problems)
        except ManifestError as error:
            raise ManifestError(f"{self._settings.manifest}: {problem}" for problem in error.problems) from error
        return wanted

    async def _mistakes(self, wanted: Iterable[Wanted]) -> dict[str, str]:
        """Return what engines of these services would refuse, by service."""
        found = await find_mistakes(wanted, self._settings.commands.serve)
        return {name: "\n".join(f"{self._where}{name}: {one}" for one in lines) for name, lines in found.items()}

    async def _refused_models(self, wanted: tuple[Wanted, ...]) -> dict[str, str]:
        """Return why models of services cannot be downloaded, where somebody has to change something first."""
        settings = self._settings
        if settings.look is None:
            return {}
        found = {one.name: model_order(one.service, one.resolved.uri, settings.models_dir) for one in wanted}
        orders = {name: order for name, order in found.items() if order is not None}
        refused = await refusals(orders, settings.look, os.environ, patient=settings.document is None)
        return {name: f"{self._where}{name}: spec.model.uri: {message}" for name, message in refused.items()}

    @property
    def _where(self) -> str:
        """What a mistake begins with: the file that somebody wrote."""
        return f"{self._settings.manifest}: " if self._settings.document is None else ""

    def _claim_ports(self, wanted: tuple[Wanted, ...]) -> None:
        """Reserve addresses, but none for new services while a removed one may still hold the port they should get."""
        nothing_leaves = set(self._runners) <= {one.name for one in wanted}
        for one in wanted:
            if nothing_leaves or one.name in self._runners:
                self._launcher.claim_ports(one.service)

    def _accept(self, manifest: Manifest, wanted: tuple[Wanted, ...], tasks: asyncio.TaskGroup) -> None:
        """Make a checked manifest the wanted one."""
        for name in manifest.skipped:
            self._reporter.say(f"{name}: skipped, only InferenceServices are run here")
        self._wanted = {one.name: one for one in wanted}
        self._launcher.num_engines = sum(map(most_engines, manifest.services))
        self._launcher.gpus.promise({name: gpus for one in wanted for name, gpus in one.gpus_by_workload.items()})
        for name, runner in self._runners.items():
            found = self._wanted.get(name)
            if found is None:
                self._reporter.say(f"{name}: was removed, stops")
                runner.leave()
            elif runner.change(found):
                self._reporter.say(f"{name}: was edited")
                self._note_ignored(found)
        self._add_missing(tasks)
        self._changed.set()

    def _add_missing(self, tasks: asyncio.TaskGroup) -> None:
        if any(name not in self._wanted for name in self._runners):
            return  # see _claim_ports
        for name, wanted in list(self._wanted.items()):
            if name in self._runners:
                continue
            try:
                url = self._launcher.claim_ports(wanted.service)
            except PortError as error:
                self._reporter.say(f"{name}: is not started, {error}")
                del self._wanted[name]
                continue
            self._runners[name] = ServiceRunner(wanted, self._world, tasks)
            self._note_ignored(wanted)
            paused = ", once spec.paused is false" if wanted.service.spec.paused else ""
            self._reporter.say(f"{name}: serves {wanted.service.spec.model.uri} at {url}{paused}")

    def _note_ignored(self, wanted: Wanted) -> None:
        if ignored := ignored_fields(wanted):
            self._reporter.say(f"{wanted.name}: without effect on this machine: {', '.join(ignored)}")

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        if self._stopping:
            for runner in self._runners.values():
                runner.leave()
        for runner in self._runners.values():
            runner.reconcile()
        self._announced &= set(self._wanted)
        for name in [name for name, runner in self._runners.items() if runner.gone]:
            self._launcher.release_ports(self._runners.pop(name).service)
        if not self._stopping:
            self._add_missing(tasks)
        self._reporter.show([runner.view() for runner in self._runners.values()])
        for name, runner in self._runners.items():
            if runner.ready and name not in self._announced:
                self._announced.add(name)
                self._reporter.say(announcement(runner.service, runner.url))

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(self._settings.timing.resync):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()


def announcement(service: InferenceService, url: str) -> str:
    """Return what a person does next with a service that is ready."""
    body = f'{{"model": "{service.model_name}", "messages": [{{"role": "user", "content": "What is pagefleet?"}}]}}'
    return "\n".join(
        [
            "",
            f"{service.name} is ready at {url}",
            "",
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
            f"  {pasted('chat', url)}",
            *([f"  {url}/ in a browser"] if service.spec.router.console else []),
            "",
        ]
    )
