"""The real plan behind the door."""

from __future__ import annotations

from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus

from pagefleet_operator.plan.announcements import Announcement, announcements
from pagefleet_operator.plan.observed import Observed
from pagefleet_operator.plan.status import invalid_service_status
from pagefleet_operator.render.service_plan import ServicePlan, plan_service
from pagefleet_operator.render.settings import ClusterSettings


class ServicePlanner:
    """A `Planner` under an administrator's settings."""

    def __init__(self, settings: ClusterSettings) -> None:
        """The settings are the same for all."""
        self._settings = settings

    def plan(
        self, service: InferenceService, previous: InferenceServiceStatus | None, observed: Observed
    ) -> ServicePlan:
        """Plan one InferenceService from what was seen."""
        return plan_service(service, previous, observed, self._settings)

    def refuse(
        self,
        error: InvalidDocument,
        service: tuple[str, str],
        previous: InferenceServiceStatus | None,
        observed: Observed,
    ) -> InferenceServiceStatus:
        """Return the status of an InferenceService, by namespace and name, that cannot be read."""
        return invalid_service_status(service, error, previous, observed)

    def announce(
        self, before: InferenceServiceStatus | None, after: InferenceServiceStatus
    ) -> tuple[Announcement, ...]:
        """Return what changed between two statuses that is worth an event."""
        return announcements(before, after)
