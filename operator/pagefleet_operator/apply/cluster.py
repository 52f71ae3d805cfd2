"""What the operator asks of a cluster. Tests give it a dictionary, the operator an API server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from pagefleet_operator.apply.kinds import Kind

Body = dict[str, Any]
"""An object as JSON."""


class Cluster(Protocol):
    """Every method may raise a `ClusterError`; a method that writes also NotLeading, before anything is sent."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Body | None:
        """Return the object; None: there is none."""

    async def apply(self, body: Mapping[str, Any]) -> Body:
        """Make the fields of the object so, by server-side apply, against whoever else set them."""

    async def annotate(self, kind: Kind, namespace: str, name: str, annotations: Mapping[str, str]) -> None:
        """Set annotations that the next `apply` of the object leaves alone."""

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete exactly the object that was seen; one that is gone or is another by now is left as it is."""

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Merge into the object's status."""

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Body:
        """Create the object; Conflict: there is one."""

    async def replace(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Body:
        """Replace the object if nobody changed it since it was read; else Conflict."""

    async def list_events(self, namespace: str, kind: str, name: str) -> Sequence[Body]:
        """Return Kubernetes events about an object, or about all of its kind where `name` is empty."""

    def list_metadata(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[Body]:
        """Iterate over the metadata of all objects, page by page; `namespace` empty: of all namespaces."""

    async def kinds_present(self, kinds: Sequence[Kind]) -> frozenset[str]:
        """Return which of these kinds the API server knows."""


class Fence(Protocol):
    """Stands between a writer and the cluster."""

    def check(self) -> float:
        """Return, while this process leads for certain, the seconds within which a write has to have ended.

        Raises:
            NotLeading: it may not.
        """
