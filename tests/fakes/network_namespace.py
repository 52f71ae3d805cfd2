"""A network namespace with links to ours: what tests take for another machine. No test in here.

Needs Linux, and the right to make namespaces and links.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


class NoNamespaces(Exception):
    """This machine does not let us make what is needed; the message says what it says."""


@dataclass(frozen=True, slots=True)
class NetworkNamespace:
    """It sees nothing but itself and, at the other ends of its links, us."""

    holder: int

    @property
    def within(self) -> Sequence[str]:
        """What runs a command there; the process is the command's own."""
        return ("nsenter", "-t", str(self.holder), "-n")

    def cut(self, link: str, is_cut: bool = True) -> None:
        """Swallow all that passes a link, as a network does whose other half is gone, or let it pass again."""
        _run(*self.within, "ip", "link", "set", link, "down" if is_cut else "up")


@contextlib.contextmanager
def network_namespace(links: Mapping[str, tuple[str, str]]) -> Iterator[NetworkNamespace]:
    """Make one; `links`: their names there, and the addresses here and there.

    Raises:
        NoNamespaces: not here.
    """
    try:
        holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"], stderr=subprocess.DEVNULL)
    except OSError as error:
        raise NoNamespaces(str(error)) from None
    with contextlib.ExitStack() as made:
        made.callback(holder.wait)
        made.callback(holder.kill)
        _wait_until_apart(holder)
        namespace = NetworkNamespace(holder.pid)
        _run(*namespace.within, "ip", "link", "set", "lo", "up")
        for name, (here, there) in links.items():
            ours = f"pf{name}{holder.pid}"[:15]
            _run("ip", "link", "add", ours, "type", "veth", "peer", "name", name, "netns", str(holder.pid))
            # The namespace lives on while TCP waits for answers that a cut link swallows, and its end here would take
            # what is sent to the next one.
            made.callback(_run, "ip", "link", "delete", ours)
            _run("ip", "address", "add", f"{here}/30", "dev", ours)
            _run("ip", "link", "set", ours, "up")
            _run(*namespace.within, "ip", "address", "add", f"{there}/30", "dev", name)
            _run(*namespace.within, "ip", "link", "set", name, "up")
        yield namespace


def _wait_until_apart(holder: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while holder.poll() is None and _namespace_of(holder.pid) == _namespace_of(os.getpid()):
        if time.monotonic() > deadline:
            raise NoNamespaces("a namespace takes too long")
        time.sleep(0.01)
    if holder.poll() is not None:
        raise NoNamespaces("unshare -n is not permitted")


def _namespace_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError as error:
        raise NoNamespaces(str(error)) from None


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoNamespaces(str(error)) from None
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")
