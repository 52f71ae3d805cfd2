"""The core's loop with both ends of its socket in a test's hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from pagefleet_engine.config import EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.core.parking import Suppliers
from pagefleet_engine.core.step import StepPlan
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import FromCore, RequestOutput, StepOutputs, ToCore
from pagefleet_engine.engine_core.process import CoreLoop
from pagefleet_engine.engine_core.progress import Progress, ProgressReader, ProgressWriter
from pagefleet_kv.port import KVConnector

from tests.fakes.scripted_core import scripted_core


class Wire:
    """A loop with its socket's two ends in hand; time to wait is recorded, not spent."""

    def __init__(
        self,
        folder: Path,
        before: Callable[[StepPlan], None] = lambda plan: None,
        max_in_flight: int = 1,
        connector: KVConnector | None = None,
        num_askers: int = 1,
    ) -> None:
        self.watched: list[int] = []
        self.inbox: list[tuple[int, bytes]] = []
        self.sent: list[FromCore] = []
        self.told: dict[int, list[FromCore]] = {}
        self.waits: list[float] = []
        self.during_step: list[Progress] = []
        self.reader = ProgressReader(folder / "progress")
        self._before = before
        scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_num_queued_reqs=8)
        self.config = EngineConfig(model=ModelConfig(model="fake"), scheduler=scheduler)
        self.core: EngineCore = scripted_core(
            self.config, self._before_step, max_in_flight=max_in_flight, suppliers=Suppliers(connector)
        )
        progress = ProgressWriter(folder / "progress")
        self.loop = CoreLoop(self.core, self, progress, num_askers=num_askers)  # type: ignore[arg-type]

    def watch(self, bell: int) -> None:
        self.watched.append(bell)

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        self.waits.append(timeout_s)
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromCore, asker: int = 0) -> None:
        self.sent.append(message)
        self.told.setdefault(asker, []).append(message)

    def turn(self, *messages: ToCore | bytes, asker: int = 0) -> None:
        self.inbox += [(asker, m if isinstance(m, bytes) else msgspec.msgpack.encode(m)) for m in messages]
        self.loop.turn(5.0)

    @property
    def outputs(self) -> list[RequestOutput]:
        return outputs_of(self.sent)

    def _before_step(self, plan: StepPlan) -> None:
        self.during_step.append(self.reader.read())
        self._before(plan)


def outputs_of(messages: Sequence[FromCore]) -> list[RequestOutput]:
    """Return what messages tell of requests."""
    return [output for message in messages if isinstance(message, StepOutputs) for output in message.outputs]
