"""Which addresses may be dialled, as names, files and the configuration change."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.p2p import peers as peers_module
from pagefleet_kv.p2p.peers import Address, AllowedPeers, look_up, parse_peers


class Names:
    """A name server by hand."""

    def __init__(self, **names: list[str]) -> None:
        self.names = {name.replace("_", "."): found for name, found in names.items()}
        self.asked: list[str] = []
        self.hold = threading.Event()
        self.hold.set()

    def resolve(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        assert self.hold.wait(60)
        if host in self.names:
            return self.names[host]
        if host.replace(".", "").isdigit() or ":" in host:
            return [host]
        raise OSError(-2, "unknown")


def allowed(text: str, names: Names) -> AllowedPeers:
    """As after one look, with no thread of its own."""
    made = AllowedPeers((), names.resolve)
    made._entries = parse_peers(text)
    made.refresh()
    return made


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:8102", "10.0.0.1", 8102),
        ("[fd00::1]:8102", "fd00::1", 8102),
        ("P-0.prefill.svc:1", "p-0.prefill.svc", 1),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65535", "host:x", "host:-1", "fd00::1:80", "host:٣"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="not HOST:PORT"):
        Address.parse(text)
    if text:
        with pytest.raises(KVConfigError, match="give HOST:PORT, dns:NAME:PORT or file:PATH"):
            parse_peers(f"10.0.0.1:8102, {text}")


def test_the_setting_is_parsed(tmp_path: Path) -> None:
    entries = parse_peers(f" 10.0.0.1:8102,dns:prefill:8102 , file:{tmp_path / 'peers'},")
    assert [entry.kind for entry in entries] == ["static", "dns", "file"]
    assert parse_peers(None) == parse_peers("") == ()
    with pytest.raises(KVConfigError):
        parse_peers("dns:prefill")
    with pytest.raises(KVConfigError):
        parse_peers("file:")


def test_only_listed_addresses_are_found() -> None:
    found = allowed("10.0.0.1:8102,host.a:9,[fd00::1]:7", Names(host_a=["10.0.0.7"]))
    assert found.find("10.0.0.1:8102") == "10.0.0.1:8102"
    assert found.find("host.a:9") == found.find("HOST.A:9") == found.find("10.0.0.7:9") == "10.0.0.7:9"
    assert found.find("[FD00::1]:7") == "[fd00::1]:7"
    for stranger in ("10.0.0.1:8103", "10.0.0.2:8102", "host.b:9", "10.0.0.7:8102", "", "nonsense"):
        assert found.find(stranger) is None


def test_names_in_requests_are_never_looked_up() -> None:
    names = Names(host_a=["10.0.0.7"])
    found = allowed("host.a:9", names)
    assert found.find("evil.example:9") is None
    assert names.asked == ["host.a"]


def test_a_name_is_followed_as_it_changes_and_kept_while_it_cannot_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    names = Names(prefill_svc=["10.0.0.1", "10.0.0.2"])
    found = allowed("dns:prefill.svc:8102", names)
    assert [found.find(f"10.0.0.{n}:8102") is not None for n in (1, 2, 3)] == [True, True, False]
    names.names["prefill.svc"] = ["10.0.0.2", "10.0.0.3"]
    found.refresh()
    assert [found.find(f"10.0.0.{n}:8102") is not None for n in (1, 2, 3)] == [False, True, True]
    del names.names["prefill.svc"]
    for _ in range(3):
        found.refresh()
    assert [found.find(f"10.0.0.{n}:8102") is not None for n in (1, 2, 3)] == [False, True, True]
    assert caplog.text.count("cannot be looked up") == 1


def test_a_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "peers"
    found = allowed(f"file:{file}", Names())
    assert "cannot be read" in caplog.text
    file.write_text("# prefill\n10.0.0.1:8102\n\nnot an address\n10.0.0.2:8102 # second\n")
    found.refresh()
    assert found.find("10.0.0.1:8102")
    assert found.find("10.0.0.2:8102")
    assert "has 'not an address'" in caplog.text
    file.write_text("10.0.0.2:8102\n")
    found.refresh()
    assert found.find("10.0.0.1:8102") is None
    file.unlink()
    found.refresh()
    assert found.find("10.0.0.2:8102")


def test_the_thread_finds_new_peers_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "REFRESH_SOONEST_S", 0.0)
    names = Names(prefill=["10.0.0.1"])
    found = AllowedPeers(parse_peers("dns:prefill:8102"), names.resolve)
    while found.find("10.0.0.1:8102") is None:
        time.sleep(0.001)
    names.names["prefill"] = ["10.0.0.2"]
    while found.find("10.0.0.2:8102") is None:  # asking for it has it looked up
        time.sleep(0.001)
    found.close()
    assert found._thread is not None
    found._thread.join(60)  # an engine that ends does not wait as long
    assert not found._thread.is_alive()


class Pause(threading.Event):
    """Tells that somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.set()
        return super().wait(timeout)


def test_who_asked_for_a_stranger_does_not_wait_for_the_next_look_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "REFRESH_SOONEST_S", 3600.0)
    found = AllowedPeers(parse_peers("dns:prefill:8102"), Names(prefill=["10.0.0.1"]).resolve)
    found._ended = ended = Pause()
    assert found.find("10.0.0.9:8102") is None
    assert ended.begun.wait(60)
    found.close()
    assert found._thread is not None
    found._thread.join(60)
    assert not found._thread.is_alive()


def test_peers_are_known_as_soon_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FIRST_LOOK_S", 60.0)
    names = Names(prefill=["10.0.0.1"])
    names.hold.clear()
    answer = threading.Timer(0.2, names.hold.set)  # by a name server that takes its time
    answer.start()
    found = AllowedPeers(parse_peers("dns:prefill:8102"), names.resolve)
    assert found.find("10.0.0.1:8102") is not None
    found.close()
    answer.join()


def test_nobody_waits_for_a_name_server_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "FIRST_LOOK_S", 0.1)
    names = Names(prefill=["10.0.0.1"])
    names.hold.clear()
    found = AllowedPeers(parse_peers("dns:prefill:8102,10.0.0.2:8102,[FD00::0:1]:7"), names.resolve)
    assert found.find("10.0.0.1:8102") is None
    assert found.find("10.0.0.2:8102") == "10.0.0.2:8102", "numbers do not wait for names"
    assert found.find("[fd00::1]:7") == found.find("[fd00::0:1]:7") == "[fd00::1]:7"
    names.hold.set()
    found.close()


def test_a_close_that_comes_before_the_thread_looks_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "REFRESH_S", 600.0)
    found = AllowedPeers((), Names().resolve)
    found.close()
    found._run()
    assert not found._looked.is_set()


def test_what_cannot_be_a_name_is_told_and_nobody_minds(caplog: pytest.LogCaptureFixture) -> None:
    found = AllowedPeers(())
    found._entries = parse_peers(f"{'x' * 80}.y:8102,127.0.0.1:9")
    found.refresh()
    assert "it is no host name" in caplog.text
    assert found.find("127.0.0.1:9") == "127.0.0.1:9"


def test_numbers_are_looked_up_without_asking_anybody() -> None:
    assert look_up("127.0.0.1") == ["127.0.0.1"]
    assert look_up("::1") == ["::1"]
