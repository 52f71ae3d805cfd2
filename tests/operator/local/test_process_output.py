"""Logs, probes and pauses: the small parts that a supervisor stands on."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from pagefleet_operator.local.backoff import Backoff
from pagefleet_operator.local.log_files import LogFolder, ProcessLog, printable, without_stamp
from pagefleet_operator.local.probe import probe
from pagefleet_operator.local.process import exit_text


def test_lines_are_told_whole_however_they_arrive(tmp_path: Path) -> None:
    lines: list[str] = []
    log = ProcessLog(LogFolder(tmp_path), "x", lines.append)
    for piece in (b"lo", b"ading\nhalf", b" done\n\n", b"last"):
        log.feed(piece)
    assert lines == ["loading", "half done"]
    log.close()
    assert lines[-1] == log.last_line == "last"
    assert list(log.last_lines) == lines
    assert (tmp_path / "x.log").read_bytes() == b"loading\nhalf done\n\nlast"


def test_what_would_steer_a_terminal_is_removed_from_lines_but_not_from_the_file(tmp_path: Path) -> None:
    lines: list[str] = []
    log = ProcessLog(LogFolder(tmp_path), "x", lines.append)
    log.feed(b"\x1b[31mred\x1b[0m \x1b]0;title\x07\x9b2J\xff text\n")
    assert lines == ["red \ufffd2J\ufffd text"]
    assert b"\x1b[31m" in (tmp_path / "x.log").read_bytes()


def test_a_progress_bar_keeps_its_last_state() -> None:
    assert printable("10 %\r50 %\r100 %\r") == "100 %"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2026-11-21 12:05:43 ERROR server: the engine core died", "server: the engine core died"),
        ("2026-11-21T12:05:43.123Z INFO: loaded", "loaded"),
        ("error: model folder missing: /m", "error: model folder missing: /m"),
        ("ValueError: 2026-11-21 12:05:43 ERROR x", "ValueError: 2026-11-21 12:05:43 ERROR x"),
    ],
)
def test_a_status_needs_no_time_stamp(line: str, message: str) -> None:
    assert without_stamp(line) == message


def test_an_endless_line_is_cut_into_pieces(tmp_path: Path) -> None:
    lines: list[str] = []
    log = ProcessLog(LogFolder(tmp_path), "x", lines.append)
    for _ in range(5):
        log.feed(b"x" * 10_000)
    assert len(lines) == 2
    assert all(len(line) == 16_384 for line in lines)


def test_a_file_that_cannot_be_written_costs_lines_only(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "x.log").mkdir()
    log = ProcessLog(LogFolder(tmp_path), "x", lines.append)
    log.feed(b"hello\n")
    assert lines == ["hello"]
    assert log.num_lost_bytes == 6


def test_a_large_file_is_set_aside(tmp_path: Path) -> None:
    log = ProcessLog(LogFolder(tmp_path, max_file=4096), "x", lambda _: None)
    for _ in range(18):
        log.feed(b"x" * 512)
    assert ((tmp_path / "x.log").stat().st_size, (tmp_path / "x.log.1").stat().st_size) == (1024, 4096)


def total(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_all_logs_together_are_bounded_also_over_restarts(tmp_path: Path) -> None:
    for run in range(5):
        folder = LogFolder(tmp_path, max_file=4096, max_all=10_000)
        for number in range(4):
            log = ProcessLog(folder, f"engine-{run}-{number}", lambda _: None)
            for _ in range(20):
                log.feed(b"x" * 500)
                assert total(tmp_path) <= 10_000
    assert (tmp_path / "engine-4-3.log").exists()
    assert not list(tmp_path.glob("engine-0-*"))


def test_what_is_no_log_is_left_alone_and_what_somebody_removed_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"n" * 5000)
    log = ProcessLog(LogFolder(tmp_path, max_file=1000, max_all=2000), "x", lambda _: None)
    for _ in range(10):
        log.feed(b"x" * 600)
        (tmp_path / "x.log").unlink()
    assert (log.num_lost_bytes, (tmp_path / "notes.txt").stat().st_size) == (0, 5000)


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=1, most_s=10, jitter=lambda: 0.5)
    assert [backoff.next_pause() for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    backoff.reset()
    assert backoff.next_pause() == 1


def test_pauses_differ_by_a_fifth_at_most() -> None:
    assert Backoff(10, 60, lambda: 0.0).next_pause() == 8
    assert Backoff(10, 60, lambda: 0.999).next_pause() == pytest.approx(12, abs=0.01)


def test_a_thousand_failures_do_not_overflow() -> None:
    backoff = Backoff(first_s=1, most_s=60, jitter=lambda: 0.5)
    assert {backoff.next_pause() for _ in range(1000)} <= {1, 2, 4, 8, 16, 32, 60}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", None),
        (b"HTTP/1.0 200\r\n\r\n", None),
        (b"HTTP/1.1 503 Unavailable\r\n\r\n", "/readyz answers 503"),
        (b"SSH-2.0-OpenSSH\r\n", "/readyz did not answer in HTTP"),
        (b"", "/readyz did not answer in HTTP"),
        (b"HTTP/1.1 " + b"2" * 100_000, "/readyz did not answer in HTTP"),
    ],
)
def test_probe_says_what_is_wrong(reply: bytes, said: str | None) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async def scenario() -> str | None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await probe(f"http://127.0.0.1:{port}/readyz", 30)
        finally:
            server.close()

    found = asyncio.run(scenario())
    assert found is None if said is None else found is not None and found.startswith(said)


def test_probe_of_nothing_and_of_silence() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/livez"
        assert await probe(url, 0.1) == "/livez did not answer within 0.1 s"
        server.close()
        await server.wait_closed()
        assert await probe(url, 30) == "does not listen yet"

    asyncio.run(scenario())


def test_how_a_process_ended_is_said_in_words() -> None:
    assert exit_text(3) == "exit status 3"
    assert exit_text(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert "because memory ran out" in exit_text(-signal.SIGKILL)
    assert exit_text(-100) == "killed by signal 100"
