"""By which address a machine is reached that has a name."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.ranks.network import named_address


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What names stand for here."""
    known: dict[str, str] = {}

    def look_up(host: str, port: int, **_: Any) -> Any:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (known[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_whoever_names_the_loopback_means_it(hosts: dict[str, str], name: str) -> None:
    hosts[name] = "127.0.0.1"
    assert named_address(name, 29500) == "127.0.0.1"


def test_a_name_that_is_nobodys_is_one_line(hosts: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^master_addr node0 leads nowhere \(Name or service not known\): give the"):
        named_address("node0", 29500)


def test_a_name_by_which_no_other_machine_reaches_this_one_is_one_line(hosts: dict[str, str]) -> None:
    hosts["node0"] = "127.0.1.1"
    with pytest.raises(ConfigError, match=r"^master_addr node0 is 127\.\d\.\d\.1 on node 0, where no other reaches it"):
        named_address("node0", 29500)
