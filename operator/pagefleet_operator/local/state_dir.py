"""The folder of one fleet: a lock, logs, endpoints files, fleet keys, engines' K/V, and a record of processes.

The record outlives us, for the day on which `pagefleet up` is killed: the next one finds what was left and ends it. A
process is known by its id and the moment it started, so that a reused id is never mistaken.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pagefleet_protocol.endpoints import Endpoint, encode_endpoints
from pagefleet_protocol.fleet_key import FleetKeyError, read_fleet_key

from pagefleet_operator.errors import StateDirError

_LOCK = "lock"
_LOGS = "logs"
_KV = "kv"
_RECORD = "processes.json"
_KEY_BYTES = 32


def default_state_dir(manifest: Path, environment: Mapping[str, str]) -> Path:
    """Return the folder that belongs to a manifest: under $XDG_STATE_HOME, or ~/.local/state."""
    home = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    location = manifest.resolve()
    digest = hashlib.sha256(os.fsencode(location)).hexdigest()[:8]
    return Path(home) / "pagefleet" / f"{location.stem or 'fleet'}-{digest}"


class StateDir:
    """An open, locked state folder; a context manager."""

    def __init__(self, path: Path) -> None:
        """Create the folder where it is missing, and take its lock.

        Raises:
            StateDirError: another `pagefleet up` uses it, or it cannot be written.
        """
        self.path = path
        self._processes: dict[str, tuple[int, str]] = {}
        self._keyed: set[Path] = set()
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            (path / _LOGS).mkdir(exist_ok=True)
            self._lock = (path / _LOCK).open("a+")
        except OSError as error:
            raise StateDirError(
                f"{path}: cannot be written ({error.strerror}); choose another with --state-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise StateDirError(
                f"another pagefleet up (process {owner}) uses {path}: stop it, or give this one its own --state-dir"
            ) from error
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_kv()
        self._lock.close()

    def log_path(self, instance: str) -> Path:
        """Return where an instance's output goes."""
        return self.path / _LOGS / f"{instance}.log"

    def endpoints_path(self, service: str) -> Path:
        """Return the endpoints file of a service's routers."""
        return self.path / f"{service}.endpoints.json"

    def kv_peers_path(self, service: str) -> Path:
        """Return the file that says which prefill engines a service's decode engines may ask."""
        return self.path / f"{service}.kv-peers"

    def write_kv_peers(self, service: str, addresses: tuple[str, ...]) -> None:
        """Replace that file: one HOST:PORT a line.

        Raises:
            OSError: the disk refuses; the old file is still there.
        """
        _replace(self.kv_peers_path(service), "".join(f"{address}\n" for address in addresses).encode())

    def kv_path(self, instance: str) -> Path:
        """Return the folder that an engine keeps K/V in: it finds it when it starts again."""
        return self.path / _KV / instance

    def remove_kv(self, instance: str = "") -> None:
        """Remove that folder with all its blocks, of every engine where none is named; may take seconds.

        What cannot be removed is told by the engine that is given it next.
        """
        shutil.rmtree(self.kv_path(instance), ignore_errors=True)

    def fleet_key_path(self, service: str, number: int = 1) -> Path:
        """Return the file with the secret that a service's engines and routers share; another one in every run.

        Raises:
            StateDirError: it cannot be written.
        """
        path = self.path / (f"{service}.fleet-key" if number == 1 else f"{service}.fleet-key-{number}")
        if not (path in self._keyed and _is_whole(path)):
            try:
                _write_secret(path, secrets.token_hex(_KEY_BYTES))
            except OSError as error:
                raise StateDirError(f"{path}: cannot be written ({error.strerror})") from error
            self._keyed.add(path)
        return path

    def write_endpoints(self, service: str, endpoints: tuple[Endpoint, ...]) -> None:
        """Replace a service's endpoints file; a reader sees the old one or the new one, never a part.

        Raises:
            OSError: the disk refuses; the old file is still there.
        """
        _replace(self.endpoints_path(service), encode_endpoints(endpoints))

    def record(self, instance: str, pid: int) -> None:
        """Remember a process that was just started."""
        self._processes[instance] = (pid, start_time(pid) or "")
        self._write_record()

    def forget(self, instance: str) -> None:
        """Forget a process that has ended."""
        if self._processes.pop(instance, None):
            self._write_record()

    def end_leftovers(self, grace_s: float = 3.0) -> tuple[str, ...]:
        """End what an earlier, killed fleet left running here, and remove its K/V; blocks up to `grace_s` and a little.

        Returns the instances' names.
        """
        left = {
            name: pid for name, (pid, started) in self._read_record().items() if started and start_time(pid) == started
        }
        for pid in left.values():
            _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(start_time(pid) for pid in left.values()):
            time.sleep(0.05)
        for pid in left.values():
            _signal_group(pid, signal.SIGKILL)
        self.remove_kv()
        self._write_record()
        return tuple(left)

    def _write_record(self) -> None:
        # A full disk must not stop the fleet; without the record only leftovers would be missed.
        with contextlib.suppress(OSError):
            _replace(self.path / _RECORD, json.dumps(self._processes).encode())

    def _read_record(self) -> dict[str, tuple[int, str]]:
        try:
            record = json.loads((self.path / _RECORD).read_bytes())
            return {str(name): (int(pid), str(started)) for name, (pid, started) in record.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}  # none, or damaged: then nobody can say whose those processes are


def _is_whole(path: Path) -> bool:
    try:
        read_fleet_key(path)
    except FleetKeyError:
        return False
    return True


def start_time(pid: int) -> str | None:
    """Return when a process started, in a form that is only good for comparing; None when it does not run.

    Only where there is a /proc; elsewhere always None, and nothing is ever taken for a leftover.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold anything.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _write_secret(path: Path, text: str) -> None:
    """Replace a file by one that nobody but its owner can ever read."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    part.replace(path)


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)
