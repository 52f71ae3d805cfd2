"""Whether the engines' model is there: the model job and its pods, the claim, and engines that download themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet_protocol.kube_names import LABEL_REVISION
from pagefleet_protocol.model_facts import DownloadResult, DownloadResultError, ModelFacts, Progress, decode_result

from pagefleet_operator.plan.observed import DOWNLOAD, Observed, PodSeen
from pagefleet_operator.plan.pod_reasons import EventLog, pod_trouble, refused_pods, worst
from pagefleet_operator.plan.reasons import NORMAL, Reason
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.role_health import conditions_of
from pagefleet_operator.plan.role_seen import DOWNLOAD_REASONS, RoleSeen
from pagefleet_operator.plan.verdict import Trouble, Verdict

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class JobSeen:
    """The model job of the wanted model."""

    name: str
    inspects: bool
    """It only looks at the model; nothing is kept."""
    body: Mapping[str, Any] | None
    """None while it does not exist."""
    pods: tuple[PodSeen, ...]
    """The newest first."""
    failed: Mapping[str, Any] | None
    """Its condition Failed, where it has ended so."""
    complete: Mapping[str, Any] | None
    """Its condition Complete, where it has."""


def see_job(wanted: Mapping[str, Any], resolved: Resolved, observed: Observed) -> JobSeen:
    """Gather what was seen of the job that is wanted now."""
    name = str(wanted["metadata"]["name"])
    revision = wanted["spec"]["template"]["metadata"]["labels"].get(LABEL_REVISION)
    child = observed.children.get(("Job", name))
    body = child.body if child and child.ours else None
    pods = [pod for pod in observed.pods if pod.component == "model" and pod.revision == revision]
    pods.sort(key=lambda pod: (pod.created is not None, pod.created or observed.now, pod.name), reverse=True)
    held = {one.get("type"): one for one in conditions_of(body) if one.get("status") == "True"}
    return JobSeen(
        name=name,
        inspects=resolved.cache != "pvc" or not resolved.uri.remote,
        body=body,
        pods=tuple(pods),
        failed=held.get("Failed"),
        complete=held.get("Complete"),
    )


def facts_from_pods(job: JobSeen) -> ModelFacts | None:
    """Return what a pod of the job found out; None while none has succeeded."""
    results = (_result(pod) for pod in job.pods)
    return next((one.facts for one in results if one and one.facts and not one.reason), None)


def model_verdict(
    resolved: Resolved, job: JobSeen | None, engines: RoleSeen, observed: Observed, namespace: str
) -> Verdict:
    """Return ModelCached.

    Args:
        resolved: the settings in force; its facts are known once the job has succeeded.
        job: the wanted one, where the model needs one.
        engines: those that exist; with some kinds of cache they download the model.
        observed: for events and the job's progress.
        namespace: for commands in messages.
    """
    if resolved.cache in ("file", "builtin"):
        lost = next((one for one in engines.troubles if one.reason is Reason.MODEL_LOAD_FAILED), None)
        if lost is not None and not engines.ready:
            return Verdict(False, lost.reason, lost.message)
        return Verdict(True, Reason.NOT_NEEDED, "the model is in the engines' image")
    if job is not None and resolved.facts is None:
        return _job_verdict(job, EventLog(observed.events), observed.progress, namespace)
    if resolved.cache == "image":
        return Verdict(True, Reason.NOT_NEEDED, f"each node pulls the image {resolved.uri.path}")
    if resolved.cache == "pvc":
        return Verdict(True, Reason.CACHED, f"claim {resolved.claim} holds the model{_described(resolved.facts)}")
    return _in_engines(resolved, engines)


def _job_verdict(job: JobSeen, log: EventLog, progress: Progress | None, namespace: str) -> Verdict:
    """Say how far the job is, or what stands in its way."""
    trouble = _job_trouble(job, log, namespace)
    if job.failed is not None:
        again = f"It is tried again every 10 minutes, or now: kubectl -n {namespace} delete job {job.name}"
        if trouble is None or trouble.reason in NORMAL:
            said = str(job.failed.get("message", ""))
            logs = f"kubectl -n {namespace} logs job/{job.name}"
            return Verdict(False, Reason.JOB_FAILED, f"job {job.name} failed: {said}. All it said: {logs}. {again}")
        return Verdict(False, trouble.reason, f"{trouble.message}. {again}")
    if trouble is not None and trouble.reason not in NORMAL:
        return Verdict(False, trouble.reason, trouble.message)
    if job.inspects:
        return Verdict(False, Reason.INSPECTING, f"job {job.name} looks at the model's configuration")
    return Verdict(False, Reason.DOWNLOADING, f"job {job.name} {progress_text(progress)}")


def _job_trouble(job: JobSeen, log: EventLog, namespace: str) -> Trouble | None:
    refused = [one.message for one in log.about("Job", job.name, "FailedCreate")]
    if not job.pods:
        return refused_pods(job.name, refused)
    running = [pod for pod in job.pods if pod.phase not in ("Failed", "Succeeded") and not pod.deleting]
    trouble = worst(pod_trouble(pod, log, namespace) for pod in running)
    if trouble is not None and trouble.reason not in NORMAL:
        return trouble
    if running and any(one.state == "running" for one in running[0].containers):
        return trouble  # what went wrong before is being tried again, and told by the progress
    ended = [pod for pod in job.pods if pod.phase == "Failed"]
    return pod_trouble(ended[0], log, namespace) if ended else trouble


def _in_engines(resolved: Resolved, engines: RoleSeen) -> Verdict:
    """Read a download that each engine's pod does for itself."""
    downloads = [one for one in engines.troubles if one.reason in DOWNLOAD_REASONS]
    trouble = worst(downloads)
    if trouble is not None and not engines.ready:
        return Verdict(False, trouble.reason, trouble.message)
    now = f"; {len(downloads)} on the way" if downloads else ""
    where = "into its node's folder, once on each node" if resolved.cache == "hostPath" else "when it starts"
    return Verdict(True, Reason.NOT_NEEDED, f"each engine downloads the model {where}{_described(resolved.facts)}{now}")


def _result(pod: PodSeen) -> DownloadResult | None:
    for container in pod.containers:
        if container.name == DOWNLOAD and container.state == "terminated":
            try:
                return decode_result(container.message)
            except DownloadResultError:
                return None
    return None


def _described(facts: ModelFacts | None) -> str:
    if facts is None:
        return ""
    revision = f", revision {facts.revision[:12]}" if facts.revision else ""
    return f" ({facts.weights_bytes / GIB:.1f} GiB of weights{revision})"


def progress_text(progress: Progress | None) -> str:
    """Say how far a download is, as the end of a sentence."""
    if progress is None:
        return "is being started"
    if progress.phase == "listing":
        return "lists the model's files"
    share = f"{100 * progress.bytes_done // progress.bytes_total} %" if progress.bytes_total > 0 else "0 %"
    verb = "downloads the model" if progress.phase == "downloading" else "verifies the files"
    amount = f"{progress.bytes_done / GIB:.1f} of {progress.bytes_total / GIB:.1f} GiB"
    return f"{verb}: {share}, {amount}, {progress.files_done} of {progress.files_total} files"
