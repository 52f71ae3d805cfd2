"""The operator's `Cluster` straight over the emulated store: no HTTP, no time. No test in here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from pagefleet_operator.apply.kinds import BY_NAME, Kind
from pagefleet_operator.errors import ClusterError, Conflict, Unavailable
from pagefleet_operator.errors import Refused as ClusterRefused
from pagefleet_operator.handlers.cluster_view import ClusterView, managed_selector

from tests.fakes.kube_kinds import BUILT_IN, PAGEFLEET
from tests.fakes.kube_kinds import Kind as StoreKind
from tests.fakes.kube_selectors import selector
from tests.fakes.kube_store import Document, Refused, Store, Write

KINDS: Mapping[str, StoreKind] = {kind.name: kind for kind in (*BUILT_IN, *PAGEFLEET)}
Body = dict[str, Any]


def allow(verb: str, kind: str, name: str) -> None:
    """Let every write through."""


class StoreCluster:
    """Every write first passes `gate`, which may raise."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or Store()
        self.gate: Callable[[str, str, str], None] = allow
        self.requests: list[tuple[str, str, str]] = []
        self.down = False

    def add_namespace(self, name: str) -> None:
        self.store.create(KINDS["Namespace"], None, {"metadata": {"name": name}})

    async def get(self, kind: Kind, namespace: str, name: str) -> Body | None:
        self._ask("get", kind, name)
        return self.store.find(KINDS[kind.kind], namespace or None, name)

    async def apply(self, body: Mapping[str, Any]) -> Body:
        kind, metadata = BY_NAME[body["kind"]], body["metadata"]
        write = Write(manager="pagefleet-operator", force=True, content_type="application/apply-patch+yaml")
        return self._write("apply", kind, metadata["name"], self.store.apply, metadata["namespace"], dict(body), write)

    async def annotate(self, kind: Kind, namespace: str, name: str, annotations: Mapping[str, str]) -> None:
        write = Write(manager="pagefleet-operator-facts", content_type="application/merge-patch+json")
        patch = {"metadata": {"annotations": dict(annotations)}}
        self._write("annotate", kind, name, self.store.merge_patch, namespace, patch, write)

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        write = Write(manager="pagefleet-operator", subresource="status", content_type="application/merge-patch+json")
        self._write("status", kind, name, self.store.merge_patch, namespace, {"status": dict(patch)}, write)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self._ask("delete", kind, name)
        self.gate("delete", kind.kind, name)
        try:
            self.store.delete(KINDS[kind.kind], namespace, name, {"preconditions": {"uid": uid}})
        except Refused as refusal:
            if refusal.status not in (404, 409):
                raise cluster_error(refusal) from refusal

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Body:
        name = body["metadata"]["name"]
        self._ask("create", kind, name)
        self.gate("create", kind.kind, name)
        try:
            return self.store.create(KINDS[kind.kind], namespace, dict(body))
        except Refused as refusal:
            raise cluster_error(refusal) from refusal

    async def replace(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Body:
        write = Write(manager="pagefleet-operator", content_type="application/json")
        return self._write("replace", kind, body["metadata"]["name"], self.store.replace, namespace, dict(body), write)

    async def list_events(self, namespace: str, kind: str, name: str) -> Sequence[Body]:
        self._ask("list", BY_NAME["Event"], name)
        return [
            event
            for event in self.store.all_of(KINDS["Event"], namespace)
            if event["involvedObject"]["kind"] == kind and name in ("", event["involvedObject"]["name"])
        ]

    async def list_metadata(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[Body]:
        self._ask("list", kind, "")
        for document in self._matching(kind, namespace, selector):
            yield document["metadata"]

    async def kinds_present(self, kinds: Sequence[Kind]) -> frozenset[str]:
        self._ask("discover", kinds[0], "")
        return frozenset(kind.kind for kind in kinds if kind.kind in KINDS)

    def show(self, view: ClusterView) -> None:
        """Tell a view everything, as watches do."""
        for kind in BY_NAME.values():
            if kind.kind not in KINDS or kind.kind in ("Event", "Lease", "Secret"):  # these are not watched
                continue
            found = self._matching(kind, "", managed_selector(kind))
            for document in found:
                view.note(kind, document)
            uids = {
                (one["metadata"].get("namespace") or "", one["metadata"]["name"]): one["metadata"]["uid"]
                for one in found
            }
            view.keep_only(kind, "", uids)

    def _matching(self, kind: Kind, namespace: str, labels: str) -> list[Document]:
        wanted = selector(labels, "")
        return [one for one in self.store.all_of(KINDS[kind.kind], namespace or None) if wanted(one)]

    def _ask(self, verb: str, kind: Kind, name: str) -> None:
        self.requests.append((verb, kind.kind, name))
        if self.down:
            raise Unavailable("connection refused")

    def _write(
        self, verb: str, kind: Kind, name: str, method: Callable[..., Document], namespace: str, body: Body, by: Write
    ) -> Document:
        self._ask(verb, kind, name)
        self.gate(verb, kind.kind, name)
        try:
            return method(KINDS[kind.kind], namespace, name, body, by)
        except Refused as refusal:
            raise cluster_error(refusal) from refusal


def cluster_error(refusal: Refused) -> ClusterError:
    error = Conflict if refusal.status == 409 else ClusterRefused
    return error(str(refusal), status=refusal.status, reason=refusal.reason)
