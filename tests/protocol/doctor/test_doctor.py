"""What is said of a machine: from files and programs that a test makes up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pagefleet_protocol.doctor.checks import NO_DISK, Finding, Folder, Level, check_machine
from pagefleet_protocol.doctor.cli import look_at_folder, port_trouble, tell
from pagefleet_protocol.doctor.machine import Devices, Gpu, Machine, ProgramFailed, look, run_program
from pagefleet_protocol.doctor.report import report

from tests.fakes.free_ports import free_ports

ALL = {verb: Path(f"/bin/pagefleet-{verb}") for verb in ("serve", "route", "up")}
H100 = Gpu("NVIDIA H100 80GB HBM3", "81559 MiB", "570.86.15", "9.0")
L4 = Gpu("NVIDIA L4", "23034 MiB", "570.86.15", "8.9")
ONE = Devices(nodes={"/dev/nvidia0": True}, gpus=(H100,), cuda="12.8")
MACHINE = Machine(
    python="3.12.1",
    system="Debian",
    packages={"pagefleet-engine": "1.0", "pagefleet-router": "1.0", "torch": "2.11.0+cu128"},
    cpu="EPYC",
    features=("avx2",),
    cores=8,
    memory=64 << 30,
    memory_free=32 << 30,
    memory_limit=None,
    shared_memory=8 << 30,
    open_files=65536,
    devices=ONE,
    nccl="2.27.3",
)


def of(subject: str, machine: Machine = MACHINE, **seen: object) -> list[Finding]:
    found = check_machine(machine, seen.get("verbs", ALL), seen.get("folders", ()), seen.get("ports", {}))  # type: ignore[arg-type]
    return [one for one in found if one.subject == subject]


def worst(subject: str, machine: Machine = MACHINE, **seen: object) -> Finding:
    order = [Level.WELL, Level.NOTE, Level.WRONG]
    return max(of(subject, machine, **seen), key=lambda one: order.index(one.level))


def test_a_machine_that_is_well_has_nothing_to_do() -> None:
    found = list(check_machine(MACHINE, ALL, [Folder("models", Path("/m"), 500 << 30)], {8000: ""}))
    assert {one.level for one in found} == {Level.WELL}
    assert {one.subject for one in found} == {"installation", "GPU", "torch", "limits", "folders", "ports"}


def devices(**changed: object) -> Machine:
    return replace(MACHINE, devices=replace(ONE, **changed))  # type: ignore[arg-type]


def packaged(**packages: str) -> Machine:
    return replace(MACHINE, packages={**MACHINE.packages, **{k.replace("_", "-"): v for k, v in packages.items()}})


@pytest.mark.parametrize(
    ("subject", "machine", "level", "text"),
    [
        ("installation", packaged(pagefleet_router="2.0"), Level.WRONG, "pagefleet-router 2.0"),
        ("GPU", devices(nodes={"/dev/nvidia0": False}), Level.WRONG, "no right to use /dev/nvidia0"),
        ("GPU", devices(gpus=(), trouble="NVML: mismatch"), Level.WRONG, "does not answer: NVML: mismatch"),
        ("GPU", devices(nodes={}, gpus=()), Level.NOTE, "compute on the processor"),
        ("torch", packaged(torch="2.11.0+cpu"), Level.WRONG, "built for the processor"),
        ("torch", packaged(torch="2.11.0"), Level.WRONG, "built for the processor"),
        ("torch", packaged(torch="2.12.0+cu130"), Level.WRONG, "driver 570.86.15 is too old"),
        ("torch", packaged(torch="2.12.0", nvidia_cuda_runtime="13.0.48"), Level.WRONG, "for CUDA 13"),
        ("torch", packaged(torch="2.11.0", nvidia_cuda_runtime_cu12="12.8.90"), Level.WELL, "2.11.0 for CUDA 12"),
        ("NCCL", replace(devices(gpus=(H100, H100)), nccl=""), Level.NOTE, "not installed"),
        ("NCCL", devices(gpus=(H100, H100)), Level.WELL, "2.27.3"),
        (
            "ranks",
            devices(gpus=(H100, H100)),
            Level.WELL,
            "one engine may use 2 of them, with --tensor-parallel-size 2",
        ),
        ("ranks", devices(gpus=(H100, H100, L4)), Level.NOTE, "the GPUs are of 2 kinds: one engine may use 2 of them"),
        ("ranks", devices(gpus=(H100, L4)), Level.NOTE, "the GPUs are of 2 kinds: one engine uses one"),
        ("limits", replace(devices(gpus=(H100, H100)), shared_memory=1 << 30), Level.NOTE, "shared memory is 1.0 GiB"),
        ("limits", replace(MACHINE, open_files=1024), Level.NOTE, "1024 open files"),
        ("limits", replace(MACHINE, shared_memory=64 << 20), Level.NOTE, "shared memory is 0.1 GiB"),
        ("limits", replace(MACHINE, memory_limit=4 << 30), Level.WELL, "4.0 GiB of memory"),
    ],
)
def test_what_is_found_has_its_level_and_its_remedy(subject: str, machine: Machine, level: Level, text: str) -> None:
    found = worst(subject, machine)
    assert found.level is level
    assert text in found.text
    assert found.do or level is Level.WELL


def test_parts_that_are_not_installed_are_no_fault() -> None:
    found = worst("installation", verbs={"route": Path("/bin/pagefleet-route")})
    assert (found.level, found.text) == (Level.NOTE, "not installed here: serve, up")


def test_folders_and_ports(tmp_path: Path) -> None:
    full = Folder("models", Path("/m"), NO_DISK - 1)
    assert worst("folders", folders=[full]).level is Level.WRONG
    assert worst("folders", folders=[replace(full, free=2 * NO_DISK)]).level is Level.NOTE
    (tmp_path / "file").touch()
    assert "is no folder" in worst("folders", folders=[look_at_folder("models", tmp_path / "file" / "models")]).text
    assert look_at_folder("models", tmp_path / "to" / "come").trouble == ""
    assert not (tmp_path / "to").exists()
    port = free_ports()  # one that nobody takes once it is free again
    with socket.create_server(("127.0.0.1", port)):
        assert "in use" in worst("ports", ports={port: port_trouble(port)}).text
    assert port_trouble(port) == ""


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1000)
    assert "belongs to another user" in look_at_folder("models", tmp_path).trouble


def test_the_status_says_whether_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(iter([Finding(Level.NOTE, "GPU", "none", "nothing")])) == 0
    assert tell(iter([Finding(Level.WRONG, "GPU", "broken", "mend it")])) == 1
    assert "wrong GPU: broken\n      -> mend it\n" in capsys.readouterr().out


CPUINFO = "processor : 0\nmodel name : EPYC 9654\nflags : fpu avx2 avx512f amx_bf16 rdtscp\n"
SMI = {"--query-gpu": "NVIDIA L4, 23034 MiB, 580.65.06, 8.9\n" * 2, "topo": "GPU0 X PIX\n", "": "CUDA Version: 13.0 |"}


def told(answers: Mapping[str, str]) -> Machine:
    def run(command: Sequence[str]) -> str:
        word = command[1].partition("=")[0] if len(command) > 1 else ""
        if word not in answers:
            raise ProgramFailed("NVIDIA-SMI has failed")
        return answers[word]

    return look(run)


def test_looks_at_the_systems_files(tmp_path: Path) -> None:
    for name, text in {
        "proc/cpuinfo": CPUINFO,
        "proc/meminfo": "MemTotal: 1024 kB\nMemAvailable: 512 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "etc/os-release": 'PRETTY_NAME="Debian 12"\n',
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = look(run_program, tmp_path)
    assert (found.cpu, found.features) == ("EPYC 9654", ["avx2", "avx512f", "amx_bf16"])
    assert (found.memory, found.memory_free, found.memory_limit) == (1 << 20, 1 << 19, None)
    assert found.devices.nodes == {"/dev/nvidia0": True}
    assert found.system.startswith("Debian 12 ")


def test_reads_what_the_driver_tells() -> None:
    devices = told(SMI).devices
    assert devices.gpus == [Gpu("NVIDIA L4", "23034 MiB", "580.65.06", "8.9")] * 2
    assert (devices.cuda, devices.topology) == ("13.0", "GPU0 X PIX")
    assert told({}).devices.trouble == "NVIDIA-SMI has failed"


def test_a_program_says_why_it_failed() -> None:
    with pytest.raises(ProgramFailed, match="no-such-program is not on PATH"):
        run_program(["no-such-program"])
    with pytest.raises(ProgramFailed, match="last words"):
        run_program([sys.executable, "-c", "import sys; print('first'); sys.exit('last words')"])
    with pytest.raises(ProgramFailed, match="does not answer"):
        run_program([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


def test_the_report_has_what_matters_and_no_secret() -> None:
    environment = {
        "HF_TOKEN": "hf_abcdefghijk",
        "HF_ENDPOINT": "https://me:hidden@mirror.example.org",
        "PAGEFLEET_ENGINE_ARGS": "--x sk-abcdefghijkl",
        "PAGEFLEET_API_KEY": "hidden",
        "NCCL_DEBUG": "INFO",
        "HOME": "/home/somebody",
    }
    text = report(MACHINE, ALL, environment)
    assert "torch  2.11.0+cu128" in text
    assert "0: NVIDIA H100 80GB HBM3, 81559 MiB, capability 9.0" in text
    assert "NCCL_DEBUG=INFO" in text
    assert "HF_ENDPOINT=https://(login)@mirror.example.org" in text
    assert "HF_TOKEN=(set, not shown)" in text
    assert not [word for word in ("abcdef", "hidden", "somebody") if word in text]


@pytest.mark.parametrize("verb", ["doctor", "collect-env"])
def test_both_need_nothing_but_the_standard_library(verb: str) -> None:
    code = (
        "import sys\n"
        "from pagefleet.command import main\n"
        f"status = main([{verb!r}])\n"
        "heavy = [name for name in ('torch', 'pydantic', 'msgspec', 'kubernetes', 'numpy') if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0 if status in (0, 1) else status)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ("ports: 8000" if verb == "doctor" else "## GPUs") in ran.stdout


def test_flags_that_cannot_be_end_with_2() -> None:
    command = [sys.executable, "-c", "from pagefleet.command import main; main(['doctor', '--port', '0'])"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "--port 0: a port is 1 to 65535" in ran.stderr
