"""A model on its way from a store to this machine: one download, tried again for as long as that may help."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pagefleet_download.bring import folder_name
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.settings import DownloadSettings, settings_for
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.model_facts import FINAL_REASONS, DownloadResult, ModelFacts
from pagefleet_protocol.model_uri import ModelUri

from pagefleet_operator.local.backoff import Backoff
from pagefleet_operator.local.table import DownloadView
from pagefleet_operator.plan.model_health import progress_text
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import Verdict

Download = Callable[[str, Path, DownloadSettings, ProgressMeter], Awaitable[DownloadResult]]
Look = Callable[[str, Path, DownloadSettings], Awaitable[DownloadResult]]

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
    if not uri.fetchable:
        return None
    model = service.spec.model
    folder = models / folder_name(uri, model.revision, model.endpoint)
    return ModelOrder(model.uri, model.revision, model.endpoint, folder)


async def refusals(
    orders: Mapping[str, ModelOrder], look: Look, environment: Mapping[str, str], patient: bool
) -> dict[str, str]:
    """Return what somebody has to change before models of services can be downloaded, by service.

    A store that does not answer may do so later: it is told where `patient` is not set.
    """

    async def one(order: ModelOrder) -> str:
        settings = settings_for(order.uri, order.revision, order.endpoint, environment)
        result = await look(order.uri, order.folder, settings)
        told = result.reason in FINAL_REASONS or (result.reason and not patient)
        return result.message if told else ""

    found = await asyncio.gather(*map(one, orders.values()))
    return {name: message for name, message in zip(orders, found, strict=True) if message}


class ModelFetch:
    """Carries one order out; `verdict` tells how far it is."""

    def __init__(
        self,
        order: ModelOrder,
        download: Download,
        environment: Mapping[str, str],
        backoff: Backoff,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` gets a sentence now and then, and an empty one whenever `verdict` may differ."""
        self.order = order
        self._download = download
        self._settings = settings_for(order.uri, order.revision, order.endpoint, environment)
        self._backoff = backoff
        self._tell = tell
        self._meter = ProgressMeter()
        self._began_at = time.monotonic()
        self._failure: Verdict | None = None
        self.facts: ModelFacts | None = None
        """Of the model, once it is here and says so."""
        self.complete = False
        """Whether engines can load the model."""

    def verdict(self) -> Verdict:
        if self.complete:
            return Verdict(True, Reason.CACHED, f"the model is in {self.order.folder}")
        return self._failure or Verdict(False, Reason.DOWNLOADING, self._progress())

    def view(self) -> DownloadView | None:
        """Return how far it is; None while nothing comes."""
        if self.complete or self._failure is not None:
            return None
        return DownloadView(self._meter.snapshot(), self._meter.bytes_per_second(), self._began_at)

    def _progress(self) -> str:
        return f"this machine {progress_text(self._meter.snapshot())}"

    async def run(self) -> None:
        """Download; returns when the model is here, or when somebody has to change something first."""
        while True:
            self._meter, self._failure = ProgressMeter(), None
            self._began_at = time.monotonic()
            result = await self._attempt()
            if not result.reason:
                self.complete, self.facts = True, result.facts
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
                told = self._progress() if num_looks % _REPORT_LOOKS == 1 and not working.done() else ""
                self._tell(told)
            return working.result()
        finally:
            working.cancel()
