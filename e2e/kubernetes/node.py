"""What only the node can do to a pod: kill its processes, keep files. Needs a namespace that admits privileged pods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from e2e.kubernetes.cluster import Cluster, wait_until

KILLER = Path(__file__).with_name("kill_pod.py")


def kill_processes(
    cluster: Cluster, image: str, namespace: str, pod: dict[str, Any], part: Literal["all", "child"] = "all"
) -> None:
    """SIGKILL every process of a pod, as when memory runs out, or one that its first has started: nothing is told,
    nothing tidied up."""
    uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
    container: dict[str, Any] = {"image": image, "command": ["python", "-c", KILLER.read_text(), uid, part]}
    container["securityContext"] = {"runAsUser": 0, "privileged": True}
    run_on_node(cluster, namespace, {"hostPID": True, "nodeName": node, "containers": [{"name": "main", **container}]})


def remove_from_node(cluster: Cluster, image: str, namespace: str, folder: str) -> None:
    """Remove a folder of the node with everything in it."""
    parent, _, name = folder.rpartition("/")
    command = ["python", "-c", "import shutil, sys; shutil.rmtree('/node/' + sys.argv[1])", name]
    run_on_node(cluster, namespace, _on_folder(image, command, parent))


def copy_to_node(cluster: Cluster, image: str, namespace: str, source: Sequence[str], folder: str) -> None:
    """Copy files of an image into a new folder of the node, which everybody may write to.

    Args:
        cluster: where.
        image: whose files.
        namespace: that admits host paths.
        source: a package's name, and a folder in it; the copy keeps that folder's own name.
        folder: on the node; it is made.
    """
    program = (
        "import importlib.util, pathlib, shutil, sys\n"
        "package = pathlib.Path(importlib.util.find_spec(sys.argv[1]).origin).parent\n"
        "source, node = package / sys.argv[2], pathlib.Path('/node')\n"
        "shutil.copytree(source, node / source.name)\n"
        "node.chmod(0o777)\n"
    )
    run_on_node(cluster, namespace, _on_folder(image, ["python", "-c", program, *source], folder))


def run_on_node(cluster: Cluster, namespace: str, spec: dict[str, Any]) -> None:
    """Run a pod to its end; the test fails when the pod does."""
    name = "on-node"
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, **spec}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}, namespace)

    def ended() -> str:
        phase = (cluster.get("v1", "Pod", name, namespace) or {}).get("status", {}).get("phase")
        return str(phase) if phase in ("Succeeded", "Failed") else ""

    how = wait_until(ended, f"pod {name} ends")
    said = cluster.logs(name, namespace)
    cluster.delete("v1", "Pod", name, namespace)
    wait_until(lambda: not cluster.get("v1", "Pod", name, namespace), f"pod {name} is gone")
    assert how == "Succeeded", said


def _on_folder(image: str, command: Sequence[str], folder: str) -> dict[str, Any]:
    """Return the spec of a pod whose /node is a folder of the node, made where it is absent."""
    container = {
        "name": "main",
        "image": image,
        "command": list(command),
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": "node", "mountPath": "/node"}],
    }
    volume = {"name": "node", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    return {"containers": [container], "volumes": [volume]}
