"""Gathers what the plan of one InferenceService depends on: from the watches, and by asking where nothing watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.model_facts import Progress
from pagefleet_protocol.model_uri import parse_model_uri

from pagefleet_operator.apply.cluster import Cluster
from pagefleet_operator.apply.kinds import BY_NAME
from pagefleet_operator.errors import Refused
from pagefleet_operator.handlers.autoscaler import Autoscaler
from pagefleet_operator.handlers.cluster_view import ClusterView, Key, StoredService
from pagefleet_operator.handlers.event_reader import EventReader, suspects
from pagefleet_operator.handlers.live_numbers import LiveNumbers
from pagefleet_operator.handlers.pod_http import KvAnswers, PodHttp
from pagefleet_operator.handlers.seen import stored_child
from pagefleet_operator.plan.observed import Child, ChildKey, Observed, PodSeen
from pagefleet_operator.plan.roles import PAIR_ROLES, is_disaggregated


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where observations come from."""

    view: ClusterView
    cluster: Cluster
    events: EventReader
    pods: PodHttp
    kv: KvAnswers
    live: LiveNumbers
    scaling: Autoscaler
    now: Callable[[], datetime]


class Observer:
    """Sees one InferenceService at a time."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def glance(self, key: Key, stored: StoredService, optional_kinds: frozenset[str]) -> Observed:
        """Return what the watches know, without asking anybody."""
        sources = self._sources
        return Observed(
            now=sources.now(),
            generation=stored.generation,
            children=sources.view.children(key, stored.uid),
            pods=sources.view.pods(key),
            profiles=dict(sources.view.profiles),
            invalid_profiles=dict(sources.view.invalid_profiles),
            optional_kinds=optional_kinds,
            live=sources.live.sample(key),
            scaling=sources.scaling.seen(key),
            trial=sources.scaling.trial(key),
            role_scaling={role: seen for role in PAIR_ROLES if (seen := sources.scaling.seen(key, role)) is not None},
        )

    async def look(self, key: Key, service: InferenceService, glance: Observed) -> Observed:
        """Add what has to be asked for: events, the download's progress, and whether engines reach each other.

        Raises:
            ClusterError: the API server does not answer.
        """
        return replace(
            glance,
            events=await self._sources.events.read(*key, suspects(glance, named_claims(service))),
            progress=await self._progress(glance.pods),
            pair_load=self._sources.scaling.pair_load(key),
            kv_engines=await self._sources.kv.of(key, glance.pods) if is_disaggregated(service) else (),
        )

    async def find(self, key: Key, uid: str, names: Sequence[ChildKey]) -> dict[ChildKey, Child]:
        """Return those of these objects that exist though no watch told of them: others', or too new.

        Raises:
            ClusterError: the API server does not answer.
        """
        found = {}
        for kind, name in names:
            try:
                body = await self._sources.cluster.get(BY_NAME[kind], key[0], name)
            except Refused:
                continue  # applying it will be refused too, and that reaches the status
            if body is not None:
                found[kind, name] = stored_child(body, kind, BY_NAME[kind].api_version).open(uid)
        return found

    async def _progress(self, pods: Sequence[PodSeen]) -> Progress | None:
        for pod in pods:
            if pod.component == "model" and pod.phase == "Running" and pod.ip and not pod.deleting:
                return await self._sources.pods.progress(pod.ip)
        return None


def named_claims(service: InferenceService) -> tuple[str, ...]:
    """Return the claims that the spec names: to download into, or with the model in them."""
    uri = parse_model_uri(service.spec.model.uri)
    names = [service.spec.cache.claim, uri.claim if uri.scheme == "pvc" else None]
    return tuple(name for name in names if name)
