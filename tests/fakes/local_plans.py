"""Plans of InferenceServices for this machine, as tests want them. No test in here."""

from __future__ import annotations

from typing import Any

from pagefleet_operator.plan.observed import ScalingSeen
from pagefleet_operator.plan.resolve import Resolved, resolve
from pagefleet_operator.plan.roles import PAIR_ROLES, is_disaggregated, role_view
from pagefleet_operator.plan.workloads import PartSettings, Plan, plan_workloads
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.resource_documents import parse_inference_profile


def resolved_of(service: InferenceService, *profiles: dict[str, Any]) -> Resolved:
    """The settings in force with these profiles."""
    parsed = [parse_inference_profile(profile) for profile in profiles]
    found = resolve(service, {profile.name: profile for profile in parsed}, None)
    assert isinstance(found, Resolved)
    return found


def local_plan(
    service: InferenceService, *profiles: dict[str, Any], spare_gpu: bool = True, scaling: ScalingSeen | None = None
) -> Plan:
    """The plan of a service whose model lies where its URI says."""
    resolved = resolved_of(service, *profiles)
    uri = resolved.uri
    location = uri.local_path if uri.scheme == "file" else f"{uri.scheme}://{uri.path}"
    roles = PAIR_ROLES if is_disaggregated(service) else ()
    parts = {role: PartSettings(resolved_of(role_view(service, role), *profiles)) for role in roles}
    return plan_workloads(service, resolved, location, spare_gpu, scaling, parts)
