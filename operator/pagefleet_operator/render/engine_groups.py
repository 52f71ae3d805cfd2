"""The engines of one InferenceService as they are planned in a cluster: one group, or a group for each part."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import InferenceServiceStatus, PairRole

from pagefleet_operator.plan.autoscaling import wanted_engines
from pagefleet_operator.plan.engine_sets import LEADER_WORKER_SET, deployed_replicas, replicas_in
from pagefleet_operator.plan.gpu_fit import Fit, check_fit
from pagefleet_operator.plan.names import child_stem, names_of
from pagefleet_operator.plan.observed import Observed
from pagefleet_operator.plan.pair_rollout import Pair
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.resolve import Resolved, resolve
from pagefleet_operator.plan.role_health import see_role
from pagefleet_operator.plan.role_seen import RoleSeen, both_parts
from pagefleet_operator.plan.roles import PAIR_ROLES, both_or_none, is_disaggregated, role_status_view, role_view
from pagefleet_operator.plan.verdict import Refusal
from pagefleet_operator.render.engine_pairs import Part, deployed_pairs
from pagefleet_operator.render.leader_worker_set import engine_templates
from pagefleet_operator.render.model_files import keeps_one_node
from pagefleet_operator.render.pod_policy import check_pod_template
from pagefleet_operator.render.settings import ClusterSettings

_INSTALL = (
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/lws/releases/download/v0.10.0/manifests.yaml"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroups:
    """What engines are wanted."""

    counts: int | Pair
    """For whole requests, or of each part."""
    parts: tuple[Part, ...] = ()
    """Where prompts and answers are computed by different engines; empty while the spec is refused."""
    fit: Fit
    """Whether the model fits their devices; of two parts, what keeps one from it."""

    @property
    def whole(self) -> int:
        """Engines for whole requests."""
        return self.counts if isinstance(self.counts, int) else 0

    def see(
        self, service: InferenceService, observed: Observed, revision: str
    ) -> tuple[RoleSeen, tuple[RoleSeen, ...]]:
        """Return the engines as they were seen, and those of each part.

        `revision` is the wanted one; empty: those that exist stay as they are.
        """
        key = (service.metadata.namespace, service.name)
        if isinstance(self.counts, int):
            return see_role("engine", key, self.counts, revision, observed), ()
        revision = revision or _serving_revision(observed)
        prefill = see_role("prefill", key, self.counts.prefill, revision, observed)
        decode = see_role("decode", key, self.counts.decode, revision, observed)
        return both_parts(prefill, decode), (prefill, decode)


def count_engines(service: InferenceService, previous: InferenceServiceStatus | None, observed: Observed) -> int | Pair:
    """Return how many engines are wanted, for whole requests or of each part: by the spec, or by the autoscaler."""
    if not is_disaggregated(service):
        deployed = deployed_replicas(observed.children, names_of(service).engine)
        return wanted_engines(service, previous, observed.scaling, deployed)
    counts = (_part_engines(role_view(service, role), role, previous, observed) for role in PAIR_ROLES)
    return both_or_none(service, Pair(*counts))


def plan_groups(
    service: InferenceService,
    previous: InferenceServiceStatus | None,
    observed: Observed,
    resolved: Resolved,
    settings: ClusterSettings,
) -> EngineGroups | Refusal:
    """Return the engines that are wanted, or why the spec is refused.

    Args:
        resolved: the settings in force for whole requests, with the model's facts where they are known.
    """
    counts = count_engines(service, previous, observed)
    if isinstance(counts, int):
        return EngineGroups(counts=counts, fit=_missing_kind(resolved, observed) or check_fit(service, resolved))
    parts: list[Part] = []
    for role, engines in zip(PAIR_ROLES, (counts.prefill, counts.decode), strict=True):
        view = role_view(service, role)
        own = resolve(view, observed.profiles, resolved.facts, settings.engine_image)
        if isinstance(own, Refusal):
            return own
        if refusal := check_pod_template(view, own, settings, role):
            return refusal
        if refusal := check_groups(view, own, role):
            return refusal
        sources = (parts[0].resolved if parts else own).ranks.data
        templates = engine_templates(view, own, settings, role, sources)
        parts.append(Part(role=role, view=view, resolved=own, templates=templates, engines=engines))
    fits = [_missing_kind(one.resolved, observed) or check_fit(one.view, one.resolved) for one in parts]
    fit = next((one for one in fits if one.refusal), fits[-1])
    return EngineGroups(counts=counts, parts=tuple(parts), fit=fit)


_LONGEST_NAMED = 37
"""Characters of a stem and a role: StatefulSets put their name, here with a revision, two numbers and a hash into one
label."""


def check_groups(service: InferenceService, resolved: Resolved, role: PairRole | None = None) -> Refusal | None:
    """Return what keeps engines from being spread over several nodes; None: nothing, or each has one node.

    Args:
        role: of these engines, where there are parts.
    """
    if resolved.nodes == 1:
        return None
    if keeps_one_node(service, resolved):
        message = f"keeps all pods on one node, and each engine has {resolved.nodes}: give ReadWriteMany"
        return Refusal("spec.cache.accessMode", Reason.INVALID_SPEC, message)
    most = _LONGEST_NAMED - len(role or "engine")
    message = f"needs a metadata.name of {most} characters at most where engines have several nodes"
    if len(child_stem(service.name)) <= most:
        return None
    if role:
        return Refusal("spec.disaggregation", Reason.INVALID_SPEC, message)
    return Refusal("spec.rollout.canary", Reason.INVALID_SPEC, message) if service.spec.rollout.canary else None


def _missing_kind(resolved: Resolved, observed: Observed) -> Fit | None:
    """Refuse engines over several nodes where nobody makes them; when somebody does, this is looked at again."""
    if resolved.nodes == 1 or LEADER_WORKER_SET in observed.optional_kinds:
        return None
    ranks = resolved.ranks
    message = (
        f"an engine of {ranks.total} ranks on {ranks.nodes} nodes is a LeaderWorkerSet, which this cluster does not "
        f"know. Install it: {_INSTALL}; or spread engines over fewer nodes (spec.resources.gpus, spec.parallelism)"
    )
    return Fit(Refusal("spec.nodes", Reason.KIND_MISSING, message))


def _part_engines(
    view: InferenceService, role: PairRole, previous: InferenceServiceStatus | None, observed: Observed
) -> int:
    trial = previous.canary.revision if previous and previous.canary and previous.canary.phase != "Promoted" else ""
    counts = [count for name, pair in deployed_pairs(observed.children).items() if role in pair and name != trial
              if (count := replicas_in(pair[role])) is not None]  # fmt: skip
    # While a revision replaces another, none of their counts is the wanted one.
    deployed = counts[0] if len(counts) == 1 else None
    return wanted_engines(view, role_status_view(previous, role), observed.role_scaling.get(role), deployed)


def _serving_revision(observed: Observed) -> str:
    """Return the revision that most engines of both parts are of."""
    asked = {
        revision: sum(replicas_in(body) or 0 for body in pair.values())
        for revision, pair in deployed_pairs(observed.children).items()
    }
    return max(asked, key=lambda one: (asked[one], one), default="")
