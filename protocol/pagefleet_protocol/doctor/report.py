"""What a bug report needs, as text that can be pasted: no secret is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pagefleet_protocol.doctor.machine import Machine

_PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "xgrammar", "llguidance", "flash-attn",
    "huggingface-hub", "hf-xet", "obstore", "starlette", "uvicorn", "uvloop", "httptools", "pyzmq", "msgspec",
    "pydantic", "kopf", "kubernetes",
)  # fmt: skip
_SETTINGS = (
    "PAGEFLEET_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "TORCH", "TRITON_", "PYTORCH_", "OMP_", "KMP_", "MKL_",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "XDG_CACHE_HOME", "KUBECONFIG", "LD_LIBRARY_PATH",
)  # fmt: skip
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_TOKEN = re.compile(r"\b(hf_|sk-|ghp_|glpat-|AKIA)[\w-]{8,}")


def report(machine: Machine, verbs: Mapping[str, Path], environment: Mapping[str, str]) -> str:
    """Return it.

    Args:
        verbs: the programs of `pagefleet`, by verb.
        environment: of this process.
    """
    return "\n".join(line.rstrip() for line in _lines(machine, verbs, environment))


def _lines(machine: Machine, verbs: Mapping[str, Path], environment: Mapping[str, str]) -> Iterator[str]:
    ours = {name: version for name, version in machine.packages.items() if name.startswith("pagefleet")}
    yield "## pagefleet"
    yield from _table(sorted(ours.items()))
    yield f"verbs: {', '.join(sorted(verbs)) or 'none'}"
    yield "\n## Python"
    yield from _table([("Python", machine.python), ("system", machine.system)])
    libraries = [name for name in machine.packages if name in _PACKAGES or name.startswith("nvidia-")]
    yield from _table([(name, machine.packages[name]) for name in sorted(libraries)])
    yield "\n## Processor"
    limit = "none" if machine.memory_limit is None else _gib(machine.memory_limit)
    yield from _table(
        [
            ("CPU", f"{machine.cpu}, {machine.cores} cores for this process"),
            ("features", " ".join(machine.features) or "none that matter here"),
            ("memory", f"{_gib(machine.memory)}, {_gib(machine.memory_free)} free, limit {limit}"),
            ("shared memory", _gib(machine.shared_memory)),
            ("open files", str(machine.open_files)),
        ]
    )
    yield "\n## GPUs"
    yield from _gpus(machine)
    yield "\n## Settings"
    yield from _settings(environment)


def _gpus(machine: Machine) -> Iterator[str]:
    devices = machine.devices
    for number, gpu in enumerate(devices.gpus):
        yield f"{number}: {gpu.name}, {gpu.memory}, capability {gpu.capability}"
    if devices.gpus:
        yield from _table([("driver", devices.gpus[0].driver), ("CUDA of the driver", devices.cuda or "unknown")])
    else:
        yield f"none: {devices.trouble or 'the driver names no GPU'}"
    yield from _table([("NCCL", machine.nccl or "not installed")])
    if devices.topology:
        yield devices.topology


def _settings(environment: Mapping[str, str]) -> Iterator[str]:
    found = {name: value for name, value in environment.items() if name.upper().startswith(_SETTINGS)}
    for name, value in sorted(found.items()):
        shown = _TOKEN.sub("(secret)", _LOGIN.sub("(login)@", value))
        yield f"{name}={'(set, not shown)' if _SECRET.search(name) else shown}"
    if not found:
        yield "none of the environment"


def _table(rows: list[tuple[str, str]]) -> Iterator[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return (f"{name:<{width}}  {value}" for name, value in rows)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
