"""What a router tells a prefill engine and a decode engine about one transfer of K/V between them: one header.

Another one comes back from a decode engine to which no K/V came: whose doing that was.

The router signs it with the fleet key, for one incarnation of one engine. So nobody else can aim an engine at a peer,
even who reaches it past the router; and engines compare the peer with those that they were configured with besides.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from pagefleet_protocol.fleet_key import FleetKey

KV_TRANSFER = "x-pagefleet-kv-transfer"
"""Written by routers alone: what a client sends under this name goes no further."""

KvRole = Literal["both", "prefill", "decode"]
"""What an engine is for: `both` computes whole requests, the others can too, and are made for their part."""
Leg = Literal["prefill", "decode"]
OnFailure = Literal["recompute", "fail"]

KV_FAULT = "x-pagefleet-kv-fault"
"""Beside `kv_load_failed` in a decode engine's answer, or `invalid_handoff` in either's: a `KvFault`. Engines that know
of none send none."""
KvFault = Literal["unknown_peer", "incompatible", "unreachable", "transfer_failed", "not_asked", "not_believed"]
"""Why K/V did not come:

- `unknown_peer`: decode is not configured to ask that prefill engine, or does not know it yet;
- `incompatible`: the two have no version, kind of K/V or data plane in common;
- `unreachable`: prefill says nothing, or the connection to it broke;
- `transfer_failed`: prefill gave it up, or what came was late or not right;
- `not_asked`: decode stops, has too many peers, or was told of an engine that is another one by now;
- `not_believed`: the engine passes none that it is told of in this way: it has another fleet key, or began anew.
"""

_VALUE = re.compile(
    r"leg=(prefill|decode);id=([0-9a-f]{32});peer=([0-9a-f]{32});at=([A-Za-z0-9.:\[\]_-]{1,270}|);"
    r"fail=(recompute|fail);mac=([0-9a-f]{64})"
)


class KvHandoffError(ValueError):
    """The header is no router's, or was not meant for this engine."""


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """One leg of a request whose prompt one engine computes and another goes on from."""

    leg: Leg
    transfer_id: str
    """32 hexadecimal digits, drawn by the router for each attempt."""
    peer_incarnation: str
    """Of the engine of the other leg."""
    peer_address: str = ""
    """HOST:PORT of the prefill engine's control socket; empty in the prefill leg, which is asked and never asks."""
    on_failure: OnFailure = "recompute"
    """What decode does without the K/V: compute the prompt itself, or end with `kv_load_failed` (503, no token sent),
    so that the router tries another pair."""
    told: str = field(default="", compare=False)
    """Incarnation for which the header was signed, once it is read: of an engine with several data ranks, which one."""

    def encode(self, key: FleetKey, incarnation: str) -> str:
        """Return the header's value for the engine of that incarnation, or the data rank of one that has several."""
        value = (
            f"leg={self.leg};id={self.transfer_id};peer={self.peer_incarnation};at={self.peer_address};"
            f"fail={self.on_failure}"
        )
        return f"{value};mac={_mac(key, incarnation, value)}"


def decode_kv_transfer(value: str, key: FleetKey, *incarnations: str) -> KvTransfer:
    """Parse and check the header's value, which is for any of these.

    Raises:
        KvHandoffError: it is something else, is not signed with the fleet's key, or is for another incarnation.
    """
    found = _VALUE.fullmatch(value)
    if found is None:
        raise KvHandoffError(f"{KV_TRANSFER} is not valid")
    signed = value[: found.start(6) - len(";mac=")]
    told = [one for one in incarnations if hmac.compare_digest(found[6], _mac(key, one, signed))]
    if not told:
        raise KvHandoffError(f"{KV_TRANSFER} is not from a router of this fleet, or is for another engine")
    leg: Leg = "prefill" if found[1] == "prefill" else "decode"
    if (leg == "decode") != bool(found[4]):
        raise KvHandoffError(f"{KV_TRANSFER} has an address in the wrong leg")
    return KvTransfer(leg, found[2], found[3], found[4], "fail" if found[5] == "fail" else "recompute", told[0])


def read_kv_fault(value: str) -> KvFault | None:
    """Parse the value of `KV_FAULT`; None for words of a later version."""
    return next((fault for fault in get_args(KvFault) if fault == value), None)


def _mac(key: FleetKey, incarnation: str, value: str) -> str:
    own = hmac.new(key.secret, b"pagefleet kv handoff 1", hashlib.sha256).digest()
    return hmac.new(own, f"{incarnation}|{value}".encode(), hashlib.sha256).hexdigest()
