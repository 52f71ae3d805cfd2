"""What a reconcile asks of the plan: a small door, so that a test can stand behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus

from pagefleet_operator.plan.observed import ChildKey, Observed


class Plan(Protocol):
    """What is to be so."""

    @property
    def objects(self) -> Sequence[dict[str, Any]]:
        """Children as they are wanted."""

    @property
    def delete(self) -> Sequence[ChildKey]:
        """Children that are ours and not wanted."""

    @property
    def status(self) -> InferenceServiceStatus:
        """What people read."""

    @property
    def needs_fleet_key(self) -> bool:
        """Whether the Secret with the fleet key may be missing."""

    @property
    def look_again_s(self) -> float | None:
        """When something will be different though nothing happens; none: never."""


class Announcement(Protocol):
    """Something that people should hear of, as a Kubernetes event."""

    @property
    def type(self) -> str:
        """Normal or Warning."""

    @property
    def reason(self) -> str:
        """One word."""

    @property
    def message(self) -> str:
        """One sentence or two."""


class Planner(Protocol):
    """Decides; every method is pure."""

    def plan(self, service: InferenceService, previous: InferenceServiceStatus | None, observed: Observed) -> Plan:
        """Plan one InferenceService from what was seen."""

    def refuse(
        self,
        error: InvalidDocument,
        service: tuple[str, str],
        previous: InferenceServiceStatus | None,
        observed: Observed,
    ) -> InferenceServiceStatus:
        """Return the status of an InferenceService, by namespace and name, that cannot be read."""

    def announce(self, before: InferenceServiceStatus | None, after: InferenceServiceStatus) -> Sequence[Announcement]:
        """Return what changed between two statuses that is worth an event."""
