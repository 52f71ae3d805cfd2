"""`pagefleet collect-env` and `pagefleet doctor`: look, decide, print."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from pagefleet_protocol.doctor.checks import Finding, Folder, Level, check_machine
from pagefleet_protocol.doctor.cluster import Kubectl, check_cluster
from pagefleet_protocol.doctor.machine import look, run_program
from pagefleet_protocol.doctor.report import report

_COLLECT = """\
Prints what a bug report needs: versions, devices, features of the processor, settings of the environment without
secrets. Paste all of it."""
_DOCTOR = """\
Looks for what keeps pagefleet from working here: devices, driver, NCCL, ports, rights, disk. With --cluster also in the
cluster of kubectl's context: definitions, operator, rights, GPUs of nodes, images, services.
Each finding says what to do. Status 1: something is wrong."""
_PORT = 8000


def collect_env(arguments: Sequence[str], verbs: Mapping[str, Path], environment: Mapping[str, str]) -> int:
    """Print the report."""
    _parser("collect-env", _COLLECT).parse_args(arguments)
    print(report(look(), verbs, environment))
    return 0


def doctor(arguments: Sequence[str], verbs: Mapping[str, Path], environment: Mapping[str, str]) -> int:
    """Print what was found; returns 1 where something is wrong, 2 for a flag that is."""
    parser = _parser("doctor", _DOCTOR)
    parser.add_argument("--port", type=int, default=_PORT, help="that a server is to listen on (default: %(default)s)")
    parser.add_argument("--cluster", action="store_true", help="look at the cluster, too")
    parser.add_argument("--namespace", "-n", help="of the InferenceServices to look at; default: the context's")
    given = parser.parse_args(arguments)
    if not 0 < given.port < 65536:
        parser.error(f"--port {given.port}: a port is 1 to 65535")
    findings = check_machine(look(), verbs, [*folders(environment)], {given.port: port_trouble(given.port)})
    if given.cluster:
        findings = chain(findings, check_cluster(Kubectl(run_program, given.namespace)))
    return tell(findings)


def tell(findings: Iterator[Finding]) -> int:
    """Print findings as they come; returns the exit status."""
    levels = []
    for one in findings:
        levels.append(one.level)
        print(f"{one.level:<6}{one.subject}: {one.text}", flush=True)
        if one.do:
            print(f"      -> {one.do}", flush=True)
    faults = levels.count(Level.WRONG)
    print(f"\n{faults} wrong, {levels.count(Level.NOTE)} to note, {levels.count(Level.WELL)} well")
    return 1 if faults else 0


def folders(environment: Mapping[str, str]) -> Iterator[Folder]:
    """Yield what is written to, without making it."""
    home = Path(environment.get("HOME") or Path.home())
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    state = Path(environment.get("XDG_STATE_HOME") or home / ".local/state")
    yield look_at_folder("models and compiled code", cache / "pagefleet")
    yield look_at_folder("models of Hugging Face", Path(environment.get("HF_HOME") or cache / "huggingface"))
    yield look_at_folder("logs and records of pagefleet up", state / "pagefleet")


def look_at_folder(purpose: str, path: Path) -> Folder:
    """Return what can be done with a folder, or with the place where it would be made."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    trouble = ""
    if not place.is_dir():
        trouble = f"{place} is no folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        trouble = f"this user may not write to {place}"
    elif place == path and path.stat().st_uid != os.getuid() != 0:
        trouble = "it belongs to another user, who could change what is run from it"
    return Folder(purpose, path, shutil.disk_usage(place).free, trouble)


def port_trouble(port: int, host: str = "127.0.0.1") -> str:
    """Return why a port cannot be listened on; empty: it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _parser(verb: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        f"pagefleet {verb}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
