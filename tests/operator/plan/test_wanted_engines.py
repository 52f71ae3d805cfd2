"""How many engines are wanted under autoscaling, whoever decided it last."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_operator.plan.autoscaling import wanted_engines
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus, ScalingStatus
from pagefleet_protocol.resource_documents import parse_inference_service


def service(**spec: Any) -> InferenceService:
    return parse_inference_service(
        {
            "apiVersion": "pagefleet.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "qwen", "namespace": "apps"},
            "spec": {"model": {"uri": "builtin://tiny"}, **spec},
        }
    )


SCALED = {"min": 2, "max": 6, "scaleToZero": {"after": 60}}


def told(desired: int) -> InferenceServiceStatus:
    scaling = ScalingStatus(
        mode="Internal", current=desired, desired=desired, reason="Steady", at="2026-01-01T00:00:00Z"
    )
    return InferenceServiceStatus(observed_generation=1, model_name="qwen", scaling=scaling)


@pytest.mark.parametrize(
    ("previous", "deployed", "wanted"),
    [
        (None, None, 2),
        (None, 4, 4),
        (None, 0, 2),
        (told(3), None, 3),
        (told(3), 5, 5),
        (told(3), 9, 6),
        (told(0), 0, 0),
        (told(4), 0, 0),
    ],
    ids=[
        "the first time",
        "from replicas",
        "from replicas 0",
        "the Deployment is gone",
        "a leader applied and did not live to tell",
        "never over the maximum",
        "asleep",
        "put to sleep and not told",
    ],
)
def test_before_the_autoscaler_has_decided(
    previous: InferenceServiceStatus | None, deployed: int | None, wanted: int
) -> None:
    assert wanted_engines(service(autoscaling=SCALED), previous, None, deployed) == wanted


def test_without_an_autoscaler_of_ours_replicas_count() -> None:
    assert wanted_engines(service(replicas=3), told(5), None, 4) == 3
    assert wanted_engines(service(replicas=3, autoscaling={"mode": "External"}), told(5), None, 4) == 3
