"""A model on its way from a store to this machine: one download, tried again for as long as that may help."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.model_facts import FINAL_REASONS, DownloadResult
from pagefleet_protocol.model_uri import ModelUri

from pagefleet_operator.download.progress import ProgressMeter
from pagefleet_operator.download.settings import DownloadSettings, settings_for
from pagefleet_operator.local.backoff import Backoff
from pagefleet_operator.plan.status import ModelSeen
from pagefleet_operator.plan.verdict import Verdict

Download = Callable[[str, Path, DownloadSettings, ProgressMeter], Awaitable[DownloadResult]]

_LOOK_S = 1.0
_REPORT_LOOKS = 15


@dataclass(frozen=True, slots=True)
class ModelOrder:
    """What to download, and where to."""

    uri: str
    revision: str | None
    endpoint: str | None
    folder: Path


def model_order(service: InferenceService, uri: ModelUri, models: Path) -> ModelOrder | None:
    """Return what has to be downloaded for a service; None where its model is on this machine anyway.

    Each combination of source and wish has a folder of its own below `models`, which all services share.
    """
    if not uri.remote:
        return None
    model = service.spec.model
    wish = "\n".join((model.uri, model.revision or "", model.endpoint or ""))
    name = uri.path.rstrip("/").rpartition("/")[2]
    digest = hashlib.sha256(wish.encode()).hexdigest()[:12]
    return ModelOrder(model.uri, model.revision, model.endpoint, models / f"{name[:64]}-{digest}")


class ModelFetch:
    """Carries one order out; `seen` tells how far it is."""

    def __init__(
        self,
        order: ModelOrder,
        download: Download,
        environment: Mapping[str, str],
        backoff: Backoff,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` gets a sentence now and then, and an empty one whenever `seen` may differ."""
        self.order = order
        self._download = download
        self._settings = settings_for(order.uri, order.revision, order.endpoint, environment)
        self._backoff = backoff
        self._tell = tell
        self._meter = ProgressMeter()
        self._complete = False
        self._failure: Verdict | None = None

    @property
    def complete(self) -> bool:
        """Whether engines can load the model."""
        return self._complete

    def seen(self) -> ModelSeen:
        """Return what the status has to know."""
        progress = None if self._complete or self._failure else self._meter.snapshot()
        return ModelSeen(str(self.order.folder), self._complete, progress, self._failure)

    async def run(self) -> None:
        """Download; returns when the model is here, or when somebody has to change something first."""
        while True:
            self._meter, self._failure = ProgressMeter(), None
            result = await self._attempt()
            if not result.reason:
                self._complete = True
                self._tell(f"the model is in {self.order.folder}")
                return
            final = result.reason in FINAL_REASONS
            pause = self._backoff.next_pause()
            after = "correct it, then start pagefleet up again" if final else f"tried again in {pause:.0f} s"
            self._failure = Verdict(False, result.reason, f"{result.message}; {after}")
            self._tell(f"the model cannot be downloaded, {result.reason}: {self._failure.message}")
            if final:
                return
            await asyncio.sleep(pause)

    async def _attempt(self) -> DownloadResult:
        order, meter = self.order, self._meter
        working = asyncio.ensure_future(self._download(order.uri, order.folder, self._settings, meter))
        num_looks = 0
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=_LOOK_S)
                num_looks += 1
                told = self.seen().told if num_looks % _REPORT_LOOKS == 1 and not working.done() else ""
                self._tell(told)
            return working.result()
        finally:
            working.cancel()
