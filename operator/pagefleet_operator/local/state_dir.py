"""The folder of one fleet: a lock, logs, endpoints files, fleet keys, engines' K/V, and a record of processes.

The record outlives us, for the day on which `pagefleet up` is killed: the next one finds what was left and ends it. A
process is known by its id and the moment it started, so that a reused id is never mistaken.
"""

from __future__ import annotations

import contextlib
import errno
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
from typing import IO, Self

from pagefleet_protocol.endpoints import Endpoint, encode_endpoints
from pagefleet_protocol.fleet_key import FleetKeyError, read_fleet_key

from pagefleet_operator.errors import StateDirError
from pagefleet_operator.local.log_files import LogFolder

_LOCK = "lock"
_LOGS = "logs"
_KV = "kv"
_KV_LEFT = "kv.left"
"""What is being swept."""
_LOCK_TRIES = 10
_LOCK_PAUSE_S = 0.05
_RECORD = "processes.json"
_RESERVE = "reserve"
_RESERVE_BYTES = 1 << 20
_RESERVE_PIECE = 1 << 16
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_KEY_BYTES = 32


def default_state_dir(manifest: Path, environment: Mapping[str, str]) -> Path:
    """Return the folder that belongs to a manifest, in that of all fleets."""
    location = manifest.resolve()
    digest = hashlib.sha256(os.fsencode(location)).hexdigest()[:8]
    return state_home(environment) / f"{location.stem or 'fleet'}-{digest}"


def state_home(environment: Mapping[str, str]) -> Path:
    """Return the folder of all fleets: under $XDG_STATE_HOME, or ~/.local/state."""
    return Path(environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")) / "pagefleet"


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
            self.logs = LogFolder(path / _LOGS)
        except OSError as error:
            raise StateDirError(
                f"{path}: cannot be written ({error.strerror}); choose another with --state-dir"
            ) from error
        if not _took(self._lock):
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise StateDirError(
                f"another pagefleet up (process {owner}) uses {path}: stop it, or give this one its own --state-dir"
            )
        with contextlib.suppress(OSError):  # a full disk costs the next one our number
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()
        self._reserve = Reserve(path / _RESERVE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_kv()
        self._lock.close()

    def endpoints_path(self, service: str) -> Path:
        """Return the endpoints file of a service's routers."""
        return self.path / f"{service}.endpoints.json"

    def service_path(self, service: str) -> Path:
        """Return the file with a service and its status, for its routers' console."""
        return self.path / f"{service}.service.json"

    def write_service(self, service: str, data: bytes) -> None:
        """Replace that file.

        Raises:
            OSError: the disk refuses; the old file is still there.
        """
        self._reserve.replace(self.service_path(service), data)

    def kv_peers_path(self, service: str) -> Path:
        """Return the file that says which prefill engines a service's decode engines may ask."""
        return self.path / f"{service}.kv-peers"

    def write_kv_peers(self, service: str, addresses: tuple[str, ...]) -> None:
        """Replace that file: one HOST:PORT a line.

        Raises:
            OSError: the disk refuses; the old file is still there.
        """
        self._reserve.replace(self.kv_peers_path(service), "".join(f"{address}\n" for address in addresses).encode())

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
                self._reserve.replace(path, secrets.token_hex(_KEY_BYTES).encode())
            except OSError as error:
                raise StateDirError(f"{path}: cannot be written ({error.strerror})") from error
            self._keyed.add(path)
        return path

    def write_endpoints(self, service: str, endpoints: tuple[Endpoint, ...]) -> None:
        """Replace a service's endpoints file; a reader sees the old one or the new one, never a part.

        Raises:
            OSError: the disk refuses; the old file is still there.
        """
        self._reserve.replace(self.endpoints_path(service), encode_endpoints(endpoints))

    def record(self, instance: str, pid: int) -> None:
        self._processes[instance] = (pid, start_time(pid) or "")
        self._write_record()

    def forget(self, instance: str) -> None:
        if self._processes.pop(instance, None):
            self._write_record()

    def end_leftovers(self, grace_s: float = 3.0) -> tuple[str, ...]:
        """End what an earlier, killed fleet left running here, and remove its K/V; blocks up to `grace_s` and a little.

        Returns the instances' names.
        """
        left = _running(self.path)
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
            self._reserve.replace(self.path / _RECORD, json.dumps(self._processes).encode())


def sweep(home: Path) -> None:
    """Remove what killed fleets of other manifests left below `home`: K/V, reserves, unfinished files. Logs stay.

    A fleet that runs keeps its own, and so does one whose processes are still there.
    """
    for lock in home.glob(f"*/{_LOCK}"):
        folder = lock.parent
        with contextlib.suppress(OSError), lock.open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _running(folder):
                continue
            for file in (folder / _RESERVE, *folder.glob("*.part")):
                file.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (folder / _KV).rename(folder / _KV_LEFT)
        if (folder / _KV_LEFT).exists():
            shutil.rmtree(folder / _KV_LEFT, ignore_errors=True)


def _took(lock: IO[str]) -> bool:
    """Take the lock of a folder; whoever sweeps has it for a moment."""
    for num_left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if num_left:
                time.sleep(_LOCK_PAUSE_S)
    return False


def _running(folder: Path) -> dict[str, int]:
    """Return the processes of a fleet's record that are still the same, by name."""
    try:
        record = json.loads((folder / _RECORD).read_bytes())
        entries = {str(name): (int(pid), str(started)) for name, (pid, started) in record.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}  # none, or damaged: then nobody can say whose those processes are
    return {name: pid for name, (pid, started) in entries.items() if started and start_time(pid) == started}


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


class Reserve:
    """Space for the small files without which a fleet cannot go on when the disk is full.

    It is given up piece by piece while a file is replaced, and taken again as soon as there is room: what the old file
    took comes free with it. It stays when the fleet ends, so that the next can begin on a full disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fill()

    def replace(self, path: Path, data: bytes) -> None:
        """Replace a file by one that only its owner may read; a reader sees the old one or the new one, never a part.

        Raises:
            OSError: the disk refuses, and nothing is left of the reserve; the old file is still there.
        """
        part = path.with_name(f"{path.name}.part")
        while True:
            try:
                part.unlink(missing_ok=True)
                with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)
                break
            except OSError as error:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
                if error.errno not in _FULL or not self._give_up_a_piece():
                    raise
        part.replace(path)
        self._fill()

    def _give_up_a_piece(self) -> bool:
        """Make the reserve smaller; False where nothing is left of it."""
        try:
            size = self._path.stat().st_size
            if size > _RESERVE_PIECE:
                os.truncate(self._path, size - _RESERVE_PIECE)
            else:
                self._path.unlink()
        except OSError:
            return False
        return True

    def _fill(self) -> None:
        """Take what is missing, or as much as there is."""
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            while (left := _RESERVE_BYTES - file.tell()) > 0:
                # Random: a file system that compresses would reserve nothing.
                file.write(os.urandom(min(left, _RESERVE_PIECE)))
                file.flush()
