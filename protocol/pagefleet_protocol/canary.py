"""How a new revision is tried out on a share of the requests: a part of the InferenceService."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pagefleet_protocol.resource_base import Object


class CanaryStep(Object):
    """A share of the requests, and for how long."""

    percent: Annotated[int, Field(ge=1, le=99)]
    """Share of the requests that the new revision gets."""
    seconds: Annotated[int, Field(ge=5, le=604_800)] = 300
    """How long at least."""


class CanaryAnalysis(Object):
    """How much worse than the old revision the new one may be, by what the routers count of both in the same time."""

    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 50
    """Requests that the new revision must have had in a step, and half as many streams where the old one has them."""
    max_errors: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Percentage points more requests that fail."""
    max_refusals: Annotated[float, Field(ge=0, le=100)] = 5.0
    """Percentage points more requests that engines refuse (4xx)."""
    max_ttft: Annotated[int, Field(ge=0, le=10_000)] = 50
    """Percent that the mean time to the first token may be longer."""
    max_itl: Annotated[int, Field(ge=0, le=10_000)] = 50
    """Percent that the mean time between tokens may be longer."""
    patience: Annotated[int, Field(ge=0, le=604_800)] = 1800
    """Seconds after a step's time that figures may be missing, or requests too few; then it goes back."""


DEFAULT_STEPS = tuple(CanaryStep(percent=percent) for percent in (5, 25, 50))


class Canary(Object):
    """A new revision gets some requests first, and goes back by itself where it is worse; the old engines all stay."""

    steps: Annotated[
        tuple[CanaryStep, ...],
        Field(strict=False, max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """One after the other; default: 5, 25 and 50 percent for five minutes each."""
    analysis: CanaryAnalysis = CanaryAnalysis()
    """What it is compared by."""

    @property
    def plan(self) -> tuple[CanaryStep, ...]:
        """The steps in force."""
        return self.steps or DEFAULT_STEPS
