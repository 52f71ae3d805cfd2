"""Why a container ended: its exit code, its last words, and what the kubelet says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagefleet_protocol.exit_status import MISTAKE, MODEL_NOT_LOADED
from pagefleet_protocol.model_facts import DownloadResultError, decode_result

from pagefleet_operator.plan.observed import ContainerSeen, PodSeen
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import Trouble, quoted

_EXIT_KILLED = 137
_MISTAKES: Mapping[int, tuple[Reason, str]] = {
    MISTAKE: (Reason.SETTINGS_REFUSED, "refuses its settings"),
    MODEL_NOT_LOADED: (Reason.MODEL_LOAD_FAILED, "cannot load the model"),
}

_DEATH = re.compile(r"\bEngineDead: (.+)")
_GPU_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory", re.IGNORECASE)
_GPU_BROKEN = re.compile(
    r"uncorrectable ECC|\bXid\b|CUDA-capable device|fallen off the bus|CUDA driver initialization failed|"
    r"CUDA error: (?:unknown error|device|no device)|NVML.*(?:fail|error)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _Exit:
    """One end of a container."""

    code: int
    reason: str
    words: str
    logs: str
    """The command that shows everything it said."""

    @property
    def last_line(self) -> str:
        """Of its last words, the line that says why."""
        return telling_line([line for line in self.words.splitlines() if line.strip()])


def telling_line(lines: Sequence[str]) -> str:
    """Return the line that says why a process ended: what an engine died of, such as a rank, else the last one.

    After the engine has said it, its server still says that the engine is gone.
    """
    deaths = [found[1] for line in lines if (found := _DEATH.search(line))]
    return deaths[-1] if deaths else lines[-1] if lines else ""


def exit_trouble(pod: PodSeen, container: ContainerSeen, probe_failure: str, namespace: str) -> Trouble | None:
    """Say why `container` ended, if it did and is not ready again.

    Args:
        probe_failure: of the probe for which the kubelet ended it; empty for none.
        namespace: for commands in messages.
    """
    ended_now = container.state == "terminated"
    code = container.exit_code if ended_now else container.last_exit_code
    if code is None or (code == 0 and (ended_now or container.init)):
        return None
    end = _Exit(
        code,
        container.reason if ended_now else container.last_reason,
        container.message if ended_now else container.last_message,
        f"kubectl -n {namespace} logs {pod.name} -c {container.name}{'' if ended_now else ' --previous'}",
    )
    return (
        _download(pod, container, end)
        or _out_of_memory(pod, container, end)
        or _broken_gpu(pod, container, end)
        or _mistake(pod, container, end)
        or _crash(pod, container, end, probe_failure)
    )


def _out_of_memory(pod: PodSeen, container: ContainerSeen, end: _Exit) -> Trouble | None:
    what = f"{_name(pod, container)} used more memory than its limit and was killed{_times(container)}"
    if end.reason == "OOMKilled" and (pod.component == "model" or container.init):
        return Trouble(Reason.OUT_OF_MEMORY, f"{what}. It is resumed; {end.logs} shows how far it was")
    if end.reason == "OOMKilled":
        role = "router." if pod.component == "router" else ""
        return Trouble(Reason.OUT_OF_MEMORY, f"{what}. Raise spec.{role}resources.memory")
    if _GPU_MEMORY.search(end.words):
        remedy = "Lower engine.maxModelLen, or give engine.args --gpu-memory-utilization a smaller share"
        return Trouble(
            Reason.OUT_OF_MEMORY,
            f"{_name(pod, container)} had too little GPU memory{_times(container)}: {quoted(end.last_line)}. {remedy}",
        )
    return None


def _broken_gpu(pod: PodSeen, container: ContainerSeen, end: _Exit) -> Trouble | None:
    if not _GPU_BROKEN.search(end.words):
        return None
    remedy = f"Take the node out, and delete the pod: kubectl cordon {pod.node or 'NODE'}"
    return Trouble(
        Reason.GPU_FAILED,
        f"the GPU of {pod.name} on node {pod.node or 'unknown'} fails{_times(container)}: {quoted(end.last_line)}. "
        f"{remedy}",
    )


def _mistake(pod: PodSeen, container: ContainerSeen, end: _Exit) -> Trouble | None:
    told = _MISTAKES.get(end.code)
    if told is None or not end.last_line:
        return None
    reason, verb = told
    return Trouble(
        reason,
        f"{_name(pod, container)} {verb}{_times(container)}: {quoted(end.last_line)}. All it said: {end.logs}",
    )


def _crash(pod: PodSeen, container: ContainerSeen, end: _Exit, probe_failure: str) -> Trouble:
    if end.code in (0, _EXIT_KILLED) and probe_failure:
        how = f"because it did not answer in time: {quoted(probe_failure)}"
    else:
        known = f", {end.reason}" if end.reason not in ("", "Error", "Completed") else ""
        how = f"with exit code {end.code}{known}{f': {quoted(end.last_line)}' if end.last_line else ''}"
    return Trouble(
        Reason.CRASH_LOOP, f"{_name(pod, container)} ended{_times(container)} {how}. All it said: {end.logs}"
    )


def _download(pod: PodSeen, container: ContainerSeen, end: _Exit) -> Trouble | None:
    """Read the result that a download leaves as its last words."""
    if pod.component != "model" and not container.init:
        return None
    try:
        result = decode_result(end.words)
    except DownloadResultError:
        return None
    if not result.reason:
        return None
    reason = Reason.SETTINGS_REFUSED if result.reason == "BadSettings" else Reason(result.reason)
    return Trouble(reason, f"{pod.name}: {quoted(result.message) or result.reason}. All it said: {end.logs}")


def _name(pod: PodSeen, container: ContainerSeen) -> str:
    return f"container {container.name} of {pod.name}"


def _times(container: ContainerSeen) -> str:
    return f" ({container.restarts} times)" if container.restarts > 1 else ""
