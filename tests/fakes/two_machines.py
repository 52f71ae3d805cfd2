"""A second machine: a network namespace behind a link that can be cut. No test in here.

Needs Linux, and the right to make namespaces and links.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.fakes.kv_namespaces import NoNamespaces, namespace_of, run

HERE, THERE = "198.18.72.1", "198.18.72.2"


@dataclass(frozen=True, slots=True)
class SecondMachine:
    """It sees nothing but itself and, at `HERE`, us."""

    holder: int

    @property
    def within(self) -> Sequence[str]:
        """What runs a command there; the process is the command's own."""
        return ("nsenter", "-t", str(self.holder), "-n")

    def cut(self) -> None:
        """Swallow all that passes the link: nobody is told."""
        run(*self.within, "ip", "link", "set", "nodes", "down")


@contextlib.contextmanager
def second_machine() -> Iterator[SecondMachine]:
    """Make it.

    Raises:
        NoNamespaces: not here.
    """
    try:
        holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"], stderr=subprocess.DEVNULL)
    except OSError as error:
        raise NoNamespaces(str(error)) from None
    try:
        deadline = time.monotonic() + 10
        while holder.poll() is None and namespace_of(holder.pid) == namespace_of(os.getpid()):
            if time.monotonic() > deadline:
                raise NoNamespaces("a namespace takes too long")
            time.sleep(0.01)
        if holder.poll() is not None:
            raise NoNamespaces("unshare -n is not permitted")
        made = SecondMachine(holder.pid)
        ours = f"pfnodes{holder.pid}"[:15]
        run("ip", "link", "add", ours, "type", "veth", "peer", "name", "nodes", "netns", str(holder.pid))
        run("ip", "address", "add", f"{HERE}/30", "dev", ours)
        run("ip", "link", "set", ours, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{THERE}/30", "dev", "nodes"),
            ("link", "set", "nodes", "up"),
        ):
            run(*made.within, "ip", *command)
        yield made
    finally:
        holder.kill()  # the namespace goes with it, and the link with that
        holder.wait()
