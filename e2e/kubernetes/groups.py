"""LeaderWorkerSet in a cluster that has none: its definition, and a controller that makes pods as LWS does.

What is to be done is decided by `tests.fakes.leader_worker_set`; here it is carried out against the API server.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import ResourceNotFoundError

from e2e.kubernetes.cluster import Cluster, wait_until
from e2e.kubernetes.installation import DEFINITION as DEFINITION_KIND
from tests.fakes import leader_worker_set, leader_worker_set_definition

KIND = (leader_worker_set.API_VERSION, "LeaderWorkerSet")
_LOOK_S = 0.3
_RFC_3339 = "%Y-%m-%dT%H:%M:%SZ"
_OURS = {"app.kubernetes.io/managed-by": "pagefleet-e2e"}
_CHANGED_MEANWHILE = (404, 409)
"""What one look has missed, the next one sees."""


def is_installed(cluster: Cluster) -> bool:
    """Return whether the cluster has LeaderWorkerSet itself, which no test may take away."""
    found = cluster.get(*DEFINITION_KIND, leader_worker_set_definition.NAME)
    return found is not None and not _OURS.items() <= (found["metadata"].get("labels") or {}).items()


class GroupController:
    """Use as a context manager, which brings and removes the definition; pods are made by a thread meanwhile."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._own = Cluster(cluster.kubeconfig)
        self._objects = client.CustomObjectsApi(self._own.connection)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="groups")
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self.define()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undefine()
        self._ended.set()
        self._thread.join()
        self._own.close()
        assert self._failure is None, self._failure

    def define(self) -> None:
        """Bring the definition, and wait until the API server serves the resource."""
        definition = leader_worker_set_definition.definition()
        self._cluster.apply({**definition, "metadata": {**definition["metadata"], "labels": _OURS}})
        wait_until(self._is_served, "LeaderWorkerSets are served")

    def undefine(self) -> None:
        """Remove the definition, and with it every LeaderWorkerSet and its pods."""
        self._cluster.delete(*DEFINITION_KIND, leader_worker_set_definition.NAME)
        wait_until(
            lambda: not self._cluster.get(*DEFINITION_KIND, leader_worker_set_definition.NAME), "the definition is gone"
        )

    @contextlib.contextmanager
    def absent(self) -> Iterator[None]:
        """Take the definition away for a while."""
        self.undefine()
        try:
            yield
        finally:
            self.define()

    def _is_served(self) -> bool:
        with contextlib.suppress(ResourceNotFoundError, ApiException):
            self._cluster.list(*KIND)
            return True
        return False

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self._look()
            except ResourceNotFoundError:
                continue
            except ApiException as error:
                if error.status not in _CHANGED_MEANWHILE:
                    self._failure = error
            except BaseException as error:
                self._failure = error
                raise

    def _look(self) -> None:
        for made in self._own.list(*KIND):
            if "deletionTimestamp" not in made["metadata"]:
                self._carry_out(made)

    def _carry_out(self, made: dict[str, Any]) -> None:
        namespace = made["metadata"]["namespace"]
        pods = self._own.list("v1", "Pod", namespace, leader_worker_set.NAME)
        services = [one["metadata"]["name"] for one in self._own.list("v1", "Service", namespace)]
        now = datetime.now(UTC)
        found = leader_worker_set.decide(made, pods, services, now.strftime(_RFC_3339))
        for event in found.events:
            self._tell(made, event, now)
        for name in found.delete:
            self._own.delete("v1", "Pod", name, namespace)
        for body in found.create:
            self._own.create(body, namespace)
        if found.status != made.get("status"):
            group, version = leader_worker_set.API_VERSION.split("/")
            names = (group, version, namespace, "leaderworkersets", made["metadata"]["name"])
            self._objects.patch_namespaced_custom_object_status(*names, {"status": found.status})

    def _tell(self, made: dict[str, Any], event: tuple[str, str], now: datetime) -> None:
        reason, message = event
        about = {name: made["metadata"][name] for name in ("name", "namespace", "uid")}
        about |= {"apiVersion": KIND[0], "kind": KIND[1]}
        event_kind = {"apiVersion": "v1", "kind": "Event", "metadata": {"generateName": f"{about['name']}."}}
        told = {"reason": reason, "message": message, "type": "Normal", "source": {"component": "leaderworkerset"}}
        times = dict.fromkeys(("firstTimestamp", "lastTimestamp"), now.strftime(_RFC_3339))
        self._own.create({**event_kind, "involvedObject": about, **told, **times, "count": 1}, about["namespace"])
