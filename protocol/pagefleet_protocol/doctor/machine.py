"""What this machine has, as its own files and `nvidia-smi` tell it. Nothing is imported for it: torch takes seconds."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

_NVIDIA_SMI_S = 10.0
_QUERY = "name,memory.total,driver_version,compute_cap"
_FEATURES = (
    "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp",
    "bf16", "i8mm", "sve",
)  # fmt: skip
"""Of processors, those that products of matrices are chosen by."""

Run = Callable[[Sequence[str]], str]
"""Runs a program and returns what it prints; raises ProgramFailed."""


class ProgramFailed(Exception):
    """A program is not there, or ended with an error: its last words."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    memory: str
    driver: str
    capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What there is to compute on besides the processor."""

    nodes: Mapping[str, bool]
    """Files of GPUs in /dev; whether this user may use each."""
    gpus: Sequence[Gpu]
    """As the driver tells them."""
    cuda: str = ""
    """The newest CUDA that the driver runs."""
    topology: str = ""
    """How GPUs are connected."""
    trouble: str = ""
    """Why the driver told nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All that is looked at."""

    python: str
    system: str
    packages: Mapping[str, str]
    """Versions of what is installed, by name."""
    cpu: str
    features: Sequence[str]
    cores: int
    memory: int
    memory_free: int
    memory_limit: int | None
    """Of this container, in bytes."""
    shared_memory: int
    open_files: int
    devices: Devices
    nccl: str
    """Version of its package; empty: there is none."""


def run_program(command: Sequence[str], timeout_s: float = _NVIDIA_SMI_S) -> str:
    """Return what a program prints.

    Raises:
        ProgramFailed: it is not there, takes too long, or ends with an error.
    """
    if shutil.which(command[0]) is None:
        raise ProgramFailed(f"{command[0]} is not on PATH")
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProgramFailed(f"{command[0]} does not answer ({type(error).__name__})") from error
    if ran.returncode:
        words = [line for line in (ran.stderr or ran.stdout).splitlines() if line.strip()]
        raise ProgramFailed(words[-1].strip()[:300] if words else f"{command[0]} ends with {ran.returncode}")
    return ran.stdout


def look(run: Run = run_program, root: Path = Path("/")) -> Machine:
    """Return what is here; `root` is where the system's files are."""
    packages = {one.metadata["Name"].lower(): one.version for one in distributions() if one.metadata["Name"]}
    cpuinfo, meminfo = _text(root / "proc/cpuinfo"), _text(root / "proc/meminfo")
    shared = shutil.disk_usage(root / "dev/shm").total if (root / "dev/shm").is_dir() else 0
    return Machine(
        python=f"{platform.python_version()} ({sys.executable})",
        system=f"{_field(_text(root / 'etc/os-release'), 'PRETTY_NAME', '=')} {platform.platform()}",
        packages=packages,
        cpu=_field(cpuinfo, "model name") or platform.machine(),
        features=_features(cpuinfo),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_kib(meminfo, "MemTotal"),
        memory_free=_kib(meminfo, "MemAvailable"),
        memory_limit=_limit(_text(root / "sys/fs/cgroup/memory.max")),
        shared_memory=shared,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        devices=_devices(run, root / "dev"),
        nccl=next((version for name, version in packages.items() if name.startswith("nvidia-nccl")), ""),
    )


def _devices(run: Run, folder: Path) -> Devices:
    found = sorted(node for node in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    nodes = {f"/dev/{node.name}": os.access(node, os.R_OK | os.W_OK) for node in found}
    try:
        listed = run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"])
        gpus = [
            Gpu(*(part.strip() for part in line.split(","))) for line in listed.splitlines() if line.count(",") == 3
        ]
        cuda = re.search(r"CUDA Version: ([\d.]+)", run(["nvidia-smi"]))
        topology = run(["nvidia-smi", "topo", "-m"]).rstrip() if len(gpus) > 1 else ""
    except ProgramFailed as failed:
        return Devices(nodes=nodes, gpus=(), trouble=str(failed))
    return Devices(nodes=nodes, gpus=gpus, cuda=cuda[1] if cuda else "", topology=topology)


def _features(cpuinfo: str) -> Sequence[str]:
    known = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())
    return [one for one in _FEATURES if one in known]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # another kind of system


def _field(text: str, name: str, sign: str = ":") -> str:
    found = re.search(rf"^{name}\s*{sign}\s*(.*)$", text, re.MULTILINE)
    return found[1].strip().strip('"') if found else ""


def _kib(meminfo: str, name: str) -> int:
    words = _field(meminfo, name).split()
    return int(words[0]) * 1024 if words and words[0].isdecimal() else 0


def _limit(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
