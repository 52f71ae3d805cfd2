"""Logs that nobody reads: the router goes on, and what does not fit is dropped by the line."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
from pagefleet_router.telemetry.line_writer import LineWriter, log_without_waiting

from tests.fakes.free_ports import free_ports

PIPE = 2**16
"""Bytes that a pipe takes before somebody reads."""


def read_until_closed(fd: int) -> list[str]:
    data = b""
    while part := os.read(fd, PIPE):
        data += part
    return data.decode().splitlines()


def test_lines_arrive_whole_and_in_order() -> None:
    read, write = os.pipe()
    writer = LineWriter(write)
    for number in range(1000):
        writer.write(f"line {number}\n")
    writer.close()
    os.close(write)
    assert read_until_closed(read) == [f"line {number}" for number in range(1000)]
    assert writer.num_dropped == 0
    os.close(read)


def test_who_writes_does_not_wait_for_who_reads() -> None:
    read, write = os.pipe()
    writer = LineWriter(write, max_chars=10_000)
    line = "x" * 999 + "\n"
    for _ in range(200):
        writer.write(line)
    dropped = writer.num_dropped
    assert 100 <= dropped < 200, "64 kB are in the pipe at most, and 10 wait"
    writer.close(timeout_s=0.0)
    writer.write(line)
    assert writer.num_dropped == dropped + 1
    assert os.read(read, 1000) == line.encode()
    os.close(read)  # the thread that waits learns that nobody reads
    os.close(write)


def test_a_reader_that_is_gone_ends_the_writing_only() -> None:
    read, write = os.pipe()
    os.close(read)
    writer = LineWriter(write)
    writer.write("a\n")
    writer.close()
    writer.write("b\n")
    os.close(write)


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    """Whoever started the router may have left its output in that state."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    writer = LineWriter(write)
    line = "x" * 999 + "\n"
    for _ in range(200):
        writer.write(line)
    received = b""
    while len(received) < 200 * len(line):
        received += os.read(read, PIPE)
    assert received == 200 * line.encode()
    writer.close()
    os.close(write)
    os.close(read)


def test_a_log_goes_by_the_writer_and_back() -> None:
    read, write = os.pipe()
    logger = logging.getLogger("pagefleet_router.test_line_writer")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        with log_without_waiting(logger.name, write):
            logger.warning("said")
        assert handler.stream is sys.stderr
    finally:
        logger.removeHandler(handler)
    os.close(write)
    assert read_until_closed(read) == ["said"]
    os.close(read)


@pytest.mark.fleet
def test_a_router_whose_output_nobody_reads_answers_on() -> None:
    port = free_ports()
    command = [
        sys.executable, "-m", "pagefleet_router.cli", "--engine", "http://127.0.0.1:9", "--model-name", "m",
        "--port", str(port), "--access-log",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as router:
        try:
            connection = connect(port)
            for _ in range(3 * PIPE // 100):
                connection.request("GET", "/v1/models")
                assert connection.getresponse().read()
            connection.close()
            router.send_signal(signal.SIGTERM)
            assert router.wait(120) == 0
        finally:
            router.kill()


def connect(port: int) -> http.client.HTTPConnection:
    deadline = time.monotonic() + 300
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("GET", "/livez")
            connection.getresponse().read()
        except ConnectionError:
            connection.close()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return connection
