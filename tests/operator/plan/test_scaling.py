"""Who may change the number of engines on their Deployment."""

from __future__ import annotations

import pytest
from pagefleet_operator.handlers.seen import is_autoscaler
from pagefleet_protocol.kube_names import FIELD_MANAGER


@pytest.mark.parametrize("manager", ["kube-controller-manager", "keda-operator", "my-autoscaler", "vpa"])
def test_what_decides_by_itself_is_an_autoscaler(manager: str) -> None:
    assert is_autoscaler(manager)


@pytest.mark.parametrize("manager", ["kubectl", "kubectl-client-side-apply", "k9s", "Lens", FIELD_MANAGER])
def test_people_and_ourselves_are_none(manager: str) -> None:
    assert not is_autoscaler(manager)
