"""What is wrong with a machine, from what was seen of it; decided apart from the looking."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pagefleet_protocol.doctor.machine import Gpu, Machine

_GIB = 2**30
LITTLE_DISK, NO_DISK = 20 * _GIB, _GIB
LITTLE_SHARED_MEMORY = _GIB
"""For each GPU that an engine may use."""
FEW_FILES = 4096
_DRIVER_OF_CUDA = {"11": 450, "12": 525, "13": 580}
"""The oldest driver for programs of each CUDA; NVIDIA's compatibility within a major version."""


class Level(StrEnum):
    """How bad a finding is."""

    WELL = "ok"
    NOTE = "note"
    """May be as it should be."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    text: str
    do: str = ""
    """What mends it."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that is written to."""

    purpose: str
    path: Path
    free: int
    """Bytes on its disk."""
    trouble: str = ""
    """Why it cannot be written to."""


def well(subject: str, text: str) -> Finding:
    return Finding(Level.WELL, subject, text)


def note(subject: str, text: str, do: str = "") -> Finding:
    return Finding(Level.NOTE, subject, text, do)


def wrong(subject: str, text: str, do: str) -> Finding:
    return Finding(Level.WRONG, subject, text, do)


def check_machine(
    machine: Machine, verbs: Mapping[str, Path], folders: Sequence[Folder], ports: Mapping[int, str]
) -> Iterator[Finding]:
    """Yield what was found, of each subject at least one.

    Args:
        verbs: programs of `pagefleet` that are installed.
        folders: that engines, downloads and `pagefleet up` write to.
        ports: that are wanted; why each cannot be had, empty: it can.
    """
    yield from _installation(machine, verbs)
    yield from _devices(machine)
    yield from _limits(machine)
    for folder in folders:
        yield _folder(folder)
    for port, trouble in ports.items():
        yield _port(port, trouble)


def _installation(machine: Machine, verbs: Mapping[str, Path]) -> Iterator[Finding]:
    missing = [verb for verb in ("serve", "route", "up") if verb not in verbs]
    if missing:
        yield note("installation", f"not installed here: {', '.join(missing)}", "install them where they are to run")
    versions = {version for name, version in machine.packages.items() if name.startswith("pagefleet")}
    if len(versions) > 1:
        parts = ", ".join(sorted(f"{n} {v}" for n, v in machine.packages.items() if n.startswith("pagefleet")))
        yield wrong("installation", f"parts of several versions: {parts}", "install all of them in one version")
    elif not missing:
        yield well("installation", f"pagefleet {''.join(versions)}, all parts")


def _devices(machine: Machine) -> Iterator[Finding]:
    devices, torch = machine.devices, machine.packages.get("torch", "")
    locked = [node for node, usable in devices.nodes.items() if not usable]
    if not devices.nodes and not devices.gpus:
        yield note("GPU", "none: engines compute on the processor", "nothing, if there is to be none")
        return
    if locked:
        do = "add this user to the group of the files, or give the container its GPUs (--gpus all)"
        yield wrong("GPU", f"no right to use {', '.join(locked)}", do)
    if not devices.gpus:
        do = "install NVIDIA's driver, or start the container with its runtime; then `nvidia-smi` lists the GPUs"
        yield wrong("GPU", f"the driver does not answer: {devices.trouble or 'it names no GPU'}", do)
        return
    names = ", ".join(dict.fromkeys(gpu.name for gpu in devices.gpus))
    yield well("GPU", f"{len(devices.gpus)}: {names}, driver {devices.gpus[0].driver}")
    if torch:
        yield _torch(machine, torch)
    if len(devices.gpus) > 1:
        yield _ranks(devices.gpus)
        yield _nccl(machine)


def _torch(machine: Machine, torch: str) -> Finding:
    runtime = _cuda_of(torch, machine.packages)
    if not runtime:
        do = "install a build for CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu128"
        return wrong("torch", f"torch {torch} is built for the processor, and there are GPUs", do)
    needed, driver = _DRIVER_OF_CUDA.get(runtime, 0), machine.devices.gpus[0].driver
    if int(driver.partition(".")[0] or 0) < needed:
        do = f"update the driver to {needed} or newer, or install torch for an older CUDA"
        return wrong("torch", f"torch {torch} is for CUDA {runtime}, for which driver {driver} is too old", do)
    return well("torch", f"{torch} for CUDA {runtime}")


def _cuda_of(torch: str, packages: Mapping[str, str]) -> str:
    """Return the major version of the CUDA that torch was built for; empty: none."""
    local = re.search(r"\+cu(\d\d)", torch)
    if local:
        return local[1]
    if "+" in torch:
        return ""  # +cpu
    runtime = next((v for name, v in packages.items() if name.startswith("nvidia-cuda-runtime")), "")
    return runtime.partition(".")[0]


def _ranks(gpus: Sequence[Gpu]) -> Finding:
    """Say how many GPUs one engine may use."""
    kinds = Counter((gpu.name, gpu.memory) for gpu in gpus)
    most = max(kinds.values())
    how = f"one engine may use {most} of them, with --tensor-parallel-size {most} or resources.gpus: {most}"
    if len(kinds) == 1:
        return well("ranks", how)
    do = "name those of one kind in CUDA_VISIBLE_DEVICES; the slowest and smallest sets the pace and the size of all"
    return note("ranks", f"the GPUs are of {len(kinds)} kinds: {how if most > 1 else 'one engine uses one'}", do)


def _nccl(machine: Machine) -> Finding:
    if machine.nccl:
        return well("NCCL", machine.nccl)
    do = "install the package that torch's CUDA goes with, e.g. nvidia-nccl-cu12; or use dataPlane tcp"
    return note("NCCL", "not installed: one engine cannot use several GPUs, nor K/V go between them directly", do)


def _limits(machine: Machine) -> Iterator[Finding]:
    if 0 <= machine.open_files < FEW_FILES:
        text = f"{machine.open_files} open files at most: each connection of a router takes one, or two"
        yield note("limits", text, "ulimit -n 65536")
    ranks = max(1, len(machine.devices.gpus))
    if 0 < machine.shared_memory < ranks * LITTLE_SHARED_MEMORY:
        text = f"shared memory is {_size(machine.shared_memory)}: NCCL and copies between processes may need more"
        yield note("limits", text, f"start the container with --shm-size {ranks}g")
    limit = machine.memory_limit
    memory = machine.memory if limit is None else min(machine.memory, limit)
    yield well("limits", f"{_size(memory)} of memory, {machine.cores} cores")


def _folder(folder: Folder) -> Finding:
    where = f"{folder.path} ({folder.purpose})"
    if folder.trouble:
        return wrong("folders", f"{where}: {folder.trouble}", "make it writable for this user, or name another one")
    if folder.free < NO_DISK:
        return wrong(
            "folders", f"{where}: {_size(folder.free)} are left", "free space, or name a folder on a larger disk"
        )
    if folder.free < LITTLE_DISK:
        return note(
            "folders", f"{where}: {_size(folder.free)} are left", "a model of 8 billion parameters takes 16 GiB"
        )
    return well("folders", f"{where}: {_size(folder.free)} free")


def _port(port: int, trouble: str) -> Finding:
    if trouble:
        return note("ports", f"{port}: {trouble}", "stop what listens there, or give another --port")
    return well("ports", f"{port} is free")


def _size(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
