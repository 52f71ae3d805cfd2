"""A prefill engine in a network namespace of its own: one link for requests, and one for K/V that can be cut.

No test in here. Needs Linux, and the right to make namespaces and links. A cut link swallows what is sent to it, as a
network does whose other half is gone: nobody is told.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagefleet_protocol.fleet_key import FleetKey

from tests.fakes.kv_serving import ServedEngine

REQUESTS_HOST = "198.18.71.2"
KV_HOST = "198.18.71.6"
KV_PORT = 8102
ADDRESS = f"{KV_HOST}:{KV_PORT}"
LEASE_S = 30
LONG_PROMPT_TOKENS = 1500
_SECRET = b"p" * 32


class NoNamespaces(Exception):
    """This machine does not let us make what is needed; the message says what it says."""


@dataclass(slots=True)
class Partitioned:
    """A pair whose K/V passes a link that can be cut."""

    prefill: ServedEngine
    decode: ServedEngine
    _holder: int

    @property
    def key(self) -> FleetKey:
        """Of the fleet."""
        return FleetKey(_SECRET)

    def cut(self, is_cut: bool = True) -> None:
        """Let nothing pass between the two, or everything again."""
        run("nsenter", "-t", str(self._holder), "-n", "ip", "link", "set", "kv", "down" if is_cut else "up")


@contextlib.contextmanager
def partitioned_pair(folder: Path) -> Iterator[Partitioned]:
    """Both engines, ready, and connected as yet.

    Raises:
        NoNamespaces: not here.
    """
    try:
        holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"], stderr=subprocess.DEVNULL)
    except OSError as error:
        raise NoNamespaces(str(error)) from None
    engines = contextlib.ExitStack()
    try:
        _link(holder)
        key_file = folder / "fleet-key"
        key_file.write_bytes(_SECRET)
        own = ("--kv-lease", str(LEASE_S), "--dtype", "float32")
        there = ("--host", REQUESTS_HOST, "--kv-host", KV_HOST, "--kv-port", str(KV_PORT))
        within = ("nsenter", "-t", str(holder.pid), "-n")
        prefill = ServedEngine(folder / "p.log", key_file, "prefill", (*own, *there), within=within)
        engines.callback(prefill.stop)
        decode = ServedEngine(folder / "d.log", key_file, "decode", (*own, "--kv-peers", ADDRESS))
        engines.callback(decode.stop)
        prefill.started()
        decode.started()
        yield Partitioned(prefill, decode, holder.pid)
    finally:
        engines.close()
        holder.kill()  # the namespace goes with it, and the links with that
        holder.wait()


def _link(holder: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while holder.poll() is None and namespace_of(holder.pid) == namespace_of(os.getpid()):
        if time.monotonic() > deadline:
            raise NoNamespaces("a namespace takes too long")
        time.sleep(0.01)
    if holder.poll() is not None:
        raise NoNamespaces("unshare -n is not permitted")
    inside = ("nsenter", "-t", str(holder.pid), "-n", "ip")
    run(*inside, "link", "set", "lo", "up")
    for name, here, there in (("http", "198.18.71.1", REQUESTS_HOST), ("kv", "198.18.71.5", KV_HOST)):
        ours = f"pf{name}{holder.pid}"[:15]
        run("ip", "link", "add", ours, "type", "veth", "peer", "name", name, "netns", str(holder.pid))
        run("ip", "address", "add", f"{here}/30", "dev", ours)
        run("ip", "link", "set", ours, "up")
        run(*inside, "address", "add", f"{there}/30", "dev", name)
        run(*inside, "link", "set", name, "up")


def namespace_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError as error:
        raise NoNamespaces(str(error)) from None


def run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoNamespaces(str(error)) from None
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")


def long_prompt(number: int) -> list[int]:
    """Tokens that no other number's begin with; their K/V is more than sockets take at once."""
    return [40 + (number * 31 + place * place) % 1900 for place in range(LONG_PROMPT_TOKENS)]
