"""Processes that serve one port: their sockets, and figures of several as those of one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from pathlib import Path

import pytest
from pagefleet_protocol.workers.exposition import Exposition, merge
from pagefleet_protocol.workers.listeners import bind_together
from pagefleet_protocol.workers.siblings import FIGURES, Siblings


@pytest.mark.parametrize("garbage", [b"\xff", b"a 1\n", b"# TYPE a gauge\na x\n", b"# TYPE a gauge\nalone\n"])
def test_what_cannot_be_read_is_left_out(garbage: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several makers
        Exposition(garbage)
    own = b"# TYPE b gauge\nb 1.0\n"
    assert merge(own, [garbage, own]) == b"# TYPE b gauge\nb 2.0\n"


def sibling(folder: Path, index: int, text: bytes, timeout: float = 30.0) -> Siblings:
    return Siblings(folder, index, 3, {FIGURES: lambda: text}, timeout)


async def total(asked: Siblings, own: bytes) -> bytes:
    """The figures of all, as one of them tells them."""
    return merge(own, await asked.ask(FIGURES))


def test_whoever_is_asked_answers_for_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        texts = [b"# TYPE b gauge\nb %d\n" % 10**index for index in range(3)]
        workers = [sibling(tmp_path, index, text) for index, text in enumerate(texts)]
        for worker in workers:
            await worker.start()
        assert {await total(*pair) for pair in zip(workers, texts, strict=True)} == {b"# TYPE b gauge\nb 111.0\n"}
        assert stat.S_IMODE((tmp_path / "0.sock").stat().st_mode) == 0o600
        await workers[2].stop()
        assert await total(workers[0], texts[0]) == b"# TYPE b gauge\nb 11.0\n"
        assert workers[0].num_silent == 1
        again = sibling(tmp_path, 2, b"# TYPE b gauge\nb 5\n")
        await again.start()
        assert await total(workers[0], texts[0]) == b"# TYPE b gauge\nb 16.0\n"
        for worker in (*workers[:2], again):
            await worker.stop()

    asyncio.run(scenario())
    assert not list(tmp_path.iterdir())


def test_a_worker_that_hangs_or_talks_without_end_is_left_out_and_counted(tmp_path: Path) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"# " + b"x" * 2**20)
                await writer.drain()
        writer.close()

    async def scenario() -> None:
        hanging = await asyncio.start_unix_server(hang, tmp_path / "1.sock")
        worker = sibling(tmp_path, 0, b"# TYPE b gauge\nb 1.0\n", timeout=0.1)
        assert await worker.ask(FIGURES) == []
        assert worker.num_silent == 2, "one that hangs, one that is not there"
        hanging.close()
        (tmp_path / "1.sock").unlink(missing_ok=True)
        babbling = await asyncio.start_unix_server(babble, tmp_path / "1.sock")
        patient = sibling(tmp_path, 0, b"# TYPE b gauge\nb 1.0\n")
        assert await patient.ask(FIGURES) == []
        assert patient.num_silent == 2
        babbling.close()
        await asyncio.sleep(0)

    asyncio.run(scenario())


def test_sockets_share_a_port_and_nobody_else_does() -> None:
    first, second = bind_together("127.0.0.1", 0, 2)
    with first, second:
        assert first.getsockname() == second.getsockname()
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bind_together("127.0.0.1", first.getsockname()[1], 2)
        second.listen()
        seen: set[int] = set()
        clients: list[socket.socket] = []
        while len(seen) < 2:
            clients.append(socket.create_connection(first.getsockname()))
            for listener in (first, second):
                with contextlib.suppress(BlockingIOError):
                    listener.accept()[0].close()
                    seen.add(listener.fileno())
        for client in clients:
            client.close()
