"""What the driver reaches by the names that state machines use."""

from __future__ import annotations

from typing import Any, cast

from pagefleet_kv.p2p.driver import Driver, DriverParts
from pagefleet_kv.p2p.peers import AllowedPeers, parse_peers
from pagefleet_kv.p2p.transfer.actions import Connect, Dial, HangUp

PEER = "prefill.svc:8102"


class Noted:
    """A control plane and a data plane that only note what is reached."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def dial(self, address: str, numeric: str) -> None:
        self.calls.append(("dial", address, numeric))

    def hang_up(self, address: str) -> None:
        self.calls.append(("hang up", address))

    def connect(self, peer: str, host: str, invitation: bytes) -> None:
        self.calls.append(("connect", peer, host))


def nothing(_: object) -> None:
    """Nobody is told."""


def test_data_goes_where_control_went_whatever_the_name_means_by_now() -> None:
    names = {"prefill.svc": ["10.0.0.1"]}
    peers = AllowedPeers((), lambda host: names[host])
    peers._entries = parse_peers(f"dns:{PEER}")
    peers.refresh()
    noted = Noted()
    parts = DriverParts(*cast(Any, (None, None, noted, {"tcp": noted}, peers, None, b"")))
    driver = Driver(parts, nothing)
    driver.carry_out([Dial(PEER)])
    names["prefill.svc"] = ["10.0.0.2", "10.0.0.1"]
    peers.refresh()
    assert peers.find(PEER) == "10.0.0.2:8102"
    driver.carry_out([Connect("tcp", "p" * 32, PEER, b"")])
    driver.carry_out([HangUp(PEER), Connect("tcp", "p" * 32, PEER, b""), Dial(PEER)])
    assert noted.calls == [
        ("dial", PEER, "10.0.0.1:8102"),
        ("connect", "p" * 32, "10.0.0.1"),
        ("hang up", PEER),
        ("dial", PEER, "10.0.0.2:8102"),
    ]
