"""What keeps the operator from making what it wants: names that are taken, kinds that are missing, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.kube_names import KIND

from pagefleet_operator.plan.observed import ApplyFailure, Child, ChildKey, Observed
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import Verdict, quoted

_CONFLICT, _INVALID, _TOO_MANY, _SERVER_ERROR = 409, 422, 429, 500
_KIND_SOURCES = {
    "ServiceMonitor": ("spec.monitoring.serviceMonitor", "the Prometheus operator"),
    "Ingress": ("spec.expose.type", "networking.k8s.io/v1"),
    "HTTPRoute": ("spec.expose.type", "the Gateway API"),
    "InferencePool": ("spec.router.inferencePool", "the Gateway API Inference Extension"),
}
"""Optional kind -> the field that asks for it, and what brings it."""

_REMEDIES = (
    (("exceeded quota",), "Have the namespace's ResourceQuota raised, or ask for less"),
    (("being terminated",), "The namespace is being deleted: make the InferenceService in another one"),
    (("cannot ", " resource "), "The operator's account lacks the right: upgrade the chart to the operator's version"),
    (("denied the request",), "A policy of this cluster forbids it: change the spec, or ask who keeps the policy"),
    (("denied request",), "A policy of this cluster forbids it: change the spec, or ask who keeps the policy"),
    (("immutable",), "Delete the object, and it is made anew"),
)
"""Words of the API server, all of which have to be there, and what to do; the first that fits."""


def taken_names(wanted: Sequence[Mapping[str, Any]], observed: Observed) -> tuple[ChildKey, ...]:
    """Return the wanted objects whose names others' objects have."""
    keys = [key_of(one) for one in wanted]
    return tuple(key for key in keys if key in observed.children and not observed.children[key].ours)


def key_of(body: Mapping[str, Any]) -> ChildKey:
    return str(body["kind"]), str(body["metadata"]["name"])


def name_taken(taken: Sequence[ChildKey], service: InferenceService, observed: Observed) -> Verdict | None:
    """Return Degraded for names that are taken."""
    if not taken:
        return None
    kind, name = taken[0]
    owner = _owner(observed.children[taken[0]])
    if owner == f"{KIND} {service.name}":
        return Verdict(
            True, Reason.NAME_TAKEN, f"{kind} {name} belongs to the {owner} that was deleted; it is about to go as well"
        )
    whose = f"belongs to {owner}" if owner else "was made by somebody else"
    more = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
    remedy = f"Delete it, or give this {KIND} another name: kubectl -n {service.metadata.namespace} get {kind} {name}"
    return Verdict(True, Reason.NAME_TAKEN, f"{kind} {name}{more} {whose}, so it was left alone. {remedy}")


def kind_missing(service: InferenceService, observed: Observed) -> Verdict | None:
    """Return Degraded for an optional kind that is asked for and that the cluster does not know."""
    asked = {"Ingress": "Ingress", "Gateway": "HTTPRoute"}.get(service.spec.expose.type)
    monitor = "ServiceMonitor" if service.spec.monitoring.service_monitor else None
    pool = "InferencePool" if service.spec.router.inference_pool else None
    for kind in (asked, pool, monitor):
        if kind is not None and kind not in observed.optional_kinds:
            path, source = _KIND_SOURCES[kind]
            return Verdict(
                True,
                Reason.KIND_MISSING,
                f"{path} asks for {_a(kind)}, which this cluster does not know. Install {source}, or change the field; "
                "everything else is as wanted",
            )
    return None


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "AEIOU" else f"a {kind}"


def apply_refused(failures: Sequence[ApplyFailure], namespace: str) -> Verdict | None:
    """Return Degraded for what the API server said no to; a lasting no is told before one that may pass."""
    if not failures:
        return None
    worst = min(failures, key=_passes)
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    what = "did not take" if _passes(worst) else "refused"
    said = quoted(worst.message) or worst.reason or "no answer"
    remedy = _remedy(worst, namespace)
    return Verdict(
        True, Reason.APPLY_REFUSED, f"the API server {what} {worst.kind} {worst.name}{more}: {said}. {remedy}"
    )


def _passes(failure: ApplyFailure) -> bool:
    return failure.status in (0, _CONFLICT, _TOO_MANY) or failure.status >= _SERVER_ERROR


def _remedy(failure: ApplyFailure, namespace: str) -> str:
    show = f"kubectl -n {namespace} get {failure.kind} {failure.name} -o yaml"
    known = next((remedy for words, remedy in _REMEDIES if all(word in failure.message for word in words)), None)
    if known is None and failure.status == _CONFLICT:
        known = f"Another manager owns the field; it is tried again: {show} --show-managed-fields"
    elif known is None and _passes(failure):
        known = "It is tried again"
    return known or f"Correct the field that is named; what there is: {show}"


def _owner(child: Child) -> str:
    references = child.body.get("metadata", {}).get("ownerReferences") or ()
    return next((f"{one.get('kind')} {one.get('name')}" for one in references if one.get("controller")), "")
