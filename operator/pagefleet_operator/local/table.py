"""The table at the bottom of a terminal: every process, what it does now, and bars of what takes a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagefleet_protocol.inference_status import InferenceServiceStatus
from pagefleet_protocol.load_progress import LoadProgress, amount
from pagefleet_protocol.model_facts import Progress
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagefleet_operator.local.bars import bar_line, short_time
from pagefleet_operator.local.figures import EngineFigures
from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.verdict import find_condition

_COLOURS = {
    State.READY: "green",
    State.STARTING: "cyan",
    State.NOT_READY: "yellow",
    State.FAILED: "red",
    State.DRAINING: "magenta",
}
_NUMBERS = ("PID", "UP", "RUN", "WAIT", "TOK/S", "KV", "HITS")
_WORDS: Mapping[str, str] = {"listing": "lists the model's files", "downloading": "downloads", "verifying": "verifies"}


@dataclass(frozen=True, slots=True)
class ProcessView:
    """What is known of an instance's process, beyond its state."""

    pid: int
    started_at: float
    """Seconds, monotonic."""
    loading: LoadProgress | None = None
    """None: it does not load, or does not say so."""
    figures: EngineFigures | None = None
    """None: it is no engine, or does not answer."""


@dataclass(frozen=True, slots=True)
class DownloadView:
    """A model on its way."""

    progress: Progress
    bytes_per_second: float
    began_at: float
    """Seconds, monotonic."""


@dataclass(frozen=True, slots=True)
class ServiceView:
    """One service as it is now."""

    name: str
    status: InferenceServiceStatus | None
    """None once it was asked to leave."""
    instances: tuple[tuple[str, Instance], ...]
    """Names of instances and what is known of them."""
    processes: Mapping[str, ProcessView] = field(default_factory=dict)
    """By the name of the instance; of those that have one."""
    download: DownloadView | None = None
    """None: nothing is downloaded."""


def status_table(services: Sequence[ServiceView], now: float) -> Group:
    """Return the table of all instances at a monotonic time, then a line for whatever a column is too small for."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("INSTANCE", no_wrap=True, overflow="ellipsis", min_width=8)
    table.add_column("STATE", no_wrap=True)
    for heading in _NUMBERS:
        table.add_column(heading, no_wrap=True, justify="right")
    notes: list[RenderableType] = []
    for service in services:
        for name, instance in service.instances:
            process = service.processes.get(name)
            state = Text(instance.state.value, style=_COLOURS[instance.state])
            table.add_row(name, state, *_numbers(process, now))
            notes += _about(name, instance, process, now)
        if service.download is not None:
            notes.append(_download_line(service.name, service.download, now))
        if service.status is not None:
            notes += _notes(service.name, service.status)
    return Group(Text(""), table, *notes) if table.row_count or notes else Group()


def _numbers(process: ProcessView | None, now: float) -> tuple[str, ...]:
    if process is None:
        return ("",) * len(_NUMBERS)
    figures = process.figures
    own = (str(process.pid), short_time(now - process.started_at))
    if figures is None:
        return (*own, "", "", "", "", "")
    return (
        *own,
        _number(figures.running),
        _number(figures.waiting),
        _number(figures.tokens_s),
        _share(figures.kv_usage),
        _share(figures.hit_ratio),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _about(name: str, instance: Instance, process: ProcessView | None, now: float) -> list[RenderableType]:
    """Return what an instance that is not simply ready does, or why it failed; and how often it did."""
    again = f" (started again {instance.restarts} times)" if instance.restarts else ""
    if instance.state is State.READY:
        return [_line(f"{name}: ready{again}")] if again else []
    if instance.state is State.STARTING and process is not None and process.loading is not None:
        loading = process.loading
        told = f"{name}: {loading.describe()}, {short_time(now - process.started_at)}{again}"
        return [bar_line(loading.share, Text(told, style="cyan"))]
    words = f"{name}: {instance.detail or instance.state.value}{again}"
    return [_line(words, "red" if instance.state is State.FAILED else "dim")]


def _download_line(name: str, download: DownloadView, now: float) -> RenderableType:
    seen = download.progress
    share = seen.bytes_done / seen.bytes_total if seen.bytes_total > 0 else None
    words = f"{name}: {_WORDS.get(seen.phase, seen.phase)}"
    if share is not None:
        speed = amount(int(download.bytes_per_second), int(download.bytes_per_second)).partition(" of ")[2]
        words += f" {share:.0%}, {amount(seen.bytes_done, seen.bytes_total)}, {speed}/s"
    return bar_line(share, Text(f"{words}, {short_time(now - download.began_at)}", style="cyan"))


def _line(text: str, style: str = "dim") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _notes(name: str, status: InferenceServiceStatus) -> list[RenderableType]:
    """Return what to say of a service below the table."""
    notes: list[RenderableType] = []
    ready, progressing, degraded = (find_condition(status, kind) for kind in ("Ready", "Progressing", "Degraded"))
    if ready is not None:
        style = "green" if ready.status == "True" else "yellow"
        notes.append(Text(f"{name} {status.ready}: {ready.message}", style=style))
    if degraded is not None and degraded.status == "True" and (ready is None or ready.reason != degraded.reason):
        notes.append(Text(f"{name}: {degraded.message}", style="yellow"))
    if progressing is not None and progressing.status == "True":
        notes.append(Text(f"{name}: {progressing.message}", style="dim"))
    decisions = [("", status.scaling)] if status.scaling else []
    for part, scaling in (*decisions, *((f"{one.name} ", one.scaling) for one in status.role_scaling)):
        if scaling.mode != "External":
            verb = "would want" if scaling.mode == "Advisory" else "wants"
            engines = f"{scaling.desired} {part}engine{'' if scaling.desired == 1 else 's'}"
            notes.append(Text(f"{name}: {verb} {engines} ({scaling.reason}): {scaling.signal}", style="dim"))
    if status.live is not None:
        live = status.live
        numbers = (
            f"{live.requests_running} requests run, {live.requests_waiting} wait, {live.tokens_per_second:.0f} tokens/s"
        )
        notes.append(Text(f"{name}: {numbers}, KV cache {live.kv_usage:.0%} full", style="dim"))
    if status.ratio is not None:
        notes.append(Text(f"{name}: advice: {status.ratio.message}", style="dim"))
    return notes
