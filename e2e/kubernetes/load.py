"""Constant load on a Service from inside the cluster's network, while a test changes something."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from e2e.kubernetes.cluster import Cluster, restricted_pod, wait_until
from e2e.kubernetes.service import Service

PROGRAM = Path(__file__).with_name("load_pod.py")
ASKERS, STREAMERS = 4, 2
"""Requests at a time, of both kinds."""
PATIENCE_S = 240
"""For a few answers, where others' processes and starting engines have most of a small node."""


@dataclass(frozen=True, slots=True)
class Account:
    """How all requests so far ended."""

    asked: int
    """Short answers that were right."""
    streamed: int
    """Streams that were whole."""
    failures: tuple[str, ...]
    """Everything else, with the time of the day."""


class Load:
    """Use as a context manager; the load runs inside it."""

    def __init__(
        self, cluster: Cluster, image: str, service: Service, askers: int = ASKERS, streamers: int = STREAMERS,
        sentences: int = 0,
    ) -> None:  # fmt: skip
        """Prepare it; with `sentences` every prompt is another one, and that long."""
        self._cluster = cluster
        self._namespace = service.namespace
        self._pod = f"load-{service.name}"
        url = f"http://{service.name}.{service.namespace}.svc"
        numbers = map(str, (askers, streamers, sentences))
        command = ["python", "-c", PROGRAM.read_text(), url, service.name, *numbers]
        self._document = restricted_pod(self._pod, {"image": image, "command": command})

    def __enter__(self) -> Self:
        self._cluster.apply(self._document, self._namespace)
        wait_until(partial(self._cluster.pod_is_ready, self._pod, self._namespace), "the load has started")
        self.go_on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.delete("v1", "Pod", self._pod, self._namespace)
        wait_until(lambda: not self._cluster.get("v1", "Pod", self._pod, self._namespace), "the load has ended")

    def account(self) -> Account:
        """Return the account as it is now, or was half a second ago."""
        lines = self._cluster.logs(self._pod, self._namespace).splitlines()
        told: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return Account(told.get("ask_right", 0), told.get("stream_right", 0), tuple(told.get("failures", ())))

    def go_on(self, asked: int = 20, streamed: int = 2) -> Account:
        """Wait for so many more right answers of both kinds."""
        before = self.account()

        def enough() -> Account | None:
            now = self.account()
            return now if now.asked >= before.asked + asked and now.streamed >= before.streamed + streamed else None

        try:
            return wait_until(enough, "requests are answered", PATIENCE_S)  # type: ignore[return-value]
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.account()}") from None
