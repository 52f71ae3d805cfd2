"""Plays LeaderWorkerSet's controller, and the kubelets of its pods, on the store of an emulated API server.

Nothing happens by itself: a test says when everybody works. Pods are ready at the next turn, unless a test says else.
No test in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from tests.fakes.kube_kinds import LEADER_WORKER_SET
from tests.fakes.kube_operator import NAMESPACE, World
from tests.fakes.leader_worker_set import NAME, Body, decide

UNSCHEDULABLE: Body = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        }
    ],
}


def running(*, ready: bool = True, restarts: int = 0, ended: str = "") -> Body:
    """Return the status of a pod on a node; `ended`: the last words of its container, which was started again."""
    container: Body = {"name": "engine", "restartCount": restarts, "state": {"running": {}}}
    if ended:
        container["lastState"] = {"terminated": {"exitCode": 1, "reason": "Error", "message": ended}}
    return {
        "phase": "Running",
        "podIP": "10.0.0.9",
        "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": _now()}],
        "containerStatuses": [container],
    }


def _now() -> str:
    return datetime.now(UTC).isoformat()


class Groups:
    """All LeaderWorkerSets of a world's namespace."""

    def __init__(self, w: World) -> None:
        self._w = w
        self.states: dict[str, Body] = {}
        """Status of pods that are not ready at once, by name."""
        w.api.serve(LEADER_WORKER_SET)

    def work(self) -> None:
        """Let controller and kubelets do what is to be done now, once."""
        for made in list(self._all("LeaderWorkerSet")):
            self._control(made)
        for pod in list(self._all("Pod")):
            if NAME in pod["metadata"].get("labels", {}):
                self._run(pod)

    def pods(self) -> dict[str, Body]:
        """Return the pods of groups, by name."""
        found = {pod["metadata"]["name"]: pod for pod in self._all("Pod")}
        return {name: pod for name, pod in sorted(found.items()) if NAME in pod["metadata"].get("labels", {})}

    def revisions(self) -> set[str]:
        return {pod["metadata"]["labels"]["pagefleet.dev/revision"] for pod in self.pods().values()}

    def once(self, condition: Callable[[], object]) -> Callable[[], object]:
        """Return a condition that has everybody work whenever it is asked."""

        def ask() -> object:
            self.work()
            return condition()

        return ask

    def _control(self, made: Body) -> None:
        store, api = self._w.api.store, self._w.api
        services = [one["metadata"]["name"] for one in self._all("Service")]
        decided = decide(made, list(self._all("Pod")), services, _now())
        for name in decided.delete:
            self._end(name)
        for body in decided.create:
            if store.find(api.kind(body["kind"]), NAMESPACE, body["metadata"]["name"]) is None:
                store.create(api.kind(body["kind"]), NAMESPACE, body)
        for reason, message in decided.events:
            about = {"kind": "LeaderWorkerSet", "name": made["metadata"]["name"], "namespace": NAMESPACE}
            event = {"involvedObject": about, "reason": reason, "message": message}
            name = f"group-{sum(1 for _ in self._all('Event'))}"
            self._w.api.add("Event", {**event, "metadata": {"name": name}}, NAMESPACE)
        if decided.status != made.get("status"):
            api.set_status("LeaderWorkerSet", NAMESPACE, made["metadata"]["name"], decided.status)

    def _end(self, name: str) -> None:
        pod = self._w.find("Pod", name)
        if pod is None:
            return
        self._w.delete("Pod", name)

    def _run(self, pod: Body) -> None:
        name = pod["metadata"]["name"]
        if name in self.states or "status" not in pod:
            wanted = self.states.get(name) or running()
            if pod.get("status") != wanted:
                self._w.api.set_status("Pod", NAMESPACE, name, wanted)

    def _all(self, kind: str) -> Iterator[Body]:
        return self._w.api.store.all_of(self._w.api.kind(kind), NAMESPACE)
