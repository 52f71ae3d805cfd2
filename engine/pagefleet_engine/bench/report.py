"""What a benchmark leaves: figures beside the limits of the machine that had them, and all that is needed to repeat."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagefleet_engine.bench.roofline import Roofline


_PACKAGES = ("torch", "triton", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run. Keys of `figures` carry their units."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = ()
    """Single measurements, for JSON: a benchmark shows them as they come."""
    command: Sequence[str] = ()
    """What was typed; filled in by the program."""
    roofline: Roofline | None = None
    """Measured in the same run."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "machine": describe_machine(),
            "commit": describe_commit(Path(__file__).parent),
            "command": shlex.join(self.command),
            "settings": dict(self.settings),
            "roofline": None if self.roofline is None else asdict(self.roofline),
            "figures": dict(self.figures),
            **({"rows": list(self.rows)} if self.rows else {}),
        }

    def write(self, path: str | Path) -> None:
        """As JSON; makes the folder."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def table(self) -> str:
        """For a terminal: a line for each figure, the machine's limits last."""
        rows = [(name.replace("_", " "), _shown(value)) for name, value in _flat("", self.figures)]
        if self.roofline is not None:
            rows.append(("measured copy bandwidth", f"{self.roofline.copy_bytes_per_s / 1e9:,.0f} GB/s"))
            rows.append(("measured product", f"{self.roofline.matmul_flops_per_s / 1e12:,.2f} TFLOP/s"))
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([f"{self.name}", *(f"  {name:<{width}}  {value:>14}" for name, value in rows)])


def _flat(prefix: str, figures: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found += _flat(f"{prefix}{name} ", value)
        else:
            found.append((prefix + name, value))
    return found


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def describe_machine() -> dict[str, Any]:
    """The processor, the cores this process may use, memory in GiB, versions, and the GPU if torch is loaded."""
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "python": platform.python_version(),
    }
    machine |= {name: version for name in _PACKAGES if (version := _installed_version(name)) is not None}
    return machine | _gpu()


def describe_commit(folder: Path) -> str:
    """The commit's short hash, with `+changes` when tracked files differ from it; `unknown` outside git."""
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _gpu() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((word for word in text.split() if word[0].isdigit() and "." in word), None)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float | None:
    try:
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return round(num_bytes / 2**30, 1)


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
