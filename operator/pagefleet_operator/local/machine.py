"""What this machine can give: ports, GPUs, CPU threads. One object shares them out to all services."""

from __future__ import annotations

import errno
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from pagefleet_protocol.quantities import quantity

from pagefleet_operator.errors import PortError

_NUM_TRIED_PORTS = 1000
_NUM_TRIED_ROWS = 100
_LOWEST_PORT, _USUAL_END = 20_000, 32_768


class Ports:
    """Addresses of routers: the first gets the port asked for, each next one the next that is free."""

    def __init__(self, host: str, first: int) -> None:
        """`first` = 0 takes any free port for each."""
        self._host = host
        self._first = first
        self._of_router: dict[str, int] = {}

    def claim(self, router: str) -> int:
        """Return the port of a router; the same one for as long as it is not released.

        Raises:
            PortError: the first port is taken, or there is none free after it.
        """
        if router not in self._of_router:
            self._of_router[router] = self._next()
        return self._of_router[router]

    def release(self, router: str) -> None:
        self._of_router.pop(router, None)

    def _next(self) -> int:
        taken = set(self._of_router.values())
        if self._first == 0:
            return free_port(self._host)
        if self._first not in taken:
            check_port(self._host, self._first)
            return self._first
        for port in range(self._first + 1, min(65536, self._first + _NUM_TRIED_PORTS)):
            if port not in taken and _refusal(self._host, port) is None:
                return port
        raise PortError(f"no port after {self._first} is free on {self._host}; choose another with --port")


class EnginePorts:
    """Ports that engines of this machine were told to listen on, none told to two of them."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._of_engine: dict[str, list[range]] = {}

    def claim(self, instance: str, *counts: int) -> list[range]:
        """Return a row of so many ports for each of `counts`, for one start of an instance; its former ones are free.

        Raises:
            PortError: there are none.
        """
        rows = self._of_engine[instance] = list[range]()
        for count in counts:
            told = (port for held in self._of_engine.values() for row in held for port in row)
            rows.append(free_row(self._host, count, told))
        return rows

    def release(self, instance: str) -> None:
        self._of_engine.pop(instance, None)


class Gpus:
    """The machine's GPUs, each lent to one engine at a time."""

    def __init__(self, devices: Iterable[str]) -> None:
        """`devices` are what CUDA_VISIBLE_DEVICES takes: numbers or UUIDs."""
        self._devices = tuple(devices)
        self._holder: dict[str, str] = {}
        self._promised: dict[str, int] = {}

    @property
    def total(self) -> int:
        return len(self._devices)

    def promise(self, counts: Mapping[str, int]) -> None:
        """Keep so many GPUs for the instances of each workload, by its name; replaces what was promised before."""
        self._promised = dict(counts)

    def room(self, workload: str) -> int:
        """Return how many GPUs the instances of a workload may have together: what others neither hold nor expect."""
        held = Counter(holder.rpartition("-")[0] for holder in self._holder.values())
        others = (held.keys() | self._promised.keys()) - {workload}
        return max(0, self.total - sum(max(held[name], self._promised.get(name, 0)) for name in others))

    def claim(self, instance: str, count: int) -> tuple[str, ...] | None:
        """Lend `count` devices to an instance, the same ones when it asks again; None when too few are free."""
        held = tuple(device for device, holder in self._holder.items() if holder == instance)
        free = [device for device in self._devices if device not in self._holder]
        missing = max(0, count - len(held))
        if missing > len(free):
            return None
        for device in free[:missing]:
            self._holder[device] = instance
        return (*held, *free[:missing])[:count]

    def release(self, instance: str) -> None:
        self._holder = {device: holder for device, holder in self._holder.items() if holder != instance}


def find_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    count = sum(1 for node in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    return tuple(str(index) for index in range(count))


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_flags(args: tuple[str, ...], cpu: str | None, cores: int, num_engines: int) -> tuple[str, ...]:
    """Return the flag that keeps engines from competing for cores: those asked for, else an equal share.

    Nothing when the user's own flags say it.
    """
    if any(arg.partition("=")[0] == "--num-threads" for arg in args):
        return ()
    share = cores // max(1, num_engines) if cpu is None else int(quantity(cpu))
    return ("--num-threads", str(max(1, share)))


def free_port(host: str) -> int:
    """Return a port of `host` that nothing listens on now."""
    return free_row(host, 1)[0]


def free_row(host: str, count: int, taken: Iterable[int] = ()) -> range:
    """Return `count` ports in a row of `host` that nothing listens on now, none of which is `taken`.

    The system gives none of them to a connection by itself, so that they are still free when an engine, seconds later,
    listens on them.

    Raises:
        PortError: none were found.
    """
    taken = set(taken)
    for _ in range(_NUM_TRIED_ROWS):
        first = random.randrange(_LOWEST_PORT, end_of_ports() - count)  # noqa: S311 - no secret
        row = range(first, first + count)
        if not taken & set(row) and all(_refusal(host, port) is None for port in row):
            return row
    raise PortError(f"no {count} ports in a row are free on {host}")


def end_of_ports(given_away: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """Return the port after the last of ours: the first that the system gives away, unless that leaves hardly any."""
    first = int(given_away.read_text().split()[0]) if given_away.exists() else _USUAL_END
    return first if first > _LOWEST_PORT + 1000 else _USUAL_END


def check_port(host: str, port: int) -> None:
    """Make sure that a port can be listened on.

    Raises:
        PortError: with what to do.
    """
    problem = _refusal(host, port)
    if problem is not None:
        raise PortError(problem)


def _refusal(host: str, port: int) -> str | None:
    try:
        with _socket(host) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except socket.gaierror:
        return f"--host {host}: there is no such address"
    except OverflowError:
        return f"--port {port}: a port is 0 to 65535"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} on {host} is in use: stop what listens there, or choose another with --port"
        if error.errno == errno.EACCES:
            return f"port {port} on {host} needs more rights: choose one over 1023 with --port"
        return f"cannot listen on {host} port {port}: {error.strerror}"
    return None


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
