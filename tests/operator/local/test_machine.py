"""Ports, GPUs and threads of one machine, shared out."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from pagefleet_operator.errors import PortError
from pagefleet_operator.local.launcher import base_url
from pagefleet_operator.local.machine import (
    EnginePorts,
    Gpus,
    Ports,
    check_port,
    end_of_ports,
    find_gpus,
    free_port,
    free_row,
    num_cores,
    thread_flags,
)

LOOPBACK = "127.0.0.1"


def test_the_first_router_gets_the_port_and_others_the_next_free() -> None:
    with socket.socket() as taken:
        first = free_port(LOOPBACK)
        ports = Ports(LOOPBACK, first)
        assert ports.claim("a-router-0") == first
        taken.bind((LOOPBACK, 0))
        taken.listen()
        second = ports.claim("a-router-1")
        assert first < second != taken.getsockname()[1]
        assert ports.claim("a-router-0") == first
        ports.release("a-router-0")
        assert ports.claim("b-router-0") == first


def _taken_after_a_free_one() -> socket.socket:
    """Listen on a port whose lower neighbour nobody uses."""
    while True:
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            taken = socket.socket()
            try:
                taken.bind((LOOPBACK, free.getsockname()[1] + 1))
            except OSError:
                taken.close()
                continue
            taken.listen()
            return taken


def test_a_taken_port_is_skipped_unless_it_is_the_one_asked_for() -> None:
    with _taken_after_a_free_one() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"port {port} on 127.0.0.1 is in use: stop what listens there, or choose"):
            Ports(LOOPBACK, port).claim("a-router-0")
        ports = Ports(LOOPBACK, port - 1)
        ports.claim("a-router-0")
        assert ports.claim("a-router-1") > port


def test_port_zero_takes_any() -> None:
    ports = Ports(LOOPBACK, 0)
    first, second = ports.claim("a"), ports.claim("b")
    assert first != second
    assert ports.claim("a") == first


def test_an_address_that_is_not_ours_is_told() -> None:
    with pytest.raises(PortError, match=r"cannot listen on 192\.0\.2\.1 port 8000"):
        check_port("192.0.2.1", 8000)
    with pytest.raises(PortError, match=r"--host no\.such\.invalid: there is no such address"):
        check_port("no.such.invalid", 8000)


def test_gpus_are_lent_to_one_engine_at_a_time() -> None:
    gpus = Gpus(["0", "1"])
    assert gpus.claim("a", 1) == ("0",)
    assert gpus.claim("b", 1) == ("1",)
    assert gpus.claim("c", 1) is None
    assert gpus.claim("a", 1) == ("0",), "a restart keeps its device"
    gpus.release("a")
    assert gpus.claim("c", 1) == ("0",)
    assert gpus.claim("d", 0) == ()


def test_gpus_are_found_by_device_files_or_by_what_is_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert find_gpus({}, tmp_path) == ("0", "1")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-x"}, tmp_path) == ("3", "GPU-x")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()


@pytest.mark.parametrize(
    ("args", "cpu", "cores", "engines", "flags"),
    [
        ((), None, 8, 2, ("--num-threads", "4")),
        ((), None, 2, 3, ("--num-threads", "1")),
        ((), None, 4, 0, ("--num-threads", "4")),
        ((), "2500m", 8, 2, ("--num-threads", "2")),
        ((), "500m", 8, 2, ("--num-threads", "1")),
        (("--num-threads", "3"), "1", 8, 2, ()),
        (("--num-threads=3",), None, 8, 2, ()),
    ],
)
def test_threads_are_what_is_asked_for_or_an_equal_share(
    args: tuple[str, ...], cpu: str | None, cores: int, engines: int, flags: tuple[str, ...]
) -> None:
    assert thread_flags(args, cpu, cores, engines) == flags


def test_this_machine_has_a_core() -> None:
    assert num_cores() >= 1


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("box.lan", "http://box.lan:80"),
    ],
)
def test_a_url_can_be_used_on_this_machine(host: str, url: str) -> None:
    assert base_url(host, 80) == url


def test_a_row_of_ports_is_free_and_leaves_the_one_that_is_taken() -> None:
    for _ in range(50):
        taken = free_port(LOOPBACK)
        row = free_row(LOOPBACK, 3, (taken,))
        assert len(row) == 3
        assert taken not in row
        for port in row:
            check_port(LOOPBACK, port)


def test_two_engines_are_never_told_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = EnginePorts(LOOPBACK)
    (first,) = ports.claim("a-engine-0", 3)
    drawn = iter([first.start, first.start + 2, *(free_row(LOOPBACK, 4).start for _ in range(50))])
    monkeypatch.setattr("random.randrange", lambda *_: next(drawn))
    rows = ports.claim("a-engine-1", 2, 1)
    assert [len(row) for row in rows] == [2, 1]
    assert not {*first} & {port for row in rows for port in row}


def test_an_engine_that_starts_again_gives_its_ports_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = EnginePorts(LOOPBACK)
    (first,) = ports.claim("a-engine-0", 2)
    monkeypatch.setattr("random.randrange", lambda *_: first.start)
    assert ports.claim("a-engine-0", 2) == [first]
    ports.release("a-engine-0")
    assert ports.claim("b-engine-0", 2) == [first]
    with pytest.raises(PortError, match=r"no 2 ports in a row are free on 127\.0\.0\.1"):
        ports.claim("c-engine-0", 2)


@pytest.mark.parametrize(
    ("given_away", "end"),
    [("32768\t60999\n", 32768), ("49152\t65535\n", 49152), ("1024\t65535\n", 32768), (None, 32768)],
)
def test_no_port_that_the_system_gives_away_is_told(tmp_path: Path, given_away: str | None, end: int) -> None:
    file = tmp_path / "ip_local_port_range"
    if given_away is not None:
        file.write_text(given_away)
    assert end_of_ports(file) == end


def test_gpus_are_kept_for_those_to_whom_they_were_promised() -> None:
    gpus = Gpus(("0", "1", "2", "3", "4"))
    assert gpus.room("a-engine") == 5
    gpus.promise({"a-engine": 1, "b-engine": 2})
    assert (gpus.room("a-engine"), gpus.room("b-engine"), gpus.room("c-engine")) == (3, 4, 2)
    gpus.claim("a-engine-0", 1)
    gpus.claim("a-engine-1", 1)
    assert (gpus.room("a-engine"), gpus.room("b-engine")) == (3, 3)
    gpus.claim("b-engine-0", 3)
    assert gpus.room("a-engine") == 2
    gpus.promise({})
    gpus.release("b-engine-0")
    assert gpus.room("a-engine") == 5
