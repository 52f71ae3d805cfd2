"""A prefill engine in a network namespace of its own: one link for requests, and one for K/V that can be cut.

No test in here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagefleet_protocol.fleet_key import FleetKey

from tests.fakes.kv_serving import ServedEngine
from tests.fakes.network_namespace import NetworkNamespace, network_namespace

REQUESTS_HOST = "198.18.71.2"
KV_HOST = "198.18.71.6"
KV_PORT = 8102
ADDRESS = f"{KV_HOST}:{KV_PORT}"
LEASE_S = 30
LONG_PROMPT_TOKENS = 1500
_SECRET = b"p" * 32


@dataclass(slots=True)
class Partitioned:
    """A pair whose K/V passes a link that can be cut."""

    prefill: ServedEngine
    decode: ServedEngine
    _namespace: NetworkNamespace

    @property
    def key(self) -> FleetKey:
        """Of the fleet."""
        return FleetKey(_SECRET)

    def cut(self, is_cut: bool = True) -> None:
        """Let nothing pass between the two, or everything again."""
        self._namespace.cut("kv", is_cut)


@contextlib.contextmanager
def partitioned_pair(folder: Path) -> Iterator[Partitioned]:
    """Both engines, ready, and connected as yet.

    Raises:
        NoNamespaces: not here.
    """
    links = {"http": ("198.18.71.1", REQUESTS_HOST), "kv": ("198.18.71.5", KV_HOST)}
    with network_namespace(links) as namespace, contextlib.ExitStack() as engines:
        key_file = folder / "fleet-key"
        key_file.write_bytes(_SECRET)
        own = ("--kv-lease", str(LEASE_S), "--dtype", "float32")
        there = ("--host", REQUESTS_HOST, "--kv-host", KV_HOST, "--kv-port", str(KV_PORT))
        prefill = ServedEngine(folder / "p.log", key_file, "prefill", (*own, *there), within=namespace.within)
        engines.callback(prefill.stop)
        decode = ServedEngine(folder / "d.log", key_file, "decode", (*own, "--kv-peers", ADDRESS))
        engines.callback(decode.stop)
        prefill.started()
        decode.started()
        yield Partitioned(prefill, decode, namespace)


def long_prompt(number: int) -> list[int]:
    """Tokens that no other number's begin with; their K/V is more than sockets take at once."""
    return [40 + (number * 31 + place * place) % 1900 for place in range(LONG_PROMPT_TOKENS)]
